"""What our kernels compute, in torch: their oracle, and what runs where they do not. No triton here.

Shapes: ``t`` tokens, ``S`` slots, ``K`` KV heads, ``H`` head dim; ``P`` partials, ``T`` tokens, ``N`` heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dcp.merge import merge_weights, weigh
from megatron_dcp.shard import quantise


def store_slots(slot_t: Tensor, x_tKH: Tensor, stored_SKH: Tensor, scale_SK: Tensor | None) -> None:
    """Heads of some tokens to their slots, in the dtype of ``stored_SKH``; tokens with slot -1 are skipped.

    Raises:
        IndexError: On a CPU, a slot that is not there.
    """
    kept_t = slot_t != -1
    if not kept_t.all():
        slot_t, x_tKH = slot_t[kept_t], x_tKH[kept_t]
    # index_copy_ refuses negative slots, where an indexed assignment would write to the pool's end
    if scale_SK is None:
        stored_SKH.index_copy_(0, slot_t, x_tKH.to(stored_SKH.dtype))
        return
    quantised_tKH, scale_tK = quantise(x_tKH, stored_SKH.dtype)
    stored_SKH.view(torch.uint8).index_copy_(0, slot_t, quantised_tKH.view(torch.uint8))
    scale_SK.index_copy_(0, slot_t, scale_tK)


def share_of(out_TNH: Tensor, lse_PTN: Tensor, own: int) -> Tensor:
    """Partial ``own`` of ``P``, weighed by all their LSEs; fp32."""
    weight_PTN, _ = merge_weights(lse_PTN)
    return weigh(out_TNH.float(), weight_PTN[own])


def pack(out_TNH: Tensor, lse_TN: Tensor) -> Tensor:
    """``[out, lse]`` heads first, fp32 ``[N, T, H + 1]``."""
    T, N, H = out_TNH.shape
    packed_NTH1 = out_TNH.new_empty(N, T, H + 1, dtype=torch.float32)
    packed_NTH1[..., :H] = out_TNH.transpose(0, 1)
    packed_NTH1[..., H] = lse_TN.t()
    return packed_NTH1
