"""How a Megatron model comes by DCP attention: in its spec before it is built, or in place afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_dcp.core_attention import SDPACoreAttention
from megatron_dcp.layers.block import SHORT_LAYER, is_plain
from megatron_dcp.layers.gqa import DCPSelfAttention
from megatron_dcp.layers.linear import DCPColumnParallelLinear, DCPRowParallelLinear
from megatron_dcp.layers.mla import DCPMLASelfAttention
from megatron_dcp.layers.model_info import attention_layers
from megatron_dcp.layers.moe import DCPMoELayer, check_router, unsupported_experts

_DCP_CLASS: dict[type, type] = {SelfAttention: DCPSelfAttention, MLASelfAttention: DCPMLASelfAttention}
_SHORT_LINEAR: dict[type, type] = {
    ColumnParallelLinear: DCPColumnParallelLinear,
    RowParallelLinear: DCPRowParallelLinear,
}
# Layers of a HybridModel, by the symbol of its pattern, that keep something else than keys and values.
_STATEFUL = {"M": "Mamba", "G": "gated delta net (GDN)", "D": "sparse attention"}


def dcp_layer_spec(spec: Any) -> Any:
    """A copy of a layer or block spec whose self-attention is the DCP one.

    Args:
        spec: ``ModuleSpec`` of a transformer layer, or ``TransformerBlockSubmodules``, e.g. from
            ``get_gpt_layer_local_spec`` or ``get_gpt_layer_with_transformer_engine_spec``. Left unchanged.

    Raises:
        ValueError: The spec holds no self-attention of a class that DCP knows.
    """
    spec = copy.deepcopy(spec)
    for layer in getattr(spec, "layer_specs", None) or [spec]:
        attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
        module: Any = getattr(attention, "module", None)
        if attention is None or (module not in _DCP_CLASS and module not in _DCP_CLASS.values()):
            raise ValueError(
                f"self_attention={module!r} has no DCP form; use a layer spec whose self-attention is one of "
                f"{', '.join(c.__name__ for c in _DCP_CLASS)}"
            )
        attention.module = _DCP_CLASS.get(module, module)
    return spec


def enable_dcp(model: torch.nn.Module) -> Any:
    """Give an existing model a decode path over a sharded KV cache. In place; parameters are shared.

    No weight is copied, no name in the state dict changes and the training forward stays Megatron's own, so that
    training and generation take turns on one model. Layers and linear modules of Megatron's own classes also get a
    short way through inference (:mod:`~megatron_dcp.layers.block`, :mod:`~megatron_dcp.layers.linear`). Calling it
    again does nothing.

    Args:
        model: Megatron ``GPTModel``, or ``HybridModel`` with a pattern of ``*`` or ``+`` (attention), ``-`` (MLP) and
            ``E`` (experts); bare or wrapped (``DistributedDataParallel``, ``Float16Module``, …).

    Returns:
        The bare model.

    Raises:
        ValueError: The model uses something that the decode path does not know; it names the field.
    """
    gpt = unwrap(model)
    check_supported(gpt.config, getattr(gpt, "position_embedding_type", "rope"))
    _check_pattern(gpt)
    attentions = [layer.self_attention for layer in attention_layers(gpt)]
    for attention in attentions:  # all or none: look at every layer before the first is changed
        if type(attention) not in _DCP_CLASS and type(attention) not in _DCP_CLASS.values():
            raise ValueError(
                f"layer {attention.layer_number} has attention {type(attention).__name__}, which has no DCP form; "
                f"supported: {', '.join(c.__name__ for c in _DCP_CLASS)}"
            )
    moe_layers = [layer for layer in gpt.decoder.layers if isinstance(layer.mlp, MoELayer)]
    for layer in moe_layers:
        check_router(layer.mlp)
        if type(layer) not in SHORT_LAYER and type(layer) not in SHORT_LAYER.values() or not is_plain(layer):
            raise ValueError(
                f"layer {layer.layer_number} has experts and more than Megatron's own TransformerLayer computes "
                f"({type(layer).__name__}), which DCP decoding does not know"
            )
    for layer in moe_layers:
        layer.mlp.__class__ = DCPMoELayer
    for attention in attentions:
        attention.__class__ = _DCP_CLASS.get(type(attention), type(attention))
    for module in gpt.modules():
        if type(module) in SHORT_LAYER and is_plain(module):
            module.__class__ = SHORT_LAYER[type(module)]
        module.__class__ = _SHORT_LINEAR.get(type(module), type(module))
    return gpt


def _check_pattern(gpt: Any) -> None:
    """Raise ``ValueError`` unless every layer of a ``HybridModel`` decodes, and one on this stage has a cache."""
    pattern = "".join(getattr(gpt.decoder, "layer_type_list", None) or ())
    for symbol, kind in _STATEFUL.items():
        if symbol in pattern:
            raise ValueError(
                f"hybrid_layer_pattern has {pattern!r} on this rank: {kind} layers ({symbol!r}) are not supported by "
                "DCP decoding for now; a pattern may have '*' and '+' (attention), '-' (MLP) and 'E' (experts)"
            )
    if pattern and not attention_layers(gpt):
        raise ValueError(
            f"hybrid_layer_pattern has {pattern!r} on this pipeline stage, which has no attention layer and so no KV "
            "cache; use fewer stages"
        )


def unwrap(model: Any) -> Any:
    """The bare ``GPTModel`` or ``HybridModel`` inside data-parallel and precision wrappers."""
    while not hasattr(model, "decoder"):
        if not hasattr(model, "module"):
            raise ValueError(f"{type(model).__name__} is no Megatron GPTModel: it has neither .decoder nor .module")
        model = model.module
    return model


def check_supported(config: Any, position_embedding_type: str) -> None:
    """Raise ``ValueError`` naming the first field of ``TransformerConfig`` that the decode path does not know."""
    for field, value, why in _unsupported(config, position_embedding_type):
        raise ValueError(f"{field}={value!r} is not supported by DCP decoding: {why}")


def _unsupported(config: Any, position_embedding_type: str) -> Iterator[tuple[str, Any, str]]:
    if position_embedding_type not in ("rope", "learned_absolute", "none"):
        yield "position_embedding_type", position_embedding_type, "use 'rope', 'learned_absolute' or 'none'"
    simple = {
        "cache_mla_latents": "DCP keeps the latents in its own cache; set it to False",
        "experimental_attention_variant": "sparse attention is not there yet",
        "attention_output_gate": "gated attention is not there yet",
        "sequence_parallel": "build the inference model with sequence_parallel=False",
        "flash_decode": "Megatron's own decode kernel would be bypassed; set it to False",
        "fp8": "low-precision weights are not there yet",
    }
    for field, why in simple.items():
        if getattr(config, field, None):
            yield field, getattr(config, field), why
    window = getattr(config, "window_size", None)
    if window and (config.multi_latent_attention or len(window) != 2 or window[0] < 0 or window[1] != 0):
        yield "window_size", window, "use (keys before a token that it sees, 0), and no latent attention"
    if config.multi_latent_attention and config.normalization != "RMSNorm":
        yield "normalization", config.normalization, "latent attention is known with RMSNorm"
    if config.multi_latent_attention and getattr(config, "softmax_type", "vanilla") != "vanilla":
        yield "softmax_type", config.softmax_type, "latent attention is known without sinks"
    if config.context_parallel_size > 1:
        yield "context_parallel_size", config.context_parallel_size, "use decode_context_parallel_size instead"
    if (config.virtual_pipeline_model_parallel_size or 1) > 1:
        chunks = config.virtual_pipeline_model_parallel_size
        yield "virtual_pipeline_model_parallel_size", chunks, "a stage is one run of layers; set it to None"
    yield from unsupported_experts(config)


def sdpa_layer_spec(spec: Any) -> Any:
    """A copy of a layer spec whose core attention is :class:`SDPACoreAttention`, for training without a GPU."""
    spec = copy.deepcopy(spec)
    for layer in getattr(spec, "layer_specs", None) or [spec]:
        layer.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return spec
