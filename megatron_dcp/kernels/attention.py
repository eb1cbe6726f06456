"""Paged attention in Triton: what no library takes. Flash-decoding over a rank's own shard, then a merge of the splits.

Shapes: ``T`` query tokens, ``S`` pool slots, ``N`` query heads, ``K`` KV heads, ``G = N // K``, ``H`` head dim, ``V``
values' head dim, ``X`` splits. In the kernel ``M`` rows of a tile, ``N`` keys of a step, ``D`` and ``R`` dims of the
main part and of the rest of a key.

The rows of a sequence are its query tokens times the heads of a group, so one KV head's keys are read once for all of
them. A program takes ``M`` rows in a row and one of the ``X`` equal parts of the keys that any of them sees. Where and
how long these parts are is read on the device: a captured launch serves other lengths.

Sources: Dao 2022 and 2023 (FlashAttention), Dao et al. 2023 (Flash-Decoding).
"""

# mypy: disable-error-code="no-untyped-def", allow-untyped-decorators
# What Triton compiles is no Python that could be typed.
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_dcp.kernels import is_interpreted
from megatron_dcp.kernels.merging import launch_merge
from megatron_dcp.shard import LARGEST, is_quantised

LOG2_E = math.log2(math.e)
STEP_BYTES = 32 << 10  # keys and values of one step in shared memory; a few steps are in flight
MAX_ROWS = 64


class Dims(NamedTuple):
    """Powers of two that cover a key as ``main + rest`` and a value as ``values``: a key of 576 is 512 + 64."""

    main: int
    rest: int
    values: int

    @property
    def read(self) -> int:
        """Dims of a step's keys and values, padding included; a value that is part of its key has none."""
        return self.main + self.rest + self.values


def _power(n: int) -> int:
    return max(16, triton.next_power_of_2(n))  # a product takes no fewer


def dims(head_dim: int, v_dim: int, v_in_k: bool) -> Dims:
    """How keys and values are tiled. With ``v_in_k`` the main part of a key holds the value and is read for both."""
    if v_in_k:
        main = _power(v_dim)
        return Dims(main, _power(head_dim - main) if head_dim > main else 0, 0)
    main = _power(head_dim)
    if main > head_dim and (half := main // 2) >= 16 and (rest := _power(head_dim - half)) < half:
        return Dims(half, rest, _power(v_dim))
    return Dims(main, 0, _power(v_dim))


class Tiling(NamedTuple):
    """Launch parameters: rows and keys of a step, warps, stages of the pipeline, programs that an SM runs at a time."""

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int


def tiling(head_dim: int, v_dim: int, v_in_k: bool, dtype: torch.dtype, most_rows: int) -> Tiling:
    """Launch parameters for a pool of such keys, whose sequences have at most ``most_rows`` rows.

    Compiled for capability 9.0 these spill next to no registers (``tests/kernels/test_compiled.py``).
    """
    read = dims(head_dim, v_dim, v_in_k).read
    wide = read >= 512
    # fp32 products take no tensor cores, so that more rows would only take registers; 8 bits are widened in registers
    limit = 16 if dtype == torch.float32 else MAX_ROWS // 2 if wide and is_quantised(dtype) else MAX_ROWS
    rows = min(limit, _power(most_rows))
    size = max(2, dtype.itemsize)
    keys = STEP_BYTES // (read * size)
    keys = max(32 if size == 2 else 16, min(128, 1 << max(0, keys.bit_length() - 1)))
    # Keys wait for the block table, so two steps of keys are in flight with five stages.
    stages = 5 if rows == 16 else 2 if wide else 3
    return Tiling(rows, keys, 8 if wide else 4, stages, 1 if wide else 3)


@triton.jit(do_not_specialize=["tables_B", "T"])  # they follow the batch: no compiling for each
def _paged_attention(
    q_TNH, k_SKH, v_SKV, k_scale_SK, v_scale_SK,
    tiles, cu_q_lens, visible_T, hidden_T, block_tables, out_XTNV, lse_XTN,
    scale_log2,
    q_T, q_N, k_S, k_K, v_S, v_K, scale_S, scale_K, tables_B, T, out_T, lse_T,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    QUANTISED: tl.constexpr, WINDOWS: tl.constexpr, MANY_TOKENS: tl.constexpr,
    PRODUCT: tl.constexpr, WEIGHT: tl.constexpr, TWO_TERMS: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` rows of one KV head over one split of their keys.

    ``PRODUCT`` is the dtype of queries times keys, ``WEIGHT`` of weights times values; ``TWO_TERMS``: a weight is the
    sum of two of them, since one of 16 bits would be coarser than the scores.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k_SH = k_SKH + kv_head.to(tl.int64) * k_K  # heads of a large pool are more than 2^31 numbers apart
    v_SV = v_SKV + kv_head.to(tl.int64) * v_K
    scale_offset = kv_head.to(tl.int64) * scale_K
    sequence = tl.load(tiles + 2 * tile)
    row0 = tl.load(tiles + 2 * tile + 1)
    first = tl.load(cu_q_lens + sequence)
    rows = (tl.load(cu_q_lens + sequence + 1) - first) * GROUP
    row_M = row0 + tl.arange(0, ROWS)
    live_M = row_M < rows
    token_M = first + row_M // GROUP
    head_M = kv_head * GROUP + row_M % GROUP
    visible_M = tl.load(visible_T + token_M, mask=live_M, other=0)
    # neither bound ever decreases inside a sequence
    stop = tl.load(visible_T + first + (tl.minimum(row0 + ROWS, rows) - 1) // GROUP)
    start = 0
    hidden_M = tl.zeros([ROWS], tl.int32)
    if WINDOWS:
        hidden_M = tl.load(hidden_T + token_M, mask=live_M, other=0)
        start = tl.load(hidden_T + first + row0 // GROUP)
    steps = tl.cdiv(tl.maximum(stop - start, 0), KEYS)
    per_split = tl.cdiv(steps, tl.num_programs(2)) * KEYS
    start += split * per_split
    stop = tl.minimum(start + per_split, stop)

    d_D = tl.arange(0, MAIN)
    d_R = MAIN + tl.arange(0, REST if REST else 16)
    d_V = tl.arange(0, VALUES if VALUES else MAIN)
    q_M = q_TNH + token_M.to(tl.int64) * q_T + head_M * q_N
    q_MD = tl.load(q_M[:, None] + d_D[None, :], mask=live_M[:, None] & (d_D < HEAD_DIM)[None, :], other=0.0)
    q_MD = q_MD.to(PRODUCT)
    if REST:
        q_MR = tl.load(q_M[:, None] + d_R[None, :], mask=live_M[:, None] & (d_R < HEAD_DIM)[None, :], other=0.0)
        q_MR = q_MR.to(PRODUCT)

    peak_M = tl.full([ROWS], float("-inf"), tl.float32)
    total_M = tl.zeros([ROWS], tl.float32)
    out_MV = tl.zeros([ROWS, VALUES if VALUES else MAIN], tl.float32)
    for key in range(start, stop, KEYS):
        key_N = key + tl.arange(0, KEYS)
        read_N = key_N < stop
        seen_MN = read_N[None, :] & (key_N[None, :] < visible_M[:, None])
        if WINDOWS:
            seen_MN = seen_MN & (key_N[None, :] >= hidden_M[:, None])
            if MANY_TOKENS:  # what no row sees may be anything, and 0 * NaN is NaN
                read_N = read_N & (tl.max(seen_MN.to(tl.int32), 0) > 0)
        block_N = tl.load(block_tables + sequence.to(tl.int64) * tables_B + key_N // BLOCK_SIZE, mask=read_N, other=0)
        slot_N = block_N.to(tl.int64) * BLOCK_SIZE + key_N % BLOCK_SIZE
        k_N = k_SH + slot_N * k_S
        k_ND = tl.load(k_N[:, None] + d_D[None, :], mask=read_N[:, None] & (d_D < HEAD_DIM)[None, :], other=0.0)
        score_MN = tl.dot(q_MD, tl.trans(k_ND.to(PRODUCT)), input_precision="ieee")
        if REST:
            k_NR = tl.load(k_N[:, None] + d_R[None, :], mask=read_N[:, None] & (d_R < HEAD_DIM)[None, :], other=0.0)
            score_MN = tl.dot(q_MR, tl.trans(k_NR.to(PRODUCT)), score_MN, input_precision="ieee")
        score_MN *= scale_log2
        if QUANTISED:
            scale_N = slot_N * scale_S + scale_offset
            k_scale_N = tl.load(k_scale_SK + scale_N, mask=read_N, other=0.0)
            score_MN *= k_scale_N[None, :]
        score_MN = tl.where(seen_MN, score_MN, float("-inf"))

        new_peak_M = tl.maximum(peak_M, tl.max(score_MN, 1))
        safe_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
        weight_MN = tl.exp2(score_MN - safe_M[:, None])
        shrink_M = tl.exp2(peak_M - safe_M)
        total_M = total_M * shrink_M + tl.sum(weight_MN, 1)
        out_MV = out_MV * shrink_M[:, None]
        peak_M = new_peak_M
        if VALUES:
            v_N = v_SV + slot_N * v_S
            v_NV = tl.load(v_N[:, None] + d_V[None, :], mask=read_N[:, None] & (d_V < V_DIM)[None, :], other=0.0)
        else:
            v_NV = k_ND
        if QUANTISED:
            if VALUES:
                weight_MN *= tl.load(v_scale_SK + scale_N, mask=read_N, other=0.0)[None, :]
            else:
                weight_MN *= k_scale_N[None, :]
        v_NV = v_NV.to(WEIGHT)
        high_MN = weight_MN.to(WEIGHT)
        out_MV = tl.dot(high_MN, v_NV, out_MV, input_precision="ieee")
        if TWO_TERMS:
            low_MN = (weight_MN - high_MN.to(tl.float32)).to(WEIGHT)
            out_MV = tl.dot(low_MN, v_NV, out_MV, input_precision="ieee")

    blind_M = total_M == 0.0
    out_MV = tl.where(blind_M[:, None], 0.0, out_MV / tl.where(blind_M, 1.0, total_M)[:, None])
    lse_M = tl.where(blind_M, float("-inf"), (peak_M + tl.log2(total_M)) * 0.6931471805599453)
    # a multiple of out_T, which is known to be aligned
    row_M = split.to(tl.int64) * T + token_M
    out_M = out_XTNV + row_M * out_T + head_M * V_DIM
    tl.store(out_M[:, None] + d_V[None, :], out_MV, mask=live_M[:, None] & (d_V < V_DIM)[None, :])
    tl.store(lse_XTN + row_M * lse_T + head_M, lse_M, mask=live_M)


def tile_dtype(q_dtype: torch.dtype, pool_dtype: torch.dtype) -> torch.dtype:
    """What :func:`tiling` is to be asked with: the pool's dtype where products are of 16 bits, else fp32."""
    return torch.float32 if _is_wide(q_dtype, pool_dtype) else pool_dtype


def _is_wide(q_dtype: torch.dtype, pool_dtype: torch.dtype) -> bool:
    return q_dtype not in (torch.bfloat16, torch.float16) or pool_dtype not in (q_dtype, *LARGEST)


def product_dtypes(q_dtype: torch.dtype, pool_dtype: torch.dtype) -> tuple[tl.dtype, tl.dtype]:
    """Of queries times keys, and of weights times values: what loses nothing of what is stored.

    8 bits are exact in 16, but weights times scales of values need the range of bfloat16. The interpreter multiplies
    the bits of bfloat16 as if they were numbers, so it gets fp32 instead.
    """
    bfloat16 = tl.float32 if is_interpreted() else tl.bfloat16
    if _is_wide(q_dtype, pool_dtype):
        return tl.float32, tl.float32
    half = bfloat16 if q_dtype == torch.bfloat16 else tl.float16
    return half, bfloat16 if is_quantised(pool_dtype) else half


def launch_attention(
    q_TNH: Tensor, k_SKH: Tensor, v_SKV: Tensor, k_scale_SK: Tensor | None, v_scale_SK: Tensor | None,
    tiles: Tensor, cu_q_lens: Tensor, visible_T: Tensor, hidden_T: Tensor | None, block_tables: Tensor,
    block_size: int, v_in_k: bool, many_tokens: bool, splits: int, rows: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(out_TNV, lse_TN)``; see :class:`megatron_dcp.attention.paged.PagedBackend`.

    Args:
        tiles: int32 ``[tiles, 2]``: a sequence, and the first row of it that a tile has.
        many_tokens: Whether a tile may have rows of several tokens.
        rows: Of a tile, as :func:`tiling` gave them.
    """
    assert k_SKH.stride(2) == v_SKV.stride(2) == 1, "dims lie side by side"
    assert k_scale_SK is None or v_scale_SK is None or k_scale_SK.stride() == v_scale_SK.stride()
    q_TNH = q_TNH if q_TNH.stride(2) == 1 else q_TNH.contiguous()
    T, N, H = q_TNH.shape
    K, V = v_SKV.shape[1:]
    product, weight = product_dtypes(q_TNH.dtype, k_SKH.dtype)
    tile = dims(H, V, v_in_k)
    launch = tiling(H, V, v_in_k, tile_dtype(q_TNH.dtype, k_SKH.dtype), rows)
    assert launch.rows == rows, "the tiles were cut for queries of another dtype"
    out_XTNV = q_TNH.new_empty(splits, T, N, V, dtype=torch.float32)
    lse_XTN = q_TNH.new_empty(splits, T, N, dtype=torch.float32)
    k_scale = q_TNH if k_scale_SK is None else k_scale_SK  # any address, not read
    _paged_attention[(tiles.shape[0], K, splits)](
        q_TNH, k_SKH, v_SKV, k_scale, q_TNH if v_scale_SK is None else v_scale_SK,
        tiles, cu_q_lens, visible_T, visible_T if hidden_T is None else hidden_T, block_tables, out_XTNV, lse_XTN,
        scale * LOG2_E,
        q_TNH.stride(0), q_TNH.stride(1), k_SKH.stride(0), k_SKH.stride(1), v_SKV.stride(0), v_SKV.stride(1),
        *(k_scale.stride()[:2]), block_tables.stride(0),
        T, out_XTNV.stride(1), lse_XTN.stride(1),
        GROUP=N // K, BLOCK_SIZE=block_size, HEAD_DIM=H, V_DIM=V,
        MAIN=tile.main, REST=tile.rest, VALUES=tile.values, ROWS=rows, KEYS=launch.keys,
        QUANTISED=k_scale_SK is not None, WINDOWS=hidden_T is not None, MANY_TOKENS=many_tokens,
        PRODUCT=product, WEIGHT=weight, TWO_TERMS=weight != tl.float32 and rows == 16,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if splits == 1:
        return out_XTNV[0], lse_XTN[0]
    return launch_merge(out_XTNV, lse_XTN)


@torch.library.custom_op("megatron_dcp::paged_attention", mutates_args=())
def paged_attention(
    q_TNH: Tensor, k_SKH: Tensor, v_SKV: Tensor, k_scale_SK: Tensor | None, v_scale_SK: Tensor | None,
    tiles: Tensor, cu_q_lens: Tensor, visible_T: Tensor, hidden_T: Tensor | None, block_tables: Tensor,
    block_size: int, v_in_k: bool, many_tokens: bool, splits: int, rows: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`launch_attention` as one operator. Without a GPU it needs the interpreter; its oracle is the contract."""
    out_TNV, lse_TN = launch_attention(
        q_TNH, k_SKH, v_SKV, k_scale_SK, v_scale_SK, tiles, cu_q_lens, visible_T, hidden_T, block_tables,
        block_size, v_in_k, many_tokens, splits, rows, scale,
    )  # fmt: skip
    return out_TNV, lse_TN


@paged_attention.register_fake
def _(q_TNH, k_SKH, v_SKV, *rest):
    T, N, _ = q_TNH.shape
    return q_TNH.new_empty(T, N, v_SKV.shape[2], dtype=torch.float32), q_TNH.new_empty(T, N, dtype=torch.float32)
