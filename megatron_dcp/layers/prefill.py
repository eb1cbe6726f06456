"""Striped prefill: the tokens of a prompt's chunk are dealt out over the DCP ranks as their keys are.

A rank computes the tokens that it will keep the keys of, through the whole layer stack, so that a chunk takes ``1/D``
of the products and of the activations. Only attention needs more than the rank has, and either side can travel:

*Pass KV*: the ranks' keys and values go round a ring, in slabs of whole blocks. A rank meets each with its own queries;
what it has merged in the end is the attention of its own tokens.
*Pass Q*: the queries are gathered, every rank attends with all of them to its own shard, and one all-to-all brings each
token's partials to its rank, which merges them.

Keys and values travel once per chunk, so the first is cheap where the chunk is long against what it sees; the second
where it is short. `plan_striped` takes the one that sends fewer bytes. `orthogonal` only: there the ranks of a DCP
group have the same heads.

Shapes: ``T`` striped tokens of all ranks, ``t`` of this rank, ``N`` query heads, ``V`` dim of what is merged, ``C``
slots of a slab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_dcp.attention.base import AttentionBatch
from megatron_dcp.cache.layout import KVLayout
from megatron_dcp.cache.sizes import StripeSizes, slab_blocks
from megatron_dcp.comm.collectives import all_gather, all_to_all
from megatron_dcp.comm.ring import ring
from megatron_dcp.config import PrefillName
from megatron_dcp.kernels.choice import merge_partials
from megatron_dcp.layers.context import DCPContext
from megatron_dcp.layers.sink import count_sinks
from megatron_dcp.merge import merge_into
from megatron_dcp.shard import Shard

MIN_TOKENS = 64  # of a step: fewer take no shorter where they are dealt out
MIN_CHUNK = 16  # of one sequence

PlanAttention = Callable[[AttentionBatch], Any]


class Chunk(NamedTuple):
    """Tokens ``[start, stop)`` of a sequence that a step computes, by global position.

    Attributes:
        block_table: Of the layers in question.
        window: Keys that a query of these layers sees; ``None``: all.
    """

    start: int
    stop: int
    block_table: Sequence[int]
    window: int | None = None

    def blocks(self, layout: KVLayout) -> range:
        """Entries of the table with the keys that its tokens see."""
        first = 0 if self.window is None else layout.first_block(self.start, self.window)
        return range(first, layout.blocks_for(self.stop))


@dataclass(frozen=True)
class Slab:
    """Blocks of the chunks' sequences that travel together.

    Attributes:
        slots: Of the sender's pool, int64 ``[C]``.
        first, stop: Own striped tokens of the sequences in it.
        by_source: Their plan over the slab of each rank, by rank; ``None`` for the own one.
    """

    slots: Tensor
    first: int
    stop: int
    by_source: tuple[Any, ...]


@dataclass(frozen=True)
class PassKV:
    """Own tokens over the own shard, and over the slabs of the other ranks."""

    own: Any
    slabs: tuple[Slab, ...]


@dataclass(frozen=True)
class PassQ:
    """All ranks' tokens, in the order of the ranks, over the own shard."""

    attention: Any


@dataclass(frozen=True)
class StripedPlan:
    """How a step's striped tokens attend.

    Attributes:
        counts: Tokens of each rank.
        way: What travels.
    """

    counts: tuple[int, ...]
    way: PassKV | PassQ


class StripedAttention(Protocol):
    """What an attention layer brings: its partial attention over a shard, whoever's it is."""

    def partial(self, q_TNH: Tensor, shard: Shard, plan: Any, ctx: DCPContext) -> tuple[Tensor, Tensor]:
        """``(out_TNV, lse_TN)``, fp32."""


def is_striped(counts: Sequence[int], layout: KVLayout, name: PrefillName) -> list[bool]:
    """Which of the sequences of a step, that compute so many tokens each, are dealt out over the ranks.

    Every rank then has at least ``I`` tokens of each: a stretch of ``D I`` positions has ``I`` of every rank.
    """
    if layout.dcp_size == 1 or name == "replicated":
        return [False] * len(counts)
    turn = layout.dcp_size * layout.interleave
    striped = [count >= max(turn, MIN_CHUNK if name == "auto" else 1) for count in counts]
    total = sum(count for count, dealt in zip(counts, striped, strict=True) if dealt)
    return striped if name != "auto" or total >= MIN_TOKENS else [False] * len(counts)


def plan_striped(
    chunks: Sequence[Chunk],
    layout: KVLayout,
    rank: int,
    *,
    name: PrefillName,
    sizes: StripeSizes,
    plan: PlanAttention,
    device: torch.device,
) -> StripedPlan:
    """Plan the attention of a step's striped tokens, once for all layers; every rank decides the same.

    Args:
        chunks: In the order of the tokens.
        plan: The back end's, for this model.
    """
    positions = [_positions(chunks, layout, source) for source in range(layout.dcp_size)]
    counts = tuple(sum(map(len, of_rank)) for of_rank in positions)
    kv_bytes = sizes.per_key * layout.block_size * sum(len(chunk.blocks(layout)) for chunk in chunks)
    q_bytes = sizes.per_query * max(counts)
    way: PassKV | PassQ
    if name == "pass_kv" or (name == "auto" and kv_bytes <= q_bytes):
        own = plan(_batch(chunks, positions[rank], layout, rank))
        way = PassKV(own, tuple(_slabs(chunks, positions[rank], layout, rank, sizes, plan, device)))
    else:
        flat = [of_chunk for of_rank in positions for of_chunk in of_rank]
        way = PassQ(plan(_batch(list(chunks) * layout.dcp_size, flat, layout, rank)))
    return StripedPlan(counts, way)


def attend_striped(
    attention: StripedAttention, layer_number: int, q_tNH: Tensor, plan: StripedPlan, ctx: DCPContext
) -> Tensor:
    """Attention of this rank's striped tokens over their whole sequences: fp32 ``[t, N, V]``. A collective call."""
    if isinstance(plan.way, PassKV):
        return _pass_kv(attention, layer_number, q_tNH, plan.way, ctx)
    q_TNH = gather_tokens(q_tNH, plan.counts, ctx)
    out_TNV, lse_TN = attention.partial(q_TNH, ctx.shard(layer_number), plan.way.attention, ctx)
    count_sinks(attention, out_TNV, lse_TN, ctx, alone=False)
    packed_TNV1 = torch.cat((out_TNV, lse_TN.unsqueeze(-1)), dim=-1)
    packed_PtNV1 = all_to_all(packed_TNV1, plan.counts, ctx.groups.dcp, ctx.metrics)
    return merge_partials(packed_PtNV1[..., :-1], packed_PtNV1[..., -1])[0]


def gather_tokens(x_t: Tensor, counts: Sequence[int], ctx: DCPContext) -> Tensor:
    """Every rank's striped tokens, in the order of the ranks: ``[t, …]`` → ``[T, …]``."""
    padded = x_t
    if len(x_t) < max(counts):
        padded = x_t.new_zeros(max(counts), *x_t.shape[1:])
        padded[: len(x_t)] = x_t
    gathered = all_gather(padded, ctx.groups.dcp, ctx.metrics)
    if min(counts) == max(counts):
        return gathered.flatten(0, 1)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


def _pass_kv(attention: StripedAttention, layer_number: int, q_tNH: Tensor, way: PassKV, ctx: DCPContext) -> Tensor:
    pool, index = ctx.pool_of(layer_number)
    hops = ring((pool.pack(index, slab.slots) for slab in way.slabs), ctx.groups.dcp, ctx.metrics)
    out_tNV, lse_tN = attention.partial(q_tNH, ctx.shard(layer_number), way.own, ctx)  # while the first slab travels
    count_sinks(attention, out_tNV, lse_tN, ctx, alone=True)
    for hop in hops:
        slab = way.slabs[hop.number]
        mine = slice(slab.first, slab.stop)
        shard = pool.unpack(hop.tensor)
        partial = attention.partial(q_tNH[mine], shard, slab.by_source[hop.source], ctx)
        merge_into(out_tNV[mine], lse_tN[mine], *partial)
    return out_tNV


def _positions(chunks: Sequence[Chunk], layout: KVLayout, rank: int) -> list[np.ndarray]:
    """Global positions of the tokens of each chunk that ``rank`` computes."""
    found = []
    for chunk in chunks:
        local = layout.local_range(chunk.start, chunk.stop, rank)
        found.append(layout.global_position(np.arange(local.start, local.stop), rank))  # type: ignore[type-var]
    return found


def _batch(chunks: Sequence[Chunk], positions: Sequence[np.ndarray], layout: KVLayout, source: int) -> AttentionBatch:
    """Queries at ``positions[i]`` of the sequence of ``chunks[i]`` over the shard of rank ``source``."""
    window = chunks[0].window
    flat = np.concatenate(positions)
    return AttentionBatch(
        q_lens=tuple(map(len, positions)),
        visible=tuple(_visible(flat, layout, source).tolist()),
        block_tables=tuple(tuple(chunk.block_table) for chunk in chunks),
        block_size=layout.block_size,
        hidden=() if window is None else tuple(_hidden(flat, window, layout, source).tolist()),
    )


def _visible(positions: np.ndarray, layout: KVLayout, source: int) -> np.ndarray:
    return layout.visible(positions, source)  # type: ignore[type-var]


def _hidden(positions: np.ndarray, window: int, layout: KVLayout, source: int) -> np.ndarray:
    return layout.hidden(positions, window, source)  # type: ignore[type-var]


def _slabs(
    chunks: Sequence[Chunk],
    positions: Sequence[np.ndarray],
    layout: KVLayout,
    rank: int,
    sizes: StripeSizes,
    plan: PlanAttention,
    device: torch.device,
) -> Iterator[Slab]:
    """All blocks of all chunks' sequences, in slabs; ``positions`` are this rank's."""
    size = layout.block_size
    ends = np.cumsum([len(of_chunk) for of_chunk in positions])
    for segments in _segments(chunks, layout, slab_blocks(sizes, layout)):
        blocks = [block for i, low, high in segments for block in chunks[i].block_table[low:high]]
        slots = (torch.tensor(blocks).unsqueeze(1) * size + torch.arange(size)).flatten()
        by_source: list[Any] = []
        for source in range(layout.dcp_size):
            if source == rank:
                by_source.append(None)
                continue
            visible, hidden, tables, begin = [], [], [], 0
            for i, low, high in segments:
                seen = _visible(positions[i], layout, source) - low * size
                visible += np.clip(seen, 0, (high - low) * size).tolist()
                if (window := chunks[i].window) is not None:
                    before = _hidden(positions[i], window, layout, source) - low * size
                    hidden += np.clip(before, 0, (high - low) * size).tolist()
                tables.append(tuple(range(begin, begin + high - low)))
                begin += high - low
            q_lens = tuple(len(positions[i]) for i, _, _ in segments)
            by_source.append(plan(AttentionBatch(q_lens, tuple(visible), tuple(tables), size, tuple(hidden))))
        first = int(ends[segments[0][0]]) - len(positions[segments[0][0]])
        yield Slab(slots.to(device), first, int(ends[segments[-1][0]]), tuple(by_source))


def _segments(chunks: Sequence[Chunk], layout: KVLayout, most: int) -> Iterator[list[tuple[int, int, int]]]:
    """``(chunk, first block, end)`` of the parts of block tables that travel together, ``most`` blocks at a time."""
    segments: list[tuple[int, int, int]] = []
    room = most
    for i, chunk in enumerate(chunks):
        low, end = chunk.blocks(layout).start, chunk.blocks(layout).stop
        while low < end:
            high = min(end, low + room)
            segments.append((i, low, high))
            room -= high - low
            low = high
            if not room:
                yield segments
                segments, room = [], most
    if segments:
        yield segments
