"""Attention by our own Triton kernel: everything that the contract has, where no library takes it.

Shapes: ``T`` query tokens, ``S`` pool slots, ``N`` query heads, ``K`` KV heads, ``H`` head dim, ``V`` values' head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dcp.attention.base import AttentionBackend, AttentionBatch, AttentionSpec, BatchTensors
from megatron_dcp.kernels import unusable
from megatron_dcp.shard import Shard

STEPS_PER_SPLIT = 4  # fewer, and writing and merging partials costs more than the keys
MAX_SPLITS = 128
MAX_HEAD_DIM, MAX_V_DIM = 576, 512  # a tile of them fits into registers and shared memory


@dataclass(frozen=True)
class PagedPlan:
    """One step's launch.

    Attributes:
        tiles: int32 ``[tiles, 2]``: a sequence, and the first of its rows (query tokens x group) that a tile has.
        rows: Rows of a tile.
        splits: Parts that the keys of a tile are cut into.
        many_tokens: Whether a sequence has more than one query token.
    """

    spec: AttentionSpec
    tensors: BatchTensors
    tiles: Tensor
    rows: int
    splits: int
    many_tokens: bool


class PagedBackend(AttentionBackend[PagedPlan]):
    """Paged attention on a GPU with Triton, for any pool, staircase, window, head dim and 8-bit cache.

    Arithmetic is fp32 but for the factors of the products, which are what the pool and the queries store; where a tile
    has few rows, weights keep 16 bits of mantissa, else 8 (bfloat16) or 11 (float16).
    Work space: the fp32 partials of the splits, ``splits * T * N * (V + 1)``.
    """

    name = "triton"
    pool_order = "slots_first"
    refreshable = True

    def supports(self, spec: AttentionSpec) -> str | None:
        if (reason := unusable(spec.device)) is not None:
            return reason
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8):
            return f"{spec.dtype} pools are not read, only float32, bfloat16, float16, float8_e4m3fn and int8"
        if spec.head_dim > MAX_HEAD_DIM or spec.v_dim > MAX_V_DIM:
            return f"head dims {spec.head_dim}, {spec.v_dim} > {MAX_HEAD_DIM}, {MAX_V_DIM}"
        if spec.dtype == torch.float8_e4m3fn and spec.device.type == "cuda":
            if torch.cuda.get_device_capability(spec.device) < (8, 9):
                return "float8_e4m3fn needs compute capability 8.9"
        return None

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, *, blocks: int = 0) -> PagedPlan:
        from megatron_dcp.kernels.attention import tile_dtype, tiling

        many_tokens = max(batch.q_lens, default=1) > 1
        most_rows = max(batch.q_lens, default=1) * spec.group
        tile = tiling(spec.head_dim, spec.v_dim, spec.v_in_k, tile_dtype(spec.queries, spec.dtype), most_rows)
        tiles = [
            (sequence, row)
            for sequence, q_len in enumerate(batch.q_lens)
            for row in range(0, q_len * spec.group, tile.rows)
        ]
        longest = blocks * spec.block_size or max(batch.visible, default=0)
        most = min(MAX_SPLITS, longest // (STEPS_PER_SPLIT * tile.keys))
        return PagedPlan(
            spec=spec,
            tensors=batch.tensors(spec.device, blocks),
            tiles=torch.tensor(tiles, dtype=torch.int32).reshape(-1, 2).to(spec.device),
            rows=tile.rows,
            splits=_splits(len(tiles) * spec.kv_heads, tile.resident * _multiprocessors(spec.device), most),
            many_tokens=many_tokens,
        )

    def refresh(self, plan: PagedPlan, batch: AttentionBatch) -> None:
        assert not plan.many_tokens and max(batch.q_lens) == 1 and len(batch.q_lens) == len(plan.tensors.kv_lens)
        assert bool(batch.hidden) == (plan.tensors.hidden_T is not None), "a plan has windows or has none"
        batch.copy_to(plan.tensors)

    @torch.no_grad()
    def attend(self, q_TNH: Tensor, shard: Shard, plan: PagedPlan, *, scale: float) -> tuple[Tensor, Tensor]:
        from megatron_dcp.kernels.attention import paged_attention

        batch, spec = plan.tensors, plan.spec
        return paged_attention(
            q_TNH.to(spec.queries), shard.k_SKH, shard.v_SKV, shard.k_scale_SK, shard.v_scale_SK,
            plan.tiles, batch.cu_q_lens, batch.visible_T, batch.hidden_T, batch.block_tables,
            spec.block_size, spec.v_in_k, plan.many_tokens, plan.splits, plan.rows, scale,
        )  # fmt: skip


def _splits(programs: int, at_a_time: int, most: int) -> int:
    """Into how many parts the work of ``programs`` equal programs is cut: the fewest that take within 10 % of the least
    time, where ``at_a_time`` programs run together and the next ones when these are done."""

    def time(splits: int) -> float:
        return -(-programs * splits // at_a_time) / splits

    choices = range(1, max(1, most) + 1)
    least = min(map(time, choices))
    return next(splits for splits in choices if time(splits) <= 1.1 * least)


def _multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter gets a few, so that its tests split their keys."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
