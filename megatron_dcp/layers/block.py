"""Megatron's transformer layers with a short way through a decode step.

A ``HybridModel`` has layers of attention alone, and of an MLP or experts alone, each of a class of its own; the part
that is missing is an ``IdentityOp``.

Shapes: ``T`` tokens, ``h`` hidden size.
"""

from __future__ import annotations

from typing import Any

from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from torch import Tensor

from megatron_dcp.layers.context import DCPContext
from megatron_dcp.layers.moe import DCPMoELayer


class _ShortWay(TransformerLayer):
    """A layer whose forward with a :class:`DCPContext` is the layer's equation and nothing else.

    Megatron's own forward also serves dropout, recomputation, offloading and profiling; without a ``DCPContext`` every
    call goes there.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """``[T, 1, h]`` → ``[T, 1, h]``, and Megatron's unused cross-attention context."""
        ctx = kwargs.get("inference_context")
        if not isinstance(ctx, DCPContext):
            return super().forward(*args, **kwargs)
        x_T1h: Tensor = kwargs["hidden_states"] if not args else args[0]
        if not isinstance(self.self_attention, IdentityOp):
            x_T1h = _add(x_T1h, *self.self_attention(self.input_layernorm(x_T1h), None, inference_context=ctx))
        if isinstance(self.mlp, IdentityOp):
            return x_T1h, None
        normed_T1h = self.pre_mlp_layernorm(x_T1h)
        if isinstance(self.mlp, DCPMoELayer):
            return x_T1h + self.mlp.decode(normed_T1h, ctx), None
        return _add(x_T1h, *self.mlp(normed_T1h)), None


class DCPTransformerLayer(_ShortWay):
    """``TransformerLayer``, so."""


class DCPMLPLayer(_ShortWay, MLPLayer):
    """``MLPLayer``, so."""


class DCPMoETransformerLayer(_ShortWay, MoETransformerLayer):
    """``MoETransformerLayer``, so."""


SHORT_LAYER: dict[type, type] = {
    TransformerLayer: DCPTransformerLayer,
    MLPLayer: DCPMLPLayer,
    MoETransformerLayer: DCPMoETransformerLayer,
}


def is_plain(layer: Any) -> bool:
    """Whether the layer's equation is norm, attention, add, norm, MLP or experts, add, or one half of that."""
    return (
        isinstance(layer.cross_attention, IdentityOp)
        and isinstance(layer.pre_cross_attn_layernorm, IdentityOp)
        and isinstance(layer.mlp, MLP | MoELayer | IdentityOp)
        and not layer.config.fp32_residual_connection
        and not layer.config.apply_residual_connection_post_layernorm
        and not getattr(layer.config, "inference_fuse_tp_communication", False)
    )


def _add(residual: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
    return residual + out if bias is None else residual + (out + bias)
