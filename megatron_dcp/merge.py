"""Exact attention from partial attentions, by log-sum-exp. Plain tensor math: no group, no kernel.

Shapes: ``P`` partials, ``T`` tokens, ``N`` query heads, ``H`` head dim (of V).

For partials ``out_r = softmax(s_r) v_r`` with ``lse_r = log sum exp(s_r)`` over disjoint keys
(Milakov & Gimelshein 2018; used for sharded decoding in FlashDecoding and Ring Attention)::

    m = max_r lse_r      w_r = exp(lse_r - m)      out = sum_r w_r out_r / sum_r w_r      lse = m + log sum_r w_r

A shard without keys has ``lse = -inf`` and thus weight 0: it contributes 0 even where its ``out`` holds NaN.
Where every shard is empty the result is ``out = 0, lse = -inf``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_weights(lse_PTN: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised weights of partials and the LSE of their merge.

    Args:
        lse_PTN: Natural-log LSE of every partial, fp32 ``[P, T, N]`` (any trailing shape works).

    Returns:
        ``(weight_PTN, lse_TN)``: weights that sum to 1 over ``P`` (all 0 where every partial is empty).
    """
    peak_TN = lse_PTN.amax(dim=0)
    safe_TN = peak_TN.masked_fill(peak_TN == -torch.inf, 0.0)
    weight_PTN = torch.exp(lse_PTN - safe_TN)
    total_TN = _sum_in_order(weight_PTN)
    lse_TN = safe_TN + torch.log(total_TN)
    return weight_PTN / total_TN.masked_fill(total_TN == 0, 1.0), lse_TN


def weigh(out_TNH: Tensor, weight_TN: Tensor) -> Tensor:
    """``weight * out``, with 0 where the weight is 0, whatever ``out`` holds there (NaN included)."""
    weight_TN1 = weight_TN.unsqueeze(-1)
    return (out_TNH * weight_TN1).masked_fill_(weight_TN1 == 0, 0.0)


def merge_partials(out_PTNH: Tensor, lse_PTN: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partials in the order of ``P``, so that every caller with the same input gets the same bits.

    Args:
        out_PTNH: Partial attention outputs, fp32 ``[P, T, N, H]``.
        lse_PTN: Their natural-log LSE, fp32 ``[P, T, N]``; ``-inf`` marks an empty shard.

    Returns:
        ``(out_TNH, lse_TN)``, fp32.
    """
    weight_PTN, lse_TN = merge_weights(lse_PTN)
    return _sum_in_order(weigh(out_PTNH, weight_PTN)), lse_TN


def merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge a second partial into a first one, in place: for partials that come one by one, in a fixed order.

    Args:
        out: fp32 ``[…, H]``, finite also where its shard is empty, as an attention back end returns it.
        lse: fp32 ``[…]``.
        other_out, other_lse: Of the same shapes, also finite.
    """
    both = torch.logaddexp(lse, other_lse)
    out.lerp_(other_out, torch.exp(other_lse - both).nan_to_num_(0.0).unsqueeze(-1))  # NaN: both are empty
    lse.copy_(both)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Let a key without a value, of the score ``sink``, take part in a partial, in place.

    Args:
        out: fp32 ``[…, N, H]``, finite also where its shard is empty.
        lse: fp32 ``[…, N]``.
        sink: Finite, ``[N]``.
    """
    both = torch.logaddexp(lse, sink.float())
    out.mul_(torch.exp(lse - both).unsqueeze(-1))
    lse.copy_(both)


def _sum_in_order(x_P: Tensor) -> Tensor:
    """Sum over the first dimension, one by one: ``Tensor.sum`` may take another order for another shape."""
    parts = iter(x_P.unbind())
    total = next(parts).clone()
    for part in parts:
        total += part
    return total
