"""Megatron layers that decode from a sharded KV cache: they compose cache, attention and communication."""

from megatron_dcp.core_attention import SDPACoreAttention
from megatron_dcp.layers.context import DCPContext, StepPlan
from megatron_dcp.layers.gqa import DCPSelfAttention
from megatron_dcp.layers.latent_plan import LatentShape, plan_latent
from megatron_dcp.layers.mla import DCPMLASelfAttention
from megatron_dcp.layers.model_info import AttentionShape, cached_kv_heads, rotary_table
from megatron_dcp.layers.moe import DCPMoELayer, check_expert_groups
from megatron_dcp.layers.specs import dcp_layer_spec, enable_dcp, sdpa_layer_spec

__all__ = [
    "AttentionShape",
    "DCPMLASelfAttention",
    "DCPMoELayer",
    "check_expert_groups",
    "LatentShape",
    "cached_kv_heads",
    "plan_latent",
    "rotary_table",
    "DCPContext",
    "DCPSelfAttention",
    "SDPACoreAttention",
    "StepPlan",
    "dcp_layer_spec",
    "enable_dcp",
    "sdpa_layer_spec",
]
