"""What Gemma's layers have and Megatron-Core has not: norms behind projections, scaled embeddings, RoPE of two bases.

Parameters have the names that Megatron-Bridge gives them, so that its checkpoints are read.

Shapes: ``s`` tokens, ``b`` sequences, ``h`` hidden size, ``R`` rotated dims.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor


class ZeroCenteredRMSNorm(torch.nn.Module):
    """RMS norm that multiplies with ``1 + weight``, in fp32 (Gemma, 2024). Takes what Megatron's norms take."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalised over the last dimension, in ``x``'s dtype."""
        return torch.nn.functional.rms_norm(x.float(), self.weight.shape, self.weight.float() + 1.0, self.eps).to(
            x.dtype
        )


class PostNormRowParallelLinear(RowParallelLinear):
    """``RowParallelLinear`` with a norm behind the sum over the tensor-parallel ranks."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = ZeroCenteredRMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """The normalised outputs, and the bias of the layer without one: ``None``."""
        out, bias = super().forward(input_)
        return self.post_layernorm(out), bias


class ScaledEmbedding(LanguageModelEmbedding):
    """Embeddings times ``h ** 0.5``, which is rounded to their dtype first."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """``[s, b, h]``."""
        embedded = super().forward(*args, **kwargs)
        return embedded * torch.tensor(self.config.hidden_size**0.5, dtype=embedded.dtype, device=embedded.device)


def give_windows_their_rotary(model: Any, inv_freq: Tensor, slides: list[bool]) -> None:
    """Let layers with a sliding window rotate by other frequencies than the others, in the training forward.

    ``model.rotary_pos_emb`` becomes a pair; ``rope_local`` is the windows' own.

    Args:
        model: ``GPTModel`` whose ``rotary_pos_emb`` is that of the other layers.
        inv_freq: fp32 ``[R / 2]``.
        slides: For each layer of the whole model whether it has a window.
    """
    pair = _RotaryPair(model.rotary_pos_emb, inv_freq)
    model.rotary_pos_emb = pair
    for layer in model.decoder.layers:
        choose = _Choose(int(slides[layer.layer_number - 1]))
        layer.self_attention.register_forward_pre_hook(choose, with_kwargs=True)


class _RotaryPair(torch.nn.Module):
    """Two of Megatron's rotary embeddings that answer together, stacked."""

    def __init__(self, rope: Any, local_inv_freq: Tensor) -> None:
        super().__init__()
        self.rope = rope
        self.rope_local = copy.copy(rope)
        self.rope_local.inv_freq = local_inv_freq

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("rope"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """``[2, s, 1, 1, R]``: first for layers without a window."""
        return torch.stack((self.rope(*args, **kwargs), self.rope_local(*args, **kwargs)))


class _Choose:
    """Hands an attention layer its own of two rotary embeddings."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        pair = kwargs.get("rotary_pos_emb")
        return args, kwargs if pair is None else kwargs | {"rotary_pos_emb": pair[self.index]}
