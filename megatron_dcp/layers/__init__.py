"""Megatron layers that decode from a sharded KV cache: they compose cache, attention and communication."""

from megatron_dcp.attention_shape import AttentionShape, LatentShape
from megatron_dcp.core_attention import SDPACoreAttention
from megatron_dcp.layers.context import DCPContext, KindPlan, StepPlan
from megatron_dcp.layers.gqa import DCPSelfAttention
from megatron_dcp.layers.latent_plan import LatentPlan, expanded_spec, plan_latent
from megatron_dcp.layers.mla import DCPMLASelfAttention
from megatron_dcp.layers.model_info import (
    attention_layers,
    cached_kv_heads,
    layer_windows,
    rotary_table,
)
from megatron_dcp.layers.moe import DCPMoELayer, check_expert_groups, experts_over_dcp
from megatron_dcp.layers.prefill import Chunk, is_striped, plan_striped
from megatron_dcp.layers.specs import dcp_layer_spec, enable_dcp, sdpa_layer_spec

__all__ = [
    "AttentionShape",
    "Chunk",
    "DCPContext",
    "DCPMLASelfAttention",
    "DCPMoELayer",
    "DCPSelfAttention",
    "KindPlan",
    "LatentPlan",
    "LatentShape",
    "SDPACoreAttention",
    "StepPlan",
    "attention_layers",
    "cached_kv_heads",
    "check_expert_groups",
    "dcp_layer_spec",
    "enable_dcp",
    "expanded_spec",
    "experts_over_dcp",
    "is_striped",
    "layer_windows",
    "plan_latent",
    "plan_striped",
    "rotary_table",
    "sdpa_layer_spec",
]
