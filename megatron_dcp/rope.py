"""Rotary position embedding by global position. Plain tensor math.

Shapes: ``T`` tokens, ``N`` heads, ``H`` head dim, ``R`` rotated dims (``R <= H``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dcp.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Inverse frequencies of the model's RoPE, fp32 ``[R/2]``, with its scaling applied.

    Knows ``default`` (unscaled), ``linear`` (Chen et al. 2023) and ``llama3`` (Llama 3.1 model card).

    Raises:
        ValueError: Any other ``rope_type``, or a scaling that lacks a parameter.
    """
    rotated = int(config.kv_channels * config.rotary_percent)
    inv_freq = 1.0 / (config.rotary_base ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))
    scaling = config.rope_scaling or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type == "default":
        return inv_freq
    if rope_type not in ("linear", "llama3"):
        raise ValueError(f"rope_type={rope_type!r} is not supported; supported are default, linear and llama3")
    needed = ["factor"]
    if rope_type == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [name for name in needed if name not in scaling]
    if missing:
        raise ValueError(f"rope_scaling of type {rope_type!r} lacks {', '.join(missing)}; it has {sorted(scaling)}")
    if rope_type == "linear":
        return inv_freq / scaling["factor"]
    return _llama3(inv_freq, **{name: float(scaling[name]) for name in needed})


def _llama3(
    inv_freq: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """Slow dimensions are stretched by ``factor``, fast ones kept, those between blended linearly in 1/wavelength."""
    turns = original_max_position_embeddings * inv_freq / (2 * math.pi)
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / factor)


@dataclass(frozen=True, kw_only=True)
class RotaryTable:
    """What turns positions into rotations.

    Attributes:
        inv_freq: fp32 ``[R/2]``.
        interleaved: Pairs are (0, 1), (2, 3), … instead of (0, R/2), (1, R/2 + 1), …
        scale: Factor on cos and sin (yarn's concentration).
    """

    inv_freq: Tensor
    interleaved: bool = False
    scale: float = 1.0

    def cos_sin(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``[T, 1, R]`` of global positions, computed in fp32, in ``dtype``."""
        angles = torch.outer(positions_T.to(torch.float32), self.inv_freq)
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)


def rotate(x_TNH: Tensor, cos_T1R: Tensor, sin_T1R: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first ``R`` dims of every head (Su et al. 2021); the rest passes through.

    Args:
        x_TNH: Queries or keys ``[T, N, H]``.
        cos_T1R: From :meth:`RotaryTable.cos_sin`, at the tokens' global positions.
    """
    rotated = cos_T1R.shape[-1]
    x, rest = x_TNH[..., :rotated], x_TNH[..., rotated:]
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-x[..., rotated // 2 :], x[..., : rotated // 2]), dim=-1)
    out = torch.addcmul(x * cos_T1R, turned, sin_T1R)
    return out if rest.shape[-1] == 0 else torch.cat((out, rest), dim=-1)
