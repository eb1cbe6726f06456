"""BlockPool: no block twice, none lost, few runs."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from megatron_dcp.cache.blocks import BlockPool, OutOfBlocks


def runs(table: list[int]) -> int:
    return sum(i == 0 or table[i - 1] + 1 != block for i, block in enumerate(table))


def largest_gap(pool: BlockPool) -> int:
    held = {block for seq in pool.sequences for block in pool.table(seq)}
    best = gap = 0
    for block in range(pool.num_blocks):
        gap = 0 if block in held else gap + 1
        best = max(best, gap)
    return best


class PoolMachine(RuleBasedStateMachine):
    """Any order of new, growing and freed sequences, beside a model that only remembers the tables."""

    live = Bundle("live")

    @initialize(num_blocks=st.integers(1, 40))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, tokens_per_block=8)
        self.tables: dict[int, list[int]] = {}
        self.made = 0

    def grow(self, seq: int, num_blocks: int) -> None:
        before, gap = self.tables.get(seq), largest_gap(self.pool)
        old = before or []
        needed = max(0, num_blocks - len(old))
        free = self.pool.num_blocks - sum(map(len, self.tables.values()))
        assert self.pool.missing(seq, num_blocks) == needed
        if needed > free:
            with pytest.raises(OutOfBlocks) as caught:
                self.pool.reserve(seq, num_blocks)
            assert (caught.value.needed, caught.value.free) == (needed, free)
            assert caught.value.permanent == (num_blocks > self.pool.num_blocks)
            assert (seq in self.pool.sequences) == (before is not None)
            return
        held = {block for table in self.tables.values() for block in table}
        self.pool.reserve(seq, num_blocks)
        table = self.tables[seq] = self.pool.table(seq).copy()
        assert len(table) == max(num_blocks, len(old))
        assert table[: len(old)] == old
        assert not held & set(table[len(old) :])
        if not old and needed <= gap:
            assert runs(table) == min(1, needed)
        if old and needed and old[-1] + 1 < self.pool.num_blocks and old[-1] + 1 not in held:
            assert table[len(old)] == old[-1] + 1

    @rule(target=live, num_blocks=st.integers(0, 15))
    def new(self, num_blocks: int) -> int:
        self.made += 1
        self.grow(self.made, num_blocks)
        return self.made

    @rule(seq=live, more=st.integers(0, 45))
    def extend(self, seq: int, more: int) -> None:
        if seq in self.tables:
            self.grow(seq, len(self.tables[seq]) + more)

    @rule(seq=consumes(live))
    def free(self, seq: int) -> None:
        if self.tables.pop(seq, None) is None:
            with pytest.raises(KeyError):
                self.pool.free(seq)
        else:
            self.pool.free(seq)

    @invariant()
    def nothing_twice_nothing_lost(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held = [block for table in self.tables.values() for block in table]
        assert len(held) == len(set(held)) and set(held) <= set(range(self.pool.num_blocks))
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        assert self.pool.sequences == tuple(self.tables)
        for seq, table in self.tables.items():
            assert self.pool.table(seq) == table

    def teardown(self) -> None:
        for seq in self.tables:
            self.pool.free(seq)
        self.pool.check_integrity()
        assert self.pool.num_free == largest_gap(self.pool) == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


def test_a_lone_sequence_fills_the_pool_in_one_run() -> None:
    pool = BlockPool(50)
    for num_blocks in (3, 4, 20, 20, 7, 50):
        pool.reserve("a", num_blocks)
    assert pool.table("a") == list(range(50))
    assert pool.num_free == 0


def test_sequences_that_grow_in_turn_stay_in_one_run() -> None:
    pool = BlockPool(64)
    for num_blocks in range(1, 17):
        for seq in range(4):
            pool.reserve(seq, num_blocks)
    assert [runs(pool.table(seq)) for seq in range(4)] == [1, 1, 1, 1]
    assert pool.num_free == 0


def test_a_fragmented_pool_is_used_to_the_last_block() -> None:
    pool = BlockPool(12)
    for seq in range(12):
        pool.reserve(seq, 1)
    for seq in range(0, 12, 2):
        pool.free(seq)
    pool.reserve("long", 6)
    pool.check_integrity()
    assert len(set(pool.table("long"))) == 6
    assert pool.num_free == 0


def test_shared_blocks_are_free_with_their_last_sequence() -> None:
    pool = BlockPool(8)
    pool.reserve("a", 3)
    pool.share("b", pool.table("a")[:2])
    pool.reserve("b", 4)
    assert pool.table("b")[:2] == pool.table("a")[:2] and pool.num_free == 3
    assert [pool.holders(block) for block in pool.table("b")] == [2, 2, 1, 1]
    pool.check_integrity()
    pool.free("a")
    assert pool.num_free == 4
    pool.check_integrity()
    pool.free("b")
    assert pool.num_free == 8
    pool.check_integrity()


def test_kept_blocks_outlive_their_sequences_until_dropped() -> None:
    pool = BlockPool(4)
    pool.reserve("a", 3)
    first, second, third = pool.table("a")
    pool.keep(first)
    pool.keep(second)
    pool.free("a")
    assert pool.num_free == 2 and pool.kept == {first, second}
    pool.check_integrity()
    pool.share("b", [first])
    pool.drop(first)  # held: stays until its sequence goes
    pool.drop(second)
    assert pool.num_free == 3
    pool.check_integrity()
    pool.free("b")
    assert pool.num_free == 4 and not pool.kept
    with pytest.raises(AssertionError, match=f"block {third} is free"):
        pool.share("c", [third])
    with pytest.raises(AssertionError, match=f"nobody holds block {third}"):
        pool.keep(third)
    pool.check_integrity()


def test_released_blocks_are_free_unless_others_hold_them() -> None:
    pool = BlockPool(8)
    pool.reserve("a", 4)
    pool.keep(pool.table("a")[1])
    pool.share("b", pool.table("a")[:3])
    first = list(pool.table("a"))
    assert pool.release("a", 2) == first[:2] and pool.release("a", 2) == []
    assert pool.table("a") == [-1, -1, *first[2:]] and pool.num_free == 4
    pool.check_integrity()
    assert pool.missing("a", 5) == 1
    pool.reserve("a", 5)
    pool.free("b")
    assert pool.num_free == 4  # one block is kept, and "a" holds three
    assert pool.release("a", 5) == [*first[2:], *pool.table("a")[5:], *[b for b in (first[-1] + 1,)]]
    pool.check_integrity()
    pool.share("c", [-1, first[1]])
    pool.drop(first[1])
    pool.reserve("a", 7)
    pool.check_integrity()
    pool.free("a")
    pool.free("c")
    pool.check_integrity()
    assert pool.num_free == 8


def test_out_of_blocks_names_sizes_of_the_group_and_the_remedy() -> None:
    pool = BlockPool(10, tokens_per_block=256)
    pool.reserve("a", 7)
    with pytest.raises(OutOfBlocks) as caught:
        pool.reserve("b", 4)
    assert str(caught.value) == (
        "sequence 'b' needs 4 blocks (1024 tokens) of KV cache, but only 3 blocks (768 tokens) of the DCP group's "
        "10 blocks (2560 tokens) are free; free other sequences first, or raise num_blocks or bytes_per_rank"
    )
    assert not caught.value.permanent
    pool.reserve("b", 2)
    with pytest.raises(OutOfBlocks) as caught:
        pool.reserve("a", 9)
    assert "needs 9 blocks (2304 tokens) of KV cache, 2 blocks (512 tokens) more than it holds" in str(caught.value)
    assert "only 1 block (256 tokens)" in str(caught.value)
    with pytest.raises(OutOfBlocks) as caught:
        pool.reserve("a", 11)
    assert "needs 11 blocks (2816 tokens)" in str(caught.value) and "group has 10 blocks (2560" in str(caught.value)
    assert "raise num_blocks, bytes_per_rank or decode_context_parallel_size" in str(caught.value)
    assert caught.value.permanent
    with pytest.raises(OutOfBlocks) as caught:
        BlockPool(1).reserve("a", 2)
    assert caught.value.permanent and "tokens" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_bad_sizes_and_unknown_sequences() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="num_blocks=-1"):
        pool.reserve("a", -1)
    pool.reserve("a", 1)
    pool.free("a")
    for call in (pool.free, pool.table):
        with pytest.raises(KeyError):
            call("a")
    assert pool.num_free == 4


def test_check_integrity_says_what_is_wrong() -> None:
    def broken() -> BlockPool:
        pool = BlockPool(8)
        pool.reserve("a", 3)
        pool.reserve("b", 2)
        return pool

    pool = broken()
    pool._tables["b"][0] = pool._tables["a"][0]
    with pytest.raises(AssertionError, match=r"nobody holds: \[4\]"):
        pool.check_integrity()
    pool = broken()
    pool._tables["c"] = [pool._tables["a"][0]]
    with pytest.raises(AssertionError, match=r"holders counted and found, by block: \{0: \(1, 2\)\}"):
        pool.check_integrity()
    pool = broken()
    pool._tables["a"][1] = pool._tables["a"][0]
    with pytest.raises(AssertionError, match=r"'a' holds a block twice: \[0, 0, 2\]"):
        pool.check_integrity()
    pool = broken()
    lost = pool._tables["a"].pop()
    with pytest.raises(AssertionError, match=rf"nobody holds: \[{lost}\]"):
        pool.check_integrity()
    pool = broken()
    pool._tables["c"] = [8]
    with pytest.raises(AssertionError, match=r"outside the pool: \[8\]"):
        pool.check_integrity()
    pool = broken()
    pool._num_free += 1
    with pytest.raises(AssertionError, match="num_free is 4, but 3 blocks are free"):
        pool.check_integrity()
    for holder in ("sequence", "cache"):
        pool = broken()
        first = pool._starts[0]
        if holder == "sequence":
            pool._tables["c"] = [first]
        else:
            pool._kept.add(first)
        with pytest.raises(AssertionError, match=rf"free and held or kept: \[{first}\]"):
            pool.check_integrity()
    pool = BlockPool(8)
    pool._starts, pool._stops = [0, 4], {0: 4, 4: 8}
    with pytest.raises(AssertionError, match="not in order, disjoint and merged"):
        pool.check_integrity()
