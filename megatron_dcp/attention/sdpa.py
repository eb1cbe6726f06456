"""Attention with what torch itself brings: a fused kernel where one fits, two matrix products elsewhere.

Shapes: ``T`` query tokens, ``S`` pool slots, ``N`` query heads, ``K`` KV heads, ``G = N // K``, ``H`` head dim, ``V``
values' head dim; in one kernel call ``B`` parts, ``R`` rows (tokens x ``G``), ``C`` keys.

The query heads of a group are folded into rows, so that a KV head's keys and values are read once for all of them.
All arithmetic is fp32, whatever the pool stores: a fused kernel would round the partials of half-precision inputs to
half precision, and then tokens depend on how many partials there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import eq
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dcp.attention.base import AttentionBackend, AttentionBatch, AttentionSpec
from megatron_dcp.attention.pieces import Limits, Piece, Unit, cut_batch, thread_ways
from megatron_dcp.merge import merge_into, merge_partials
from megatron_dcp.shard import Shard, is_quantised, widen

WORK_BYTES = 8 << 20  # fp32 keys and values of one call: large enough that calls are few, small enough for a CPU cache
COPY_BYTES = 128 << 10  # keys and values that are gathered in about the time that one more call takes
HEAD_BYTES = 1 << 20  # fp32 keys and values of one head that stay in a core's cache while many rows meet them
MAX_ROWS = 512  # of one call: enough for the matrix products to run at full speed
ALIGNED = 4  # fp32 numbers of 16 bytes: what torch's CUDA kernel loads at once


class Stored(NamedTuple):
    """Keys or values of a pool by head, ``[1, K, S, H]``, and what they are multiplied with, ``[1, K, S, 1]``."""

    stored: Tensor
    scale: Tensor | None


class Pool(NamedTuple):
    """A layer's keys and values."""

    k: Stored
    v: Stored


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


def fused(q_BKRH: Tensor, k_BKCH: Tensor, v_BKCH: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every row over ``C >= 1`` keys by torch's CPU flash kernel; fp32, ``H == V``."""
    assert k_BKCH.shape[2], "without keys the kernel kills the process"
    if k_BKCH.shape[2] < 16:  # fewer than a vector: it would answer NaN scores with out = 0, lse = 0
        return plain(q_BKRH, k_BKCH, v_BKCH, mask, scale)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BKRH, k_BKCH, v_BKCH, 0.0, False, attn_mask=mask, scale=scale
    )


def plain(q_BKRH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The same by two matrix products: any device, any ``V``. Holds the scores, ``B * K * R * C`` fp32."""
    scores_BKRC = torch.matmul(q_BKRH * scale, k_BKCH.transpose(-1, -2))
    if mask is not None:
        scores_BKRC += mask
    peak_BKR1 = scores_BKRC.amax(-1, keepdim=True)
    weights_BKRC = scores_BKRC.sub_(peak_BKR1).exp_()
    total_BKR1 = weights_BKRC.sum(-1, keepdim=True)
    return torch.matmul(weights_BKRC, v_BKCV).div_(total_BKR1), (peak_BKR1 + total_BKR1.log()).squeeze(-1)


def efficient(
    q_BKRH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The same by torch's memory-efficient CUDA kernel: fp32, ``H`` and ``V`` multiples of 4, no scores held."""
    rows = q_BKRH.shape[2]
    if mask is not None:
        columns = mask.shape[-1]
        mask = F.pad(mask, (0, -columns % ALIGNED))[..., :columns]  # its rows start where a load can
        mask = mask.expand(*q_BKRH.shape[:3], columns)
    out_BKRV, lse_BKR, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BKRH, k_BKCH, v_BKCV, mask, True, scale=scale
    )
    return out_BKRV, lse_BKR[..., :rows]  # padded to a multiple of 32


def pick_kernel(spec: AttentionSpec) -> Kernel:
    """The kernel for such a pool on its device."""
    if spec.device.type == "cpu" and spec.v_dim == spec.head_dim:
        return fused
    if spec.device.type == "cuda" and spec.head_dim % ALIGNED == spec.v_dim % ALIGNED == 0:
        return efficient
    return plain


@dataclass(frozen=True)
class SDPAPlan:
    """One step's kernel calls.

    Attributes:
        singles, chunks, padded: Units of one query token, in the order of the tokens, of several, and of one each of
            several sequences.
        single_tokens: Flat query tokens of ``singles``, int64.
        v_in_k: The values are the keys' first dims.
        blind: Some token sees no key on this rank.
    """

    singles: list[Unit]
    chunks: list[Unit]
    padded: list[Unit]
    single_tokens: Tensor
    kernel: Kernel
    blind: bool
    v_in_k: bool


class SDPABackend(AttentionBackend[SDPAPlan]):
    """Paged attention without any library but torch.

    A long run of keys in an fp32 pool is read in place. Otherwise keys and values of one call at a time pass through
    work space: at most ``WORK_BYTES`` in fp32 (or one key), plus half of that while a half-precision pool is gathered.
    Scores of the plain kernel take at most ``WORK_BYTES`` more (or one key's), a plan's masks at most ``8 * MAX_ROWS``
    bytes per query token.
    """

    name = "sdpa"
    pool_order = "heads_first"  # a head's keys side by side: the kernel reads them up to twice as fast

    def __init__(self) -> None:
        self._work: dict[torch.device, Tensor] = {}

    def supports(self, spec: AttentionSpec) -> str | None:
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16) and not is_quantised(spec.dtype):
            return f"{spec.dtype} pools are not read, only float32, bfloat16, float16, float8_e4m3fn and int8"
        return None

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, *, blocks: int = 0) -> SDPAPlan:
        kv_heads, head_dim, v_dim, group, device = spec.kv_heads, spec.head_dim, spec.v_dim, spec.group, spec.device
        kernel = pick_kernel(spec)
        key_bytes = kv_heads * (head_dim if spec.v_in_k else head_dim + v_dim) * 4
        tokens = max(1, MAX_ROWS // group)
        work_keys = max(1, WORK_BYTES // key_bytes)
        # A latent is read by two products: in parts that stay in the CPU's cache for the second one.
        call_keys = work_keys if spec.dtype != torch.float32 or spec.v_in_k else None
        if kernel is plain:
            rows = min(tokens, max(batch.q_lens, default=1)) * group
            by_scores = max(1, WORK_BYTES // (kv_heads * rows * 4))
            work_keys = min(work_keys, by_scores)
            call_keys = min(call_keys or by_scores, by_scores)
        limits = Limits(
            group=group,
            tokens=tokens,
            copy_keys=min(work_keys, COPY_BYTES // key_bytes),
            work_keys=work_keys,
            call_keys=call_keys,
            head_keys=max(1, HEAD_BYTES // ((head_dim + v_dim) * 4)),
            ways=thread_ways(kv_heads, torch.get_num_threads()) if kernel is fused else 1,
        )
        padded: list[Unit] = []
        own: list[Unit] = []
        for unit in cut_batch(batch, limits, device):
            (own if unit.tokens is None else padded).append(unit)
        singles = sorted((unit for unit in own if unit.stop - unit.first == 1), key=lambda unit: unit.first)
        return SDPAPlan(
            singles=singles,
            chunks=[unit for unit in own if unit.stop - unit.first > 1],
            padded=padded,
            single_tokens=torch.tensor([unit.first for unit in singles], dtype=torch.int64, device=device),
            kernel=kernel,
            blind=0 in batch.visible or any(map(eq, batch.hidden, batch.visible)),
            v_in_k=spec.v_in_k,
        )

    @torch.no_grad()
    def attend(self, q_TNH: Tensor, shard: Shard, plan: SDPAPlan, *, scale: float) -> tuple[Tensor, Tensor]:
        kv_heads, v_dim = shard.v_SKV.shape[1:]
        q_TKGH = q_TNH.float().contiguous().unflatten(1, (kv_heads, q_TNH.shape[1] // kv_heads))
        pool = _by_head(shard)
        out_TKGV = q_TKGH.new_empty(*q_TKGH.shape[:3], v_dim)
        lse_TKG = q_TKGH.new_empty(q_TKGH.shape[:3])
        if plan.blind:
            out_TKGV.zero_()
            lse_TKG.fill_(-torch.inf)
        for unit in plan.padded:
            assert unit.tokens is not None
            (piece,) = unit.pieces
            k_BKCH, v_BKCV = self._read(pool, piece, plan.v_in_k)
            q_BKGH = q_TKGH.index_select(0, unit.tokens)
            out, lse = plan.kernel(q_BKGH, k_BKCH, v_BKCV, piece.mask, scale)
            out_TKGV.index_copy_(0, unit.tokens, out)
            lse_TKG.index_copy_(0, unit.tokens, lse)
        for unit in plan.chunks:
            own = slice(unit.first, unit.stop)
            q_1KRH = q_TKGH[own].transpose(0, 1).flatten(1, 2).unsqueeze(0)
            out, lse = self._attend_unit(q_1KRH, pool, unit, plan, scale)
            by_token = (unit.stop - unit.first, q_TKGH.shape[2])
            out_TKGV[own] = out[0].unflatten(1, by_token).transpose(0, 1)
            lse_TKG[own] = lse[0].unflatten(1, by_token).transpose(0, 1)
        if plan.singles:
            every = len(plan.singles) == len(q_TKGH)  # decode: one unit for every token, in order
            rows = (q_TKGH if every else q_TKGH.index_select(0, plan.single_tokens)).split(1)
            partials = [
                self._attend_unit(q_1KRH, pool, unit, plan, scale)
                for q_1KRH, unit in zip(rows, plan.singles, strict=True)
            ]
            out_SKGV, lse_SKG = (torch.cat(parts) for parts in zip(*partials, strict=True))
            if every:
                return out_SKGV.flatten(1, 2), lse_SKG.flatten(1, 2)
            out_TKGV.index_copy_(0, plan.single_tokens, out_SKGV)
            lse_TKG.index_copy_(0, plan.single_tokens, lse_SKG)
        return out_TKGV.flatten(1, 2), lse_TKG.flatten(1, 2)

    def _attend_unit(
        self, q_1KRH: Tensor, pool: Pool, unit: Unit, plan: SDPAPlan, scale: float
    ) -> tuple[Tensor, Tensor]:
        merged: tuple[Tensor, Tensor] | None = None
        for piece in unit.pieces:
            k_BKCH, v_BKCV = self._read(pool, piece, plan.v_in_k)
            per_token = q_1KRH.shape[2] // (unit.stop - unit.first)
            rows = slice(piece.skip * per_token, None if piece.stop is None else piece.stop * per_token)
            q_BKRH = q_1KRH[:, :, rows]
            if piece.parts > 1:
                q_BKRH = q_BKRH.expand(piece.parts, -1, -1, -1)
            out, lse = plan.kernel(q_BKRH, k_BKCH, v_BKCV, piece.mask, scale)
            if piece.parts > 1:
                out, lse = (x.unsqueeze(0) for x in merge_partials(out, lse))
            if merged is None:
                merged = out, lse
            else:
                merge_into(merged[0][:, :, rows], merged[1][:, :, rows], out, lse)
        assert merged is not None
        return merged

    def _read(self, pool: Pool, piece: Piece, v_in_k: bool) -> tuple[Tensor, Tensor]:
        """Keys and values of a piece as ``[B, K, C, H]`` and ``[B, K, C, V]`` in fp32: views of the pool, or copied."""
        if isinstance(piece.keys, tuple) and pool.k.stored.dtype == torch.float32:
            k, v = (x.stored.narrow(2, *piece.keys) for x in (pool.k, pool.v))
        else:
            k_size, v_size = (x.stored.shape[1] * piece.length * x.stored.shape[3] for x in (pool.k, pool.v))
            work = self._workspace(k_size if v_in_k else k_size + v_size, pool.k.stored.device)
            k = _copy(pool.k, piece, work[:k_size])
            v = k[..., : pool.v.stored.shape[3]] if v_in_k else _copy(pool.v, piece, work[k_size:])
        if piece.parts == 1:
            return k, v
        by_part = (piece.parts, piece.length // piece.parts)
        return k[0].unflatten(1, by_part).transpose(0, 1), v[0].unflatten(1, by_part).transpose(0, 1)

    def _workspace(self, size: int, device: torch.device) -> Tensor:
        # kept between calls: fresh memory would be mapped page by page each time, which costs as much as the copy
        work = self._work.get(device)
        if work is None or work.numel() < size:
            with torch.inference_mode(False):  # else unusable outside of inference_mode
                work = self._work[device] = torch.empty(size, device=device)
        return work[:size]


def _by_head(shard: Shard) -> Pool:
    def by_head(stored_SKH: Tensor, scale_SK: Tensor | None) -> Stored:
        scale_1KS1 = None if scale_SK is None else scale_SK.t()[None, ..., None]
        return Stored(stored_SKH.transpose(0, 1).unsqueeze(0), scale_1KS1)

    return Pool(by_head(shard.k_SKH, shard.k_scale_SK), by_head(shard.v_SKV, shard.v_scale_SK))


def _copy(pool: Stored, piece: Piece, work: Tensor) -> Tensor:
    stored, scale = pool
    out_1KCH = work.view(1, stored.shape[1], piece.length, stored.shape[3])
    if isinstance(piece.keys, tuple):
        widen(stored.narrow(2, *piece.keys), out_1KCH)
        return out_1KCH if scale is None else out_1KCH.mul_(scale.narrow(2, *piece.keys))
    if stored.dtype == torch.float32:
        return torch.index_select(stored, 2, piece.keys, out=out_1KCH)
    widen(stored.index_select(2, piece.keys), out_1KCH)
    return out_1KCH if scale is None else out_1KCH.mul_(scale.index_select(2, piece.keys))
