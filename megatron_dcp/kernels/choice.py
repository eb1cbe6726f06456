"""Steps of the exchange around its collectives: our kernels on a GPU that runs them, the same in torch elsewhere.

Shapes: ``P`` partials, ``T`` tokens, ``N`` query heads, ``n`` heads of one rank, ``H`` head dim of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dcp import merge
from megatron_dcp.kernels import twins, unusable


def _launches(x: Tensor) -> bool:
    return x.is_cuda and unusable(x.device) is None


def merge_partials(out_PTNH: Tensor, lse_PTN: Tensor) -> tuple[Tensor, Tensor]:
    """`megatron_dcp.merge.merge_partials`."""
    if _launches(out_PTNH):
        from megatron_dcp.kernels.merging import merge as launch

        return launch(out_PTNH, lse_PTN)
    return merge.merge_partials(out_PTNH, lse_PTN)


def share_of(out_TNH: Tensor, lse_PTN: Tensor, own: int) -> Tensor:
    """Partial ``own`` of ``P``, weighed by all their LSEs (fp32): what is left is a sum. fp32 ``[T, N, H]``."""
    if _launches(out_TNH):
        from megatron_dcp.kernels.merging import share as launch

        share_TNH = out_TNH.new_empty(out_TNH.shape, dtype=torch.float32)
        launch(out_TNH, lse_PTN, own, share_TNH)
        return share_TNH
    return twins.share_of(out_TNH, lse_PTN, own)


def share_by_rank(out_TNH: Tensor, lse_PTN: Tensor, own: int) -> Tensor:
    """The same, heads first and in ``P`` equal parts for a reduce-scatter: fp32 ``[P, n, T, H]``, padded with 0."""
    T, N, H = out_TNH.shape
    ranks = len(lse_PTN)
    parts_PnTH = out_TNH.new_zeros(ranks, -(-N // ranks), T, H, dtype=torch.float32)
    share_TNH = parts_PnTH.flatten(0, 1)[:N].transpose(0, 1)
    if _launches(out_TNH):
        from megatron_dcp.kernels.merging import share as launch

        launch(out_TNH, lse_PTN, own, share_TNH)
    else:
        share_TNH.copy_(twins.share_of(out_TNH, lse_PTN, own))
    return parts_PnTH


def pack(out_TNH: Tensor, lse_TN: Tensor) -> Tensor:
    """``[out, lse]`` heads first, fp32 ``[N, T, H + 1]``: what goes to one rank lies together, whatever its share."""
    if _launches(out_TNH):
        from megatron_dcp.kernels.merging import pack as launch

        return launch(out_TNH, lse_TN)
    return twins.pack(out_TNH, lse_TN)
