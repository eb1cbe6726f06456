"""Rotary position embedding by global position. Plain tensor math.

Shapes: ``T`` tokens, ``N`` heads, ``H`` head dim, ``R`` rotated dims (``R <= H``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.model_config import ModelConfig

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Inverse frequencies of the model's RoPE, fp32 ``[R/2]``, with its scaling applied.

    Knows ``default`` (unscaled), ``linear`` (Chen et al. 2023), ``llama3`` (Llama 3.1 model card), ``yarn`` (Peng et
    al. 2023) and ``dynamic`` (NTK-aware), which scales only texts beyond ``max_position_embeddings``: up to there, and
    nothing longer is taken, it is unscaled. With latent attention Megatron has ``default`` and ``yarn``.

    Raises:
        ValueError: Any other ``rope_type``, or a scaling that lacks a parameter.
    """
    scaling = config.rope_scaling or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    known = tuple(_NEEDED) if config.mla is None else ("default", "yarn")
    if rope_type not in known:
        kind = "models without MLA" if config.mla is None else "models with MLA"
        raise ValueError(f"rope_type={rope_type!r} is not supported for {kind}; supported are {', '.join(known)}")
    missing = [name for name in _NEEDED[rope_type] if name not in scaling]
    if missing:
        raise ValueError(f"rope_scaling of type {rope_type!r} lacks {', '.join(missing)}; it has {sorted(scaling)}")
    if config.mla is None:
        rotated = int(config.kv_channels * config.rotary_percent)
    else:
        rotated = config.mla.qk_pos_emb_head_dim
    if rope_type == "yarn":
        yarn = YarnScaling.of(scaling)
        if config.mla is not None and (yarn.attention_factor is not None or not yarn.truncate):
            raise ValueError("attention_factor and truncate=False of yarn are not supported with latent attention")
        return yarn.inverse_frequencies(rotated, config.rotary_base)
    inv_freq = _unscaled(rotated, config.rotary_base)
    if rope_type == "linear":
        return inv_freq / scaling["factor"]
    if rope_type == "llama3":
        return _llama3(inv_freq, **{name: float(scaling[name]) for name in _NEEDED["llama3"]})
    return inv_freq


def window_inverse_frequencies(config: ModelConfig) -> Tensor:
    """The same for the layers with a sliding window."""
    if config.window_rotary_base is None:
        return inverse_frequencies(config)
    return _unscaled(int(config.kv_channels * config.rotary_percent), config.window_rotary_base)


def softmax_scale(config: ModelConfig) -> float | None:
    """What a model without latent attention multiplies its scores with; ``None``: ``kv_channels ** -0.5``.

    Yarn's concentration, which multiplies the rotated queries and keys, is part of it.
    """
    scaling = config.rope_scaling or {}
    if config.mla is not None or scaling.get("rope_type", scaling.get("type")) != "yarn":
        return config.softmax_scale
    if config.rotary_percent != 1.0 or config.window_rotary_base is not None:
        raise ValueError("yarn is not supported where only a part of a head, or only some layers, are rotated by it")
    return (config.softmax_scale or config.kv_channels**-0.5) * YarnScaling.of(scaling).concentration ** 2


def _unscaled(rotated: int, base: float) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated))


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
class YarnScaling:
    """YaRN (Peng et al. 2023), with the two ``mscale`` factors of DeepSeek-V2.

    Fast dimensions are kept, slow ones stretched by ``factor``, those between blended linearly by their index. The
    defaults of ``mscale`` and ``mscale_all_dim`` are Megatron's, which come to the paper's own concentration.

    Attributes:
        attention_factor: The concentration, where the factors do not say it.
        truncate: The bounds between the kinds of dimensions are whole numbers.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @classmethod
    def of(cls, scaling: dict[str, Any]) -> YarnScaling:
        """From a ``rope_scaling`` in Hugging Face's names.

        Raises:
            ValueError: It has a parameter that is not known, and so would be ignored.
        """
        given = {name: value for name, value in scaling.items() if name not in ("rope_type", "type")}
        known = {each.name for each in fields(cls)}
        extra = {name: value for name, value in given.items() if name not in known}
        if extra:
            raise ValueError(f"yarn parameters {extra} are not supported; supported are {', '.join(sorted(known))}")
        return cls(**given)

    def inverse_frequencies(self, rotated: int, base: float) -> Tensor:
        """fp32 ``[rotated / 2]``."""

        def index_of(turns: float) -> float:
            """The (fractional) dim that turns so many times over the original context."""
            wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return rotated * math.log(wavelength) / (2 * math.log(base))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        steps = torch.arange(rotated // 2, dtype=torch.float32)
        stretched = ((steps - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
        inv_freq = _unscaled(rotated, base)
        return inv_freq * (1.0 - stretched) + inv_freq / self.factor * stretched

    @property
    def concentration(self) -> float:
        """What cosine and sine are multiplied with."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """What the scale of the scores is multiplied with."""
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


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
