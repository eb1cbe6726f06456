"""How a paged shard is cut into kernel calls: which queries meet which keys, what is read in place, what is copied.

Shapes: ``Q`` query tokens of a unit, ``G`` query heads per KV head, ``R = Q * G`` rows (token-major), ``C`` keys.

A *run* is a stretch of a sequence's keys in consecutive slots. Long runs are read in place, one call per run; short
ones are gathered into work space first, many at a time. A *unit* is a stretch of query tokens; its *pieces* cover
disjoint keys, so their partial attentions merge exactly by log-sum-exp. Keys that all tokens of a unit see need no
mask; the few that only its later tokens see (the chunk's own) form one masked piece, and so do those that only its
earlier tokens see, where a window slides past them. No row of any piece is ever without a key, which kernels disagree
about.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dcp.attention.base import AttentionBatch

Run = tuple[int, int]  # first slot, number of keys

MIN_SPLIT_KEYS = 512  # keys worth a thread of their own
MANY_ROWS = 32  # the kernels' block of rows: with fewer, keys are read once


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one kernel call may take; all sizes follow from the model's shape, not from the context.

    Attributes:
        group: ``G``.
        tokens: Most query tokens of a unit.
        copy_keys: Runs up to this length are copied together rather than given a call each.
        work_keys: Most keys that are copied to work space for one call.
        call_keys: Most keys of one call; ``None``: no bound.
        head_keys: Most keys of one call of many rows: a head's keys and values are read once for each block of rows,
            and are to stay in the CPU's cache meanwhile.
        ways: Parts that a decode call's keys are split into, so that few KV heads still occupy all threads.
    """

    group: int
    tokens: int
    copy_keys: int
    work_keys: int
    call_keys: int | None
    head_keys: int
    ways: int

    def __post_init__(self) -> None:
        assert self.copy_keys <= self.work_keys, self

    @property
    def masked_keys(self) -> int:
        """Most keys of a masked piece, so that a mask has at most ``2 * tokens`` columns."""
        return min(self.work_keys, 2 * self.tokens)


@dataclass(frozen=True)
class Piece:
    """Keys of one kernel call.

    Attributes:
        keys: A run to read in place, or slots to gather, int64 ``[parts * C]``.
        parts: Equal parts that the keys fall into, the kernel's batch dimension.
        mask: Added to the scores: fp32 ``[parts or 1, 1, R or 1, C]`` of 0 and -inf; ``None``: every row sees all.
        skip, stop: The unit's query tokens ``[skip, stop)`` see some of these keys, the others none; ``mask`` has rows
            for these only. ``None``: up to the last.
    """

    keys: Run | Tensor
    parts: int = 1
    mask: Tensor | None = None
    skip: int = 0
    stop: int | None = None

    @property
    def length(self) -> int:
        return self.keys.shape[0] if isinstance(self.keys, Tensor) else self.keys[1]


@dataclass(frozen=True)
class Unit:
    """Query tokens and all the keys that they see.

    Attributes:
        first, stop: Flat query tokens ``[first, stop)`` of one sequence.
        pieces: Their keys; at least one piece, the first for all of the tokens.
        tokens: Instead of ``[first, stop)``: single tokens of as many sequences, int64 ``[parts]``. The one piece's
            parts then belong to one token each.
    """

    first: int
    stop: int
    pieces: tuple[Piece, ...]
    tokens: Tensor | None = None


def thread_ways(kv_heads: int, threads: int) -> int:
    """Parts to split keys into, so that ``kv_heads * parts`` is a multiple of ``threads``."""
    return threads // gcd(kv_heads, threads)


def cut_batch(batch: AttentionBatch, limits: Limits, device: torch.device) -> list[Unit]:
    """Units that cover every query token which sees a key, each once."""
    units: list[Unit] = []
    short: list[tuple[int, list[Run]]] = []
    first = 0
    hidden = batch.hidden or (0,) * len(batch.visible)
    for q_len, table in zip(batch.q_lens, batch.block_tables, strict=True):
        stop = first + q_len
        low, high = hidden[first], batch.visible[stop - 1]
        if low < high:
            runs = find_runs(table, low, high, batch.block_size)
            if q_len == 1 and high - low <= limits.copy_keys:
                short.append((first, runs))
            else:
                seen = Seen([n - low for n in hidden[first:stop]], [n - low for n in batch.visible[first:stop]], first)
                units.extend(_cut_sequence(seen, runs, limits, device))
        first = stop
    return units + _pad_short(short, limits, device)


def find_runs(table: Sequence[int], low: int, high: int, block_size: int) -> list[Run]:
    """Runs of a sequence's local keys ``[low, high)``, in order; blocks that follow each other in the pool join."""
    blocks = -(-high // block_size)
    assert blocks <= len(table), f"{high} keys need {blocks} blocks of {block_size}, the table has {len(table)}"
    runs: list[Run] = []
    first = start = low // block_size
    for index in range(first + 1, blocks):
        if table[index] != table[index - 1] + 1:
            runs.append((table[start] * block_size, (index - start) * block_size))
            start = index
    runs.append((table[start] * block_size, high - start * block_size))
    slot, length = runs[0]
    cut = low - first * block_size
    runs[0] = slot + cut, length - cut
    return runs


def clip_runs(runs: Iterable[Run], low: int, high: int) -> list[Run]:
    """Runs of keys ``[low, high)`` out of those of a sequence."""
    clipped = []
    begin = 0
    for slot, length in runs:
        cut = max(low - begin, 0)
        keep = min(high - begin, length) - cut
        if keep > 0:
            clipped.append((slot + cut, keep))
        begin += length
    return clipped


def slots_of(runs: Sequence[Run]) -> Tensor:
    """Slots of all keys of ``runs``, int64, in order."""
    slots, lengths = torch.tensor(runs, dtype=torch.int64).unbind(1)
    begins = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(slots - begins, lengths) + torch.arange(int(lengths.sum()))


class Seen(NamedTuple):
    """Which of the keys of a sequence's runs each of its query tokens sees: ``[low[i], high[i])``, neither decreasing.

    Attributes:
        first: Flat number of the first of the tokens.
    """

    low: list[int]
    high: list[int]
    first: int


def _cut_sequence(seen: Seen, runs: list[Run], limits: Limits, device: torch.device) -> Iterator[Unit]:
    token = 0
    while token < len(seen.low):
        if seen.low[token] == seen.high[token]:
            token += 1
            continue
        end = _unit_end(seen, token, limits)
        yield Unit(seen.first + token, seen.first + end, tuple(_cut_unit(seen, token, end, runs, limits, device)))
        token = end


def _unit_end(seen: Seen, token: int, limits: Limits) -> int:
    """End of a unit from ``token`` on: not too many tokens or masked keys, and a key that all of its tokens see."""
    low, high = seen.low, seen.high
    end = min(len(low), token + limits.tokens, bisect_right(high, high[token] + limits.masked_keys, token))
    if low[end - 1] > low[token]:
        end = min(end, bisect_right(low, low[token] + limits.masked_keys, token), bisect_left(low, high[token], token))
    return end


def _cut_unit(
    seen: Seen, token: int, end: int, runs: list[Run], limits: Limits, device: torch.device
) -> Iterator[Piece]:
    """Pieces of query tokens ``[token, end)``, which all see the keys ``[dense, dense_end)``."""
    begin, dense = seen.low[token], seen.low[end - 1]
    dense_end, total = seen.high[token], seen.high[end - 1]
    alone = dense == begin and dense_end == total
    if not alone and total - begin <= limits.masked_keys and 2 * (dense_end - dense) <= total - begin:
        # a call of its own for a few keys costs more than masking them
        yield _masked_piece(clip_runs(runs, begin, total), seen, begin, (token, token, end), limits.group, device)
        return
    yield from _dense_pieces(clip_runs(runs, dense, dense_end), (end - token) * limits.group, limits, device)
    if dense_end < total:
        first = bisect_right(seen.high, dense_end, token, end)
        tail = clip_runs(runs, dense_end, total)
        yield _masked_piece(tail, seen, dense_end, (token, first, end), limits.group, device)
    if begin < dense:
        last = bisect_left(seen.low, dense, token, end)
        head = clip_runs(runs, begin, dense)
        yield _masked_piece(head, seen, begin, (token, token, last), limits.group, device)


def _dense_pieces(runs: Iterable[Run], rows: int, limits: Limits, device: torch.device) -> list[Piece]:
    """Pieces without a mask; as the order of keys does not matter there, all short runs are gathered together."""
    pieces = []
    loose: list[Run] = []
    for slot, length in runs:
        if length <= limits.copy_keys:
            loose.append((slot, length))
            continue
        step = limits.call_keys or length
        if rows >= MANY_ROWS:
            step = min(step, limits.head_keys)
        for begin in range(0, length, step):
            size = min(step, length - begin)
            parts = limits.ways if rows < MANY_ROWS and size >= limits.ways * MIN_SPLIT_KEYS else 1
            pieces.append(Piece((slot + begin, size - size % parts), parts))
            if size % parts:
                loose.append((slot + begin + size - size % parts, size % parts))
    if len(loose) == 1:
        pieces.append(Piece(loose[0]))
    elif loose:
        pieces.extend(Piece(slots) for slots in slots_of(loose).to(device).split(limits.work_keys))
    return pieces


def _masked_piece(
    runs: list[Run], seen: Seen, begin: int, tokens: tuple[int, int, int], group: int, device: torch.device
) -> Piece:
    """A piece of the keys from ``begin`` on; ``tokens``: the unit's first, those ``[first, stop)`` that see some."""
    length = sum(run[1] for run in runs)
    keys = runs[0] if len(runs) == 1 else slots_of(runs).to(device)
    unit, first, stop = tokens
    low_Q, high_Q = (torch.tensor(bounds[first:stop]) - begin for bounds in (seen.low, seen.high))
    mask_QC = _mask(high_Q, length, low_Q)
    return Piece(
        keys, mask=mask_QC.repeat_interleave(group, 0)[None, None].to(device), skip=first - unit, stop=stop - unit
    )


def _pad_short(short: list[tuple[int, list[Run]]], limits: Limits, device: torch.device) -> list[Unit]:
    """Decode tokens of short sequences, together in as few calls as their padded keys fit the work space."""
    per_call = max(1, limits.work_keys // max((sum(n for _, n in runs) for _, runs in short), default=1))
    units = []
    for begin in range(0, len(short), per_call):
        some = short[begin : begin + per_call]
        if len(some) == 1 and len(some[0][1]) == 1:
            token, runs = some[0]
            units.append(Unit(token, token + 1, (Piece(runs[0]),)))
            continue
        seen_B = torch.tensor([sum(n for _, n in runs) for _, runs in some])
        width = int(seen_B.max())
        # padded with the sequence's own last key: any other slot may hold NaN, which no mask removes
        column_BC = torch.minimum(torch.arange(width), seen_B[:, None] - 1)
        slots = slots_of([run for _, runs in some for run in runs])
        padded = slots[column_BC + (seen_B.cumsum(0) - seen_B)[:, None]].flatten()
        tokens = torch.tensor([token for token, _ in some])
        even = bool((seen_B == width).all())
        mask = None if even else _mask(seen_B, width)[:, None, None].to(device)
        piece = Piece(padded.to(device), len(some), mask)
        units.append(Unit(some[0][0], some[-1][0] + 1, (piece,), tokens.to(device)))
    return units


def _mask(high: Tensor, columns: int, low: Tensor | None = None) -> Tensor:
    column = torch.arange(columns)
    hidden = column >= high[:, None]
    if low is not None:
        hidden |= column < low[:, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
