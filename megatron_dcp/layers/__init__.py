"""Megatron layers that decode from a sharded KV cache: they compose cache, attention and communication."""

from megatron_dcp.core_attention import SDPACoreAttention
from megatron_dcp.layers.context import DCPContext, StepPlan
from megatron_dcp.layers.gqa import DCPSelfAttention
from megatron_dcp.layers.specs import dcp_layer_spec, enable_dcp, sdpa_layer_spec

__all__ = [
    "DCPContext",
    "DCPSelfAttention",
    "SDPACoreAttention",
    "StepPlan",
    "dcp_layer_spec",
    "enable_dcp",
    "sdpa_layer_spec",
]
