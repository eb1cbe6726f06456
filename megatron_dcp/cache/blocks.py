"""Which sequences hold which physical block of the KV pool. One table serves all DCP ranks; no torch.

A block is free, or in the tables of one or more sequences, or kept: a kept block (the prefix cache's) is not free even
when no sequence holds it. A sequence may give back blocks at the start of its table that it needs no more (of layers
with a sliding window): their entries become `RELEASED`.

An attention back end reads consecutive blocks in place, so the allocator keeps a sequence in few runs: it grows into
the block behind its last one, and a new sequence starts where both it and the one in front of it can grow::

    [A A A . . . . . . . . .]   B comes: middle of the largest free extent
    [A A A . . . . B B . . .]   A and B grow to the right without being cut up
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set

from megatron_dcp.config import check_at_least

RELEASED = -1


class OutOfBlocks(ValueError):
    """The pool has too few free blocks for a reservation. Nothing was reserved.

    Attributes:
        needed: Blocks that were asked for beyond those the sequence holds.
        free: Blocks that were free.
        permanent: The sequence would not fit into the empty pool either, so waiting is no use.
    """

    def __init__(self, message: str, *, needed: int, free: int, permanent: bool) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free
        self.permanent = permanent


class BlockPool:
    """Block tables of the live sequences over ``num_blocks`` physical blocks.

    Args:
        num_blocks: Physical blocks of the pool on every rank.
        tokens_per_block: ``KVLayout.logical_block_tokens``, tokens that a block holds over the whole DCP group; only
            used to state sizes in tokens in error messages.
    """

    def __init__(self, num_blocks: int, *, tokens_per_block: int | None = None) -> None:
        check_at_least("num_blocks", num_blocks, 1)
        self.num_blocks = num_blocks
        self._tokens_per_block = tokens_per_block
        self._tables: dict[Hashable, list[int]] = {}
        self._holders = [0] * num_blocks  # tables that a block is in
        self._kept: set[int] = set()
        # Free extents [start, stop), disjoint and not adjacent: their starts in order, and start -> stop.
        self._starts = [0]
        self._stops = {0: num_blocks}
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds and that are not kept."""
        return self._num_free

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """Live sequences, oldest first."""
        return tuple(self._tables)

    @property
    def live(self) -> Set[Hashable]:
        """Live sequences, to look one up."""
        return self._tables.keys()

    @property
    def kept(self) -> Set[int]:
        """Blocks that are not freed with their last sequence."""
        return self._kept

    def table(self, seq: Hashable) -> list[int]:
        """Physical blocks of a live sequence in the order of its tokens. ``KeyError`` if it is unknown.

        The pool's own list, not to be changed: it is read for every sequence in every step.
        """
        return self._tables[seq]

    def holders(self, block: int) -> int:
        """Sequences that hold the block."""
        return self._holders[block]

    def missing(self, seq: Hashable, num_blocks: int) -> int:
        """Free blocks that ``reserve(seq, num_blocks)`` would take."""
        return max(0, num_blocks - len(self._tables.get(seq, ())))

    def share(self, seq: Hashable, blocks: Sequence[int]) -> None:
        """Make a new sequence whose table begins with these blocks: each is held or kept already, or `RELEASED`."""
        assert seq not in self._tables, f"sequence {seq!r} has blocks already"
        for block in _held(blocks):
            assert self._holders[block] or block in self._kept, f"block {block} is free"
            self._holders[block] += 1
        self._tables[seq] = list(blocks)

    def keep(self, block: int) -> None:
        """Do not free the block, which a sequence holds, together with its last sequence."""
        assert self._holders[block], f"nobody holds block {block}"
        self._kept.add(block)

    def drop(self, block: int) -> None:
        """Undo ``keep``: the block is free now, or when its last sequence is freed."""
        self._kept.remove(block)
        if not self._holders[block]:
            self._give(block, block + 1)

    def reserve(self, seq: Hashable, num_blocks: int) -> None:
        """Let the table of ``seq``, a new or a live sequence, have at least ``num_blocks`` entries in all.

        Entries that it has never move. A new sequence lies in one run if any free extent is large enough.

        Raises:
            OutOfBlocks: Too few blocks are free; nothing has changed.
        """
        check_at_least("num_blocks", num_blocks, 0)
        needed = self.missing(seq, num_blocks)
        if needed > self._num_free:
            raise self._out_of_blocks(seq, num_blocks, needed)
        table = self._tables.setdefault(seq, [])
        while needed:
            start, stop = self._next_run(table, needed)
            self._take(start, stop)
            table.extend(range(start, stop))
            self._holders[start:stop] = [1] * (stop - start)
            needed -= stop - start

    def free(self, seq: Hashable) -> None:
        """Forget a live sequence and free its blocks that are neither shared nor kept. ``KeyError`` if unknown."""
        self._drop_holder(self._tables.pop(seq))

    def release(self, seq: Hashable, num_blocks: int) -> list[int]:
        """Give back the first ``num_blocks`` blocks of a sequence; those of them that it had not given back before."""
        table = self._tables[seq]
        first = num_blocks
        while first and table[first - 1] != RELEASED:
            first -= 1
        blocks = table[first:num_blocks]
        table[first:num_blocks] = [RELEASED] * len(blocks)
        self._drop_holder(blocks)
        return blocks

    def _drop_holder(self, blocks: Sequence[int]) -> None:
        for block in _held(blocks):
            self._holders[block] -= 1
        for start, stop in _runs(b for b in _held(blocks) if not self._holders[b] and b not in self._kept):
            self._give(start, stop)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` saying what is wrong unless every block is either free, or held or kept."""
        free = [block for start in self._starts for block in range(start, self._stops[start])]
        held = Counter(block for table in self._tables.values() for block in _held(table))
        for seq, table in self._tables.items():
            if len(set(_held(table))) < len(_held(table)):
                raise AssertionError(f"sequence {seq!r} holds a block twice: {table}")
        both = sorted(set(free) & (held.keys() | self._kept))
        lost = sorted(set(range(self.num_blocks)) - set(free) - held.keys() - self._kept)
        foreign = sorted((set(free) | held.keys() | self._kept) - set(range(self.num_blocks)))
        if both or lost or foreign:
            raise AssertionError(
                f"blocks that are free and held or kept: {both}; that nobody holds: {lost}; outside the pool: {foreign}"
            )
        wrong = {b: (count, held[b]) for b, count in enumerate(self._holders) if count != held[b]}
        if wrong:
            raise AssertionError(f"holders counted and found, by block: {wrong}")
        if len(free) != self._num_free:
            raise AssertionError(f"num_free is {self._num_free}, but {len(free)} blocks are free")
        extents = [(start, self._stops[start]) for start in self._starts]
        if len(self._stops) != len(extents) or any(a[1] >= b[0] for a, b in zip(extents, extents[1:], strict=False)):
            raise AssertionError(f"free extents are not in order, disjoint and merged: {extents}")

    def _next_run(self, table: list[int], needed: int) -> tuple[int, int]:
        """Free blocks ``[start, stop)``, at most ``needed``, that go to the end of ``table`` next."""
        if table and table[-1] + 1 in self._stops:
            start = table[-1] + 1
            return start, min(self._stops[start], start + needed)
        start = max(self._starts, key=lambda start: self._stops[start] - start)
        stop = self._stops[start]
        # A sequence that ends right in front of the extent would be stopped by a run at its start.
        if any(other and other[-1] + 1 == start for other in self._tables.values()):
            start += max(0, stop - start - needed) // 2
        return start, min(stop, start + needed)

    def _take(self, start: int, stop: int) -> None:
        """Cut ``[start, stop)`` out of the free extent that contains it."""
        left = self._starts.pop(bisect_right(self._starts, start) - 1)
        right = self._stops.pop(left)
        assert left <= start < stop <= right, f"[{start}, {stop}) is not inside the free extent [{left}, {right})"
        for rest_start, rest_stop in ((left, start), (stop, right)):
            if rest_start < rest_stop:
                insort(self._starts, rest_start)
                self._stops[rest_start] = rest_stop
        self._num_free -= stop - start

    def _give(self, start: int, stop: int) -> None:
        """Return ``[start, stop)`` to the free extents and merge it with its neighbours."""
        self._num_free += stop - start
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == stop:
            stop = self._stops.pop(self._starts.pop(at))
        if at > 0 and self._stops[self._starts[at - 1]] == start:
            self._stops[self._starts[at - 1]] = stop
        else:
            self._starts.insert(at, start)
            self._stops[start] = stop

    def _out_of_blocks(self, seq: Hashable, num_blocks: int, needed: int) -> OutOfBlocks:
        def size(blocks: int) -> str:
            tokens = f" ({blocks * self._tokens_per_block} tokens)" if self._tokens_per_block else ""
            return f"{blocks} block{'' if blocks == 1 else 's'}{tokens}"

        permanent = num_blocks > self.num_blocks
        if permanent:
            bound = f"the pool of the whole DCP group has {size(self.num_blocks)}"
            remedy = "shorten the sequence, or raise num_blocks, bytes_per_rank or decode_context_parallel_size"
        else:
            bound = f"only {size(self._num_free)} of the DCP group's {size(self.num_blocks)} are free"
            remedy = "free other sequences first, or raise num_blocks or bytes_per_rank"
        more = f", {size(needed)} more than it holds" if needed < num_blocks else ""
        message = f"sequence {seq!r} needs {size(num_blocks)} of KV cache{more}, but {bound}; {remedy}"
        return OutOfBlocks(message, needed=needed, free=self._num_free, permanent=permanent)


def _held(table: Sequence[int]) -> Sequence[int]:
    """The entries after those that were released, which come first."""
    if not table or table[0] != RELEASED:
        return table
    return table[bisect_right(table, RELEASED, key=lambda block: min(block, 0)) :]


def _runs(table: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs ``[start, stop)`` of consecutive blocks, in table order."""
    start = stop = -1
    for block in table:
        if block != stop:
            if start >= 0:
                yield start, stop
            start = block
        stop = block + 1
    if start >= 0:
        yield start, stop
