"""Merge, weigh and pack partials in Triton, one pass over them each. The formulas are those of `megatron_dcp.merge`.

Shapes: ``P`` partials, ``T`` tokens, ``N`` heads, ``H`` head dim of the values; in a kernel ``M`` rows (a token and a
head each), ``D`` dims.
"""

# mypy: disable-error-code="no-untyped-def", allow-untyped-decorators
# What Triton compiles is no Python that could be typed.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_dcp.kernels import twins
from megatron_dcp.merge import merge_partials

TILE = 2048  # numbers of a program
MERGE_TILE = 4 * TILE


@triton.jit
def _rows(T, N, M: tl.constexpr):
    """Tokens and heads of a program's rows, and which of these there are."""
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    return (row_M // N).to(tl.int64), row_M % N, row_M < T * N


@triton.jit
def _load_lse(lse_M, stride_P, p_P, P, live_M):
    """LSEs of some partials, all at once: one after the other they would take as many latencies of the memory."""
    real_PM = (p_P < P)[:, None] & live_M[None, :]
    return tl.load(lse_M[None, :] + (p_P.to(tl.int64) * stride_P)[:, None], mask=real_PM, other=float("-inf"))


@triton.jit
def _peak_and_total(lse_M, stride_P, P, live_M, ALL: tl.constexpr):
    """Largest LSE (0 where every one is -inf) and the sum of weights relative to it: NaN if an LSE is."""
    lse_PM = _load_lse(lse_M, stride_P, tl.arange(0, ALL), P, live_M)
    peak_M = tl.max(lse_PM, 0)
    safe_M = tl.where(peak_M == float("-inf"), 0.0, peak_M)
    return safe_M, tl.sum(tl.exp(lse_PM - safe_M[None, :]), 0)


@triton.jit(do_not_specialize=["P", "T", "out_P", "lse_P"])
def _merge(
    out_PTNH, lse_PTN, merged_TNH, merged_lse_TN,
    P, T, N, out_P, out_T, out_N, lse_P, lse_T, lse_N, merged_T, merged_N, merged_lse_T, merged_lse_N,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, ALL: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """``SOME`` of the partials at a time; the order depends on nothing but ``P``, so ranks get the same bits."""
    token_M, head_M, live_M = _rows(T, N, M)
    lse_M = lse_PTN + token_M * lse_T + head_M * lse_N
    safe_M, total_M = _peak_and_total(lse_M, lse_P, P, live_M, ALL)
    tl.store(merged_lse_TN + token_M * merged_lse_T + head_M * merged_lse_N, safe_M + tl.log(total_M), mask=live_M)
    divisor_M = tl.where(total_M == 0.0, 1.0, total_M)
    d_D = tl.arange(0, D)
    out_M = out_PTNH + token_M * out_T + head_M * out_N
    sum_MD = tl.zeros([M, D], tl.float32)
    for p in range(0, P, SOME):
        p_P = p + tl.arange(0, SOME)
        lse_PM = _load_lse(lse_M, lse_P, p_P, P, live_M)
        weight_PM = tl.div_rn(tl.exp(lse_PM - safe_M[None, :]), tl.broadcast_to(divisor_M[None, :], lse_PM.shape))
        # what weighs nothing may be NaN
        counts_PMD = ((weight_PM != 0.0) & live_M[None, :] & (p_P < P)[:, None])[:, :, None] & (d_D < H)[None, None, :]
        out_PM = out_M[None, :] + (p_P.to(tl.int64) * out_P)[:, None]
        x_PMD = tl.load(out_PM[:, :, None] + d_D[None, None, :], mask=counts_PMD, other=0.0)
        sum_MD += tl.sum(x_PMD * weight_PM[:, :, None], 0)
    merged_M = merged_TNH + token_M * merged_T + head_M * merged_N
    tl.store(merged_M[:, None] + d_D[None, :], sum_MD, mask=live_M[:, None] & (d_D < H)[None, :])


@triton.jit(do_not_specialize=["own", "P", "T", "lse_P"])
def _share(
    out_TNH, lse_PTN, share_TNH,
    own, P, T, N, out_T, out_N, lse_P, lse_T, lse_N, share_T, share_N,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    token_M, head_M, live_M = _rows(T, N, M)
    lse_M = lse_PTN + token_M * lse_T + head_M * lse_N
    safe_M, total_M = _peak_and_total(lse_M, lse_P, P, live_M, ALL)
    lse = tl.load(lse_M + own * lse_P, mask=live_M, other=float("-inf"))
    weight_M = tl.div_rn(tl.exp(lse - safe_M), tl.where(total_M == 0.0, 1.0, total_M))
    d_D = tl.arange(0, D)
    real_MD = live_M[:, None] & (d_D < H)[None, :]
    out_M = out_TNH + token_M * out_T + head_M * out_N
    x_MD = tl.load(out_M[:, None] + d_D[None, :], mask=real_MD & (weight_M != 0.0)[:, None], other=0.0)
    share_M = share_TNH + token_M * share_T + head_M * share_N
    tl.store(share_M[:, None] + d_D[None, :], x_MD.to(tl.float32) * weight_M[:, None], mask=real_MD)


@triton.jit(do_not_specialize=["T"])
def _pack(
    out_TNH, lse_TN, packed_NTH1,
    T, N, out_T, out_N, lse_T, lse_N, packed_N, packed_T,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token_M, head_M, live_M = _rows(T, N, M)
    d_D = tl.arange(0, D)
    out_M = out_TNH + token_M * out_T + head_M * out_N
    x_MD = tl.load(out_M[:, None] + d_D[None, :], mask=live_M[:, None] & (d_D < H)[None, :], other=0.0)
    lse_M = tl.load(lse_TN + token_M * lse_T + head_M * lse_N, mask=live_M, other=0.0)
    x_MD = tl.where((d_D == H)[None, :], lse_M[:, None], x_MD.to(tl.float32))
    packed_M = packed_NTH1 + head_M.to(tl.int64) * packed_N + token_M * packed_T
    tl.store(packed_M[:, None] + d_D[None, :], x_MD, mask=live_M[:, None] & (d_D <= H)[None, :])


def _tile(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants for so many rows of ``width`` numbers."""
    D = triton.next_power_of_2(width)
    M = min(max(1, TILE // D), triton.next_power_of_2(max(1, rows // 256)))  # few rows: a program each, on all SMs
    return (triton.cdiv(rows, M),), {"M": M, "D": D, "num_warps": 4 if M * D >= 512 else 1}


def launch_merge(out_PTNH: Tensor, lse_PTN: Tensor) -> tuple[Tensor, Tensor]:
    """`megatron_dcp.merge.merge_partials` for any strides, such as of packed ``[…, H + 1]``; fp32 ``[T, N, H]``."""
    P, T, N, H = out_PTNH.shape
    assert out_PTNH.stride(3) == 1, "dims lie side by side"
    merged_TNH, merged_lse_TN = out_PTNH.new_empty(T, N, H), lse_PTN.new_empty(T, N)
    if merged_lse_TN.numel():
        # of splits there are many: as many at a time as a tile holds
        some = min(triton.next_power_of_2(P), max(1, MERGE_TILE // triton.next_power_of_2(H)))
        grid, tile = _tile(T * N, some * H)
        tile |= {"D": triton.next_power_of_2(H), "ALL": triton.next_power_of_2(P), "SOME": some}
        _merge[grid](
            out_PTNH, lse_PTN, merged_TNH, merged_lse_TN, P, T, N, *out_PTNH.stride()[:3], *lse_PTN.stride(),
            *merged_TNH.stride()[:2], *merged_lse_TN.stride(), H=H, **tile,
        )  # fmt: skip
    return merged_TNH, merged_lse_TN


def launch_share(out_TNH: Tensor, lse_PTN: Tensor, own: int, share_TNH: Tensor) -> None:
    """Partial ``own`` of ``P``, weighed by all their LSEs, to ``share_TNH`` (fp32, any strides)."""
    T, N, H = out_TNH.shape
    out_TNH = out_TNH if out_TNH.stride(2) == 1 else out_TNH.contiguous()
    assert share_TNH.stride(2) == 1 and share_TNH.dtype == torch.float32
    if T * N:
        grid, tile = _tile(T * N, H)
        tile["ALL"] = triton.next_power_of_2(len(lse_PTN))
        _share[grid](
            out_TNH, lse_PTN, share_TNH, own, len(lse_PTN), T, N, *out_TNH.stride()[:2], *lse_PTN.stride(),
            *share_TNH.stride()[:2], H=H, **tile,
        )  # fmt: skip


def launch_pack(out_TNH: Tensor, lse_TN: Tensor) -> Tensor:
    """``[out, lse]`` heads first, fp32 ``[N, T, H + 1]``."""
    T, N, H = out_TNH.shape
    out_TNH = out_TNH if out_TNH.stride(2) == 1 else out_TNH.contiguous()
    packed_NTH1 = out_TNH.new_empty(N, T, H + 1, dtype=torch.float32)
    if T * N:
        grid, tile = _tile(T * N, H + 1)
        _pack[grid](
            out_TNH, lse_TN, packed_NTH1, T, N, *out_TNH.stride()[:2], *lse_TN.stride(), *packed_NTH1.stride()[:2],
            H=H, **tile,
        )  # fmt: skip
    return packed_NTH1


@torch.library.custom_op("megatron_dcp::merge_partials", mutates_args=(), device_types="cuda")
def merge(out_PTNH: Tensor, lse_PTN: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`launch_merge` as one operator; on a CPU its twin."""
    return launch_merge(out_PTNH, lse_PTN)


@merge.register_kernel("cpu")
def _(out_PTNH: Tensor, lse_PTN: Tensor) -> tuple[Tensor, Tensor]:
    merged_TNH, lse_TN = merge_partials(out_PTNH, lse_PTN)
    return merged_TNH.contiguous(), lse_TN.contiguous()


@merge.register_fake
def _(out_PTNH, lse_PTN):
    return out_PTNH.new_empty(out_PTNH.shape[1:]), lse_PTN.new_empty(lse_PTN.shape[1:])


@torch.library.custom_op("megatron_dcp::share_of", mutates_args=("share_TNH",), device_types="cuda")
def share(out_TNH: Tensor, lse_PTN: Tensor, own: int, share_TNH: Tensor) -> None:
    """:func:`launch_share` as one operator; on a CPU its twin."""
    launch_share(out_TNH, lse_PTN, own, share_TNH)


@share.register_kernel("cpu")
def _(out_TNH: Tensor, lse_PTN: Tensor, own: int, share_TNH: Tensor) -> None:
    share_TNH.copy_(twins.share_of(out_TNH, lse_PTN, own))


@torch.library.custom_op("megatron_dcp::pack_heads", mutates_args=(), device_types="cuda")
def pack(out_TNH: Tensor, lse_TN: Tensor) -> Tensor:
    """:func:`launch_pack` as one operator; on a CPU its twin."""
    return launch_pack(out_TNH, lse_TN)


@pack.register_kernel("cpu")
def _(out_TNH: Tensor, lse_TN: Tensor) -> Tensor:
    return twins.pack(out_TNH, lse_TN)


@pack.register_fake
def _(out_TNH, lse_TN):
    T, N, H = out_TNH.shape
    return out_TNH.new_empty(N, T, H + 1, dtype=torch.float32)
