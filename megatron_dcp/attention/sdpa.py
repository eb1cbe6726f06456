"""Attention with what torch itself brings: the fused CPU kernel where it fits, two matrix products elsewhere.

Shapes: ``T`` query tokens, ``S`` pool slots, ``N`` query heads, ``K`` KV heads, ``G = N // K``, ``H`` head dim, ``V``
values' head dim; in one kernel call ``B`` parts, ``R`` rows (tokens x ``G``), ``C`` keys.

The query heads of a group are folded into rows, so that a KV head's keys and values are read once for all of them.
All arithmetic is fp32, whatever the pool stores: the fused kernel would round the partials of half-precision inputs to
half precision, and then tokens depend on how many partials there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dcp.attention.base import AttentionBackend, AttentionBatch
from megatron_dcp.attention.pieces import Limits, Piece, Unit, cut_batch, thread_ways

WORK_BYTES = 8 << 20  # fp32 keys and values of one call: large enough that calls are few, small enough for a CPU cache
COPY_BYTES = 256 << 10  # keys and values that are gathered in about the time that one more call takes
MAX_ROWS = 512  # of one call: enough for the matrix products to run at full speed

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


def fused(q_BKRH: Tensor, k_BKCH: Tensor, v_BKCH: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every row over ``C >= 1`` keys by torch's CPU flash kernel; fp32, ``H == V``."""
    assert k_BKCH.shape[2], "without keys the kernel kills the process"
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BKRH, k_BKCH, v_BKCH, 0.0, False, attn_mask=mask, scale=scale
    )


def plain(q_BKRH: Tensor, k_BKCH: Tensor, v_BKCV: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The same by two matrix products: any device, any ``V``. Holds the scores, ``B * K * R * C`` fp32."""
    scores_BKRC = torch.matmul(q_BKRH * scale, k_BKCH.transpose(-1, -2))
    if mask is not None:
        scores_BKRC += mask
    lse_BKR = torch.logsumexp(scores_BKRC, -1)
    return torch.matmul(scores_BKRC.sub_(lse_BKR[..., None]).exp_(), v_BKCV), lse_BKR


@dataclass(frozen=True)
class SDPAPlan:
    """One step's kernel calls. ``blind``: some token sees no key on this rank."""

    units: list[Unit]
    kernel: Kernel
    blind: bool


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

    def supports(self, *, head_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{dtype} pools are not read, only float32, bfloat16 and float16"
        return None

    def plan(
        self,
        batch: AttentionBatch,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        v_dim: int | None = None,
    ) -> SDPAPlan:
        v_dim = head_dim if v_dim is None else v_dim
        assert heads % kv_heads == 0, (heads, kv_heads)
        fits = device.type == "cpu" and v_dim == head_dim
        group = heads // kv_heads
        key_bytes = kv_heads * (head_dim + v_dim) * 4
        tokens = max(1, MAX_ROWS // group)
        work_keys = max(1, WORK_BYTES // key_bytes)
        call_keys = work_keys if dtype != torch.float32 else None
        if not fits:
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
            ways=thread_ways(kv_heads, torch.get_num_threads()) if fits else 1,
        )
        return SDPAPlan(
            units=cut_batch(batch, limits, device), kernel=fused if fits else plain, blind=0 in batch.visible
        )

    @torch.no_grad()
    def attend(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKV: Tensor, plan: SDPAPlan, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        tokens, heads, _ = q_TNH.shape
        kv_heads, v_dim = v_SKV.shape[1:]
        q_TKGH = q_TNH.float().contiguous().unflatten(1, (kv_heads, heads // kv_heads))
        k_KSH, v_KSV = k_SKH.transpose(0, 1), v_SKV.transpose(0, 1)
        out_TKGV = q_TKGH.new_empty(*q_TKGH.shape[:3], v_dim)
        lse_TKG = q_TKGH.new_empty(q_TKGH.shape[:3])
        if plan.blind:
            out_TKGV.zero_()
            lse_TKG.fill_(-torch.inf)
        for unit in plan.units:
            if unit.tokens is not None:
                (piece,) = unit.pieces
                k_BKCH, v_BKCV = self._read(k_KSH, v_KSV, piece)
                out, lse = plan.kernel(q_TKGH[unit.tokens], k_BKCH, v_BKCV, piece.mask, scale)
                out_TKGV[unit.tokens] = out
                lse_TKG[unit.tokens] = lse
                continue
            own = slice(unit.first, unit.stop)
            out, lse = self._attend_unit(q_TKGH[own], k_KSH, v_KSV, unit, plan.kernel, scale)
            shape = (kv_heads, unit.stop - unit.first, heads // kv_heads)
            out_TKGV[own] = out.view(*shape, v_dim).transpose(0, 1)
            lse_TKG[own] = lse.view(shape).transpose(0, 1)
        return out_TKGV.flatten(1, 2), lse_TKG.flatten(1, 2)

    def _attend_unit(
        self, q_QKGH: Tensor, k_KSH: Tensor, v_KSV: Tensor, unit: Unit, kernel: Kernel, scale: float
    ) -> tuple[Tensor, Tensor]:
        group = q_QKGH.shape[2]
        q_1KRH = q_QKGH.transpose(0, 1).flatten(1, 2).unsqueeze(0)
        merged: tuple[Tensor, Tensor] | None = None
        for piece in unit.pieces:
            k_BKCH, v_BKCV = self._read(k_KSH, v_KSV, piece)
            skip = piece.skip * group
            q_BKRH = q_1KRH[:, :, skip:].expand(piece.parts, -1, -1, -1)
            out_BKRV, lse_BKR = kernel(q_BKRH, k_BKCH, v_BKCV, piece.mask, scale)
            for out, lse in zip(out_BKRV.split(1), lse_BKR.split(1), strict=True):
                if merged is None:
                    merged = out, lse
                else:
                    _merge_into(merged[0][:, :, skip:], merged[1][:, :, skip:], out, lse)
        assert merged is not None
        return merged

    def _read(self, k_KSH: Tensor, v_KSV: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        """Keys and values of a piece as ``[B, K, C, H]`` and ``[B, K, C, V]`` in fp32: views of the pool, or copied."""
        if isinstance(piece.keys, tuple) and k_KSH.dtype == torch.float32:
            k, v = k_KSH.narrow(1, *piece.keys), v_KSV.narrow(1, *piece.keys)
        else:
            k_size, v_size = (x.shape[0] * piece.length * x.shape[2] for x in (k_KSH, v_KSV))
            k_flat, v_flat = self._workspace(k_size + v_size, k_KSH.device).split((k_size, v_size))
            k, v = _copy(k_KSH, piece, k_flat), _copy(v_KSV, piece, v_flat)
        if piece.parts == 1:
            return k.unsqueeze(0), v.unsqueeze(0)
        return tuple(x.unflatten(1, (piece.parts, -1)).transpose(0, 1) for x in (k, v))

    def _workspace(self, size: int, device: torch.device) -> Tensor:
        # kept between calls: fresh memory would be mapped page by page each time, which costs as much as the copy
        work = self._work.get(device)
        if work is None or work.numel() < size:
            with torch.inference_mode(False):  # else unusable outside of inference_mode
                work = self._work[device] = torch.empty(size, device=device)
        return work[:size]


def _copy(pool_KSH: Tensor, piece: Piece, work: Tensor) -> Tensor:
    out_KCH = work.view(pool_KSH.shape[0], piece.length, pool_KSH.shape[2])
    if isinstance(piece.keys, tuple):
        return out_KCH.copy_(pool_KSH.narrow(1, *piece.keys))
    if pool_KSH.dtype == torch.float32:
        return torch.index_select(pool_KSH, 1, piece.keys, out=out_KCH)
    return out_KCH.copy_(pool_KSH.index_select(1, piece.keys))


def _merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """``megatron_dcp.merge`` for two partials of which neither is empty, in place and in four operations."""
    both = torch.logaddexp(lse, other_lse)
    out.lerp_(other_out, torch.exp(other_lse - both).unsqueeze(-1))
    lse.copy_(both)
