"""Megatron layers that decode from a sharded KV cache: they compose cache, attention and communication."""

from megatron_dcp.layers.context import DCPContext, StepPlan
from megatron_dcp.layers.gqa import DCPSelfAttention
from megatron_dcp.layers.specs import SDPACoreAttention, dcp_layer_spec, enable_dcp, sdpa_layer_spec

__all__ = [
    "DCPContext",
    "DCPSelfAttention",
    "SDPACoreAttention",
    "StepPlan",
    "dcp_layer_spec",
    "enable_dcp",
    "sdpa_layer_spec",
]
