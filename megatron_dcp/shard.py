"""One layer's keys and values on one rank, as they are stored: in the model's dtype, or in 8 bits with scales.

Shapes: ``t`` tokens, ``S`` slots, ``K`` KV heads, ``H`` head dim of the keys, ``V`` head dim of the values.

Quantised keys have one fp32 scale per token and head, and so have values: ``key = scale * stored``. A latent (MLA) has
one scale per token, as its values are part of its keys. A scale is the head's largest magnitude over the largest number
of the dtype, so it does not depend on any other token: the same keys are stored as the same numbers at any dcp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST: dict[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


class Shard(NamedTuple):
    """Keys and values of one layer on one rank, any strides.

    Attributes:
        k_SKH: Keys, rotated.
        v_SKV: Values.
        k_scale_SK, v_scale_SK: What stored keys and values are multiplied with, fp32; ``None``: nothing. Where the
            values are part of the keys, their scales are the same tensor.
    """

    k_SKH: Tensor
    v_SKV: Tensor
    k_scale_SK: Tensor | None = None
    v_scale_SK: Tensor | None = None


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype has scales."""
    return dtype in LARGEST


def quantise(x_tKH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads of some tokens in 8 bits.

    Args:
        x_tKH: Any float dtype.
        dtype: ``float8_e4m3fn`` or ``int8``.

    Returns:
        ``(stored_tKH, scale_tK)``. A head with a NaN or an infinity gets a scale that is not finite, so that
        nothing that :func:`dequantise` gives back of it is: it is not hidden.
    """
    x_tKH = x_tKH.float()
    peak_tK = x_tKH.abs().amax(-1)
    scale_tK = torch.where(peak_tK == 0, 1.0, peak_tK / LARGEST[dtype])
    ratio_tKH = (x_tKH / scale_tK.unsqueeze(-1)).clamp_(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        ratio_tKH = ratio_tKH.round_().nan_to_num_(0.0)  # the scale has the NaN
    return ratio_tKH.to(dtype), scale_tK


def dequantise(stored: Tensor, scale: Tensor) -> Tensor:
    """fp32 values of ``stored`` ``[…, H]`` with its scales ``[…]``."""
    return widen(stored, torch.empty(stored.shape, device=stored.device)).mul_(scale.unsqueeze(-1))


def widen(stored: Tensor, out: Tensor) -> Tensor:
    """What is stored, without scales, in the fp32 tensor ``out``, which is returned.

    A NaN of e4m3 may become a number: of a head that has one, the scale says so.
    """
    if stored.dtype != torch.float8_e4m3fn or stored.device.type != "cpu":
        return out.copy_(stored)
    # Torch converts one by one. As fp16 the same bits, moved up by 7 past the sign, mean a 256th of the number.
    half = stored.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return out.copy_(half.view(torch.float16)).mul_(256.0)
