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
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_dcp.core_attention import SDPACoreAttention
from megatron_dcp.layers.block import DCPTransformerLayer, is_plain
from megatron_dcp.layers.gqa import DCPSelfAttention
from megatron_dcp.layers.linear import DCPColumnParallelLinear, DCPRowParallelLinear
from megatron_dcp.layers.mla import DCPMLASelfAttention
from megatron_dcp.layers.moe import DCPMoELayer, check_router, unsupported_experts

_DCP_CLASS: dict[type, type] = {SelfAttention: DCPSelfAttention, MLASelfAttention: DCPMLASelfAttention}
_SHORT_CLASS: dict[type, type] = {
    ColumnParallelLinear: DCPColumnParallelLinear,
    RowParallelLinear: DCPRowParallelLinear,
}


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
    """Give an existing GPT model a decode path over a sharded KV cache. In place; parameters are shared.

    No weight is copied, no name in the state dict changes and the training forward stays Megatron's own, so that
    training and generation take turns on one model. Layers and linear modules of Megatron's own classes also get a
    short way through inference (:mod:`~megatron_dcp.layers.block`, :mod:`~megatron_dcp.layers.linear`). Calling it
    again does nothing.

    Args:
        model: Megatron ``GPTModel``, bare or wrapped (``DistributedDataParallel``, ``Float16Module``, …).

    Returns:
        The bare ``GPTModel``.

    Raises:
        ValueError: The model uses something that the decode path does not know; it names the field.
    """
    gpt = unwrap(model)
    check_supported(gpt.config, getattr(gpt, "position_embedding_type", "rope"))
    attentions = [layer.self_attention for layer in gpt.decoder.layers]
    for attention in attentions:  # all or none: look at every layer before the first is changed
        if type(attention) not in _DCP_CLASS and type(attention) not in _DCP_CLASS.values():
            raise ValueError(
                f"layer {attention.layer_number} has attention {type(attention).__name__}, which has no DCP form; "
                f"supported: {', '.join(c.__name__ for c in _DCP_CLASS)}"
            )
    moe_layers = [layer for layer in gpt.decoder.layers if isinstance(layer.mlp, MoELayer)]
    for layer in moe_layers:
        check_router(layer.mlp)
        if type(layer) not in (TransformerLayer, DCPTransformerLayer) or not is_plain(layer):
            raise ValueError(
                f"layer {layer.layer_number} has experts and more than Megatron's own TransformerLayer computes "
                f"({type(layer).__name__}), which DCP decoding does not know"
            )
    for layer in moe_layers:
        layer.mlp.__class__ = DCPMoELayer
    for attention in attentions:
        attention.__class__ = _DCP_CLASS.get(type(attention), type(attention))
    for module in gpt.modules():
        if type(module) is TransformerLayer and is_plain(module):
            module.__class__ = DCPTransformerLayer
        module.__class__ = _SHORT_CLASS.get(type(module), type(module))
    return gpt


def unwrap(model: Any) -> Any:
    """The ``GPTModel`` inside data-parallel and precision wrappers."""
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
