"""PrefixCache: what it finds holds the very tokens asked for, nothing is lost, the least recently used goes first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_dcp.cache import BlockPool, PrefixCache, WindowPool


def reader(tokens):
    return lambda start, stop: tokens[start:stop]


def make(num_blocks: int, window: int | None = None, window_blocks: int | None = None, **options) -> PrefixCache:
    pool = None if window is None else WindowPool(window_blocks or num_blocks, window, 2)
    return PrefixCache(BlockPool(num_blocks), 2, window=pool, **options)


def compute(cache: PrefixCache, seq, tokens, *, limit=10**9) -> int:
    """Run a sequence over its whole prompt, as a scheduler does; how many tokens of it were cached."""
    found = cache.match(reader(tokens), min(limit, len(tokens)))
    cache.start(seq, found)
    cache.reserve(seq, -(-len(tokens) // 2))
    cache.extend(seq, reader(tokens), len(tokens))
    cache.check_integrity()
    return 2 * len(found)


def ended(cache: PrefixCache, *texts) -> None:
    """Sequences of these tokens have run and ended, in this order."""
    for tokens in texts:
        compute(cache, "ended", tokens)
        cache.free("ended")


def known(cache: PrefixCache, tokens) -> int:
    return 2 * len(cache.match(reader(tokens), len(tokens)))


class CacheMachine(RuleBasedStateMachine):
    """Sequences over two tokens, so that prefixes meet all the time; the model knows what was written to every block.

    A sequence may end without being computed, and two may compute the same: they have different blocks then.
    """

    @initialize(
        num_blocks=st.integers(1, 12),
        enabled=st.sampled_from([True, True, True, False]),
        window=st.sampled_from([None, 1, 2, 3, 5, 50]),
        window_blocks=st.integers(1, 12),
    )
    def init(self, num_blocks, enabled, window, window_blocks) -> None:
        self.cache = make(num_blocks, window, window_blocks, enabled=enabled)
        self.window = window
        self.window_written: dict[int, tuple[int, ...]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.written: dict[int, tuple[int, ...]] = {}  # by block: all tokens up to its last
        self.made = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), twins=st.integers(1, 2))
    def begin(self, tokens, twins) -> None:
        for _ in range(twins):
            self.begin_one(tokens)

    def begin_one(self, tokens) -> None:
        found = self.cache.match(reader(tokens), len(tokens) - 1)
        assert 2 * len(found) < len(tokens)
        assert self.cache.enabled or not found
        for i, block in enumerate(found):
            assert self.written[block] == tuple(tokens[: 2 * i + 2])
        self.made += 1
        self.cache.start(self.made, found)
        self.check_window(self.made, tokens, 2 * len(found))
        self.tokens[self.made], self.computed[self.made] = tokens, 2 * len(found)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 14))
    def advance(self, data, count) -> None:
        seq = data.draw(st.sampled_from(list(self.tokens)))
        start, tokens = self.computed[seq], self.tokens[seq]
        stop = min(len(tokens), start + count)
        blocks, pool = -(-stop // 2), self.cache.pool
        available = self.cache.num_available
        if pool.missing(seq, blocks) > available:
            with pytest.raises(ValueError, match="free other sequences first|shorten the sequence"):
                self.cache.reserve(seq, blocks)
            return
        missing = pool.missing(seq, blocks)
        self.cache.reserve(seq, blocks)
        assert self.cache.num_available == available - missing
        for i in range(start // 2, blocks):
            block = pool.table(seq)[i]
            if stop > 2 * i and 2 * i + 2 > start:
                assert pool.holders(block) == 1 and block not in pool.kept  # nothing that is shared is written
                self.written[block] = tuple(tokens[: min(stop, 2 * i + 2)])
                if self.window is not None:
                    block = self.cache.window.pool.table(seq)[i]
                    assert self.cache.window.pool.holders(block) == 1 and block not in self.cache.window.pool.kept
                    self.window_written[block] = tuple(tokens[: min(stop, 2 * i + 2)])
        self.check_window(seq, tokens, start, stop)
        self.computed[seq] = stop
        self.cache.extend(seq, reader(tokens), stop)

    def check_window(self, seq, tokens, start, stop=None) -> None:
        """What the tokens from ``start`` on see through the window is there."""
        if self.window is not None:
            table = self.cache.window.pool.table(seq)
            stop = start if stop is None else stop
            for position in range(max(0, start + 1 - self.window), stop):
                written = self.window_written[table[position // 2]]
                assert written == tuple(tokens[: len(written)]) and len(written) > position

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data) -> None:
        seq = data.draw(st.sampled_from(list(self.tokens)))
        self.cache.free(seq)
        del self.tokens[seq], self.computed[seq]

    @precondition(lambda self: not self.tokens)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.pool.num_free == self.cache.pool.num_blocks and not self.cache.num_cached

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        held = {block for seq in self.tokens for block in self.cache.pool.table(seq)}
        assert self.cache.num_held == len(held)
        assert self.window is not None or self.cache.num_available == self.cache.pool.num_blocks - len(held)
        for seq, tokens in self.tokens.items():
            for i, block in enumerate(self.cache.pool.table(seq)[: self.computed[seq] // 2]):
                assert self.written[block] == tuple(tokens[: 2 * i + 2])

    def teardown(self) -> None:
        for seq in getattr(self, "tokens", ()):
            self.cache.free(seq)
        if hasattr(self, "cache"):
            if self.cache.window is not None:
                assert not self.cache.window.pool.sequences
            self.cache.check_integrity()
            assert self.cache.num_held == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_longest_prefix_of_whole_blocks_is_found() -> None:
    cache = make(10)
    ended(cache, [1, 2, 3, 4, 5], [1, 2, 9, 9, 7, 7])
    for tokens, length in [
        ([1, 2, 3, 4, 5, 6], 4),
        ([1, 2, 3, 5], 2),
        ([1, 2, 9, 9, 7, 7, 7, 7], 6),
        ([1], 0),
        ([3, 4], 0),  # known, but after another prefix
        ([2, 1], 0),
    ]:
        assert known(cache, tokens) == length, tokens
    assert len(cache.match(reader([1, 2, 3, 4]), 4)) == 2
    assert len(cache.match(reader([1, 2, 3, 4]), 3)) == 1
    assert cache.match(reader([1, 2, 3, 4]), 1) == cache.match(reader([1, 2]), 0) == []


def test_tokens_that_a_narrow_key_would_confuse() -> None:
    cache = make(10)
    ended(cache, [1, 256], [2**31, 5])
    for tokens in ([257, 0], [1, 0], [2**31 - 2**32, 5], [0, 5]):
        assert known(cache, tokens) == 0
    assert known(cache, [1, 256]) == known(cache, [2**31, 5]) == 2


def test_a_block_is_found_only_once_it_is_computed() -> None:
    cache, tokens = make(10), [1, 2, 3, 4]
    cache.start("a", [])
    cache.reserve("a", 2)
    assert known(cache, tokens) == 0
    for computed, found in [(1, 0), (2, 2), (3, 2), (4, 4)]:
        cache.extend("a", reader(tokens), computed)
        assert known(cache, tokens) == found


def test_live_sequences_share_and_their_blocks_are_not_evicted() -> None:
    cache = make(4)
    compute(cache, "a", [1, 2, 3, 4])
    assert compute(cache, "b", [1, 2, 3, 4, 5, 6]) == 4
    assert cache.pool.table("b")[:2] == cache.pool.table("a") and cache.num_available == 1
    cache.free("a")
    assert cache.num_available == 1  # b holds them
    compute(cache, "c", [9, 9])
    with pytest.raises(ValueError, match="needs 2 blocks"):
        cache.reserve("c", 2)
    cache.free("b")
    cache.reserve("c", 2)
    cache.check_integrity()


def test_the_least_recently_used_goes_first_and_ends_before_starts() -> None:
    cache = make(6)
    old, new = [1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 6, 6]
    ended(cache, old, new)
    compute(cache, "grows", [])
    for blocks, left in [(1, (4, 6)), (2, (2, 6)), (3, (0, 6)), (4, (0, 4))]:
        cache.reserve("grows", blocks)
        assert (known(cache, old), known(cache, new)) == left
        cache.check_integrity()
    cache.free("grows")
    assert cache.pool.num_free == 4


def test_a_hit_makes_a_prefix_recent() -> None:
    cache = make(6)
    old, new = [1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 6, 6]
    ended(cache, old, new)
    compute(cache, "again", old[:4])
    cache.free("again")
    compute(cache, "grows", [])
    cache.reserve("grows", 4)  # the end of the old one, which nobody asked for, and all of the new one
    assert (known(cache, old), known(cache, new)) == (4, 0)


def test_of_two_who_compute_the_same_the_first_is_found_and_the_other_goes_on_below_it() -> None:
    cache, tokens = make(7), [1, 1, 2, 2, 3, 3]
    for seq in ("a", "b"):
        cache.start(seq, [])
        cache.reserve(seq, 1)
    for seq in ("a", "b"):
        cache.extend(seq, reader(tokens), 2)
    cache.reserve("b", 2)
    cache.extend("b", reader(tokens), 4)
    cache.check_integrity()
    assert cache.match(reader(tokens), 4) == [cache.pool.table("a")[0], cache.pool.table("b")[1]]
    cache.free("a")  # its block is idle now, with a held one below
    cache.start("c", [])
    cache.reserve("c", 4)
    assert known(cache, tokens) == 4
    cache.reserve("c", 5)  # takes it, though
    cache.check_integrity()
    assert known(cache, tokens) == 0
    cache.free("c")
    cache.reserve("b", 3)
    cache.extend("b", reader(tokens), 6)  # below a block that is gone, nothing can be found
    cache.check_integrity()
    assert known(cache, tokens) == 0
    cache.free("b")
    cache.check_integrity()
    assert cache.pool.num_free == 7


def test_the_end_of_one_of_two_makes_the_common_block_recent() -> None:
    cache, tokens = make(4), [1, 1, 2, 2]
    for seq, blocks in (("a", 1), ("b", 2)):
        cache.start(seq, [])
        cache.reserve(seq, blocks)
        cache.extend(seq, reader(tokens), 2 * blocks)
    cache.free("a")
    ended(cache, [5, 5])
    cache.free("b")
    cache.check_integrity()
    compute(cache, "grows", [])
    cache.reserve("grows", 2)  # a free block, which was b's copy of the first, and the least recently used
    assert known(cache, [5, 5]) == 0 and known(cache, tokens) == 4


def test_a_pool_full_of_cached_blocks_still_gives_runs() -> None:
    cache = make(64)
    ended(cache, *([[i] * 16 for i in range(8)]))
    assert cache.pool.num_free == 0 and cache.num_available == 64
    cache.start("grows", [])
    for blocks in range(1, 17):
        cache.reserve("grows", blocks)
    table = cache.pool.table("grows")
    assert sum(a + 1 != b for a, b in zip(table, table[1:], strict=False)) <= 3


def test_clear_forgets_and_wants_no_live_sequence() -> None:
    cache = make(4)
    compute(cache, "a", [1, 2])
    with pytest.raises(AssertionError, match="live"):
        cache.clear()
    cache.free("a")
    cache.clear()
    assert known(cache, [1, 2]) == 0 and cache.pool.num_free == 4


def test_a_prefix_is_reused_where_its_window_is_left() -> None:
    cache, tokens = make(20, window=3, window_blocks=4), list(range(12))
    cache.start("first", [])
    for stop in range(2, 14, 2):  # three blocks hold the window of a step's tokens; what came first is forgotten
        cache.reserve("first", stop // 2)
        cache.extend("first", reader(tokens), stop)
    cache.free("first")
    cache.check_integrity()
    assert known(cache, tokens) == 12
    assert cache.num_cached == 6 and len(cache.window.pool.kept) == 4
    assert known(cache, tokens[:6]) == 6 and known(cache, tokens[:5]) == 0  # [2, 4) would be seen, and [0, 2) is gone
    compute(cache, "again", [*tokens[:8], 50, 51])
    assert cache.window.pool.table("again")[:3] == [-1, -1, -1]
    cache.free("again")
    cache.clear()
    assert cache.window.pool.num_free == 4


def test_a_window_pool_as_large_as_all_that_runs_never_fails() -> None:
    """Sequences far longer than their windows share a pool that holds these only."""
    cache = make(100, window=4, window_blocks=2 * 4)
    for text in range(3):
        for seq in ("a", "b"):
            cache.start(seq, [])
        for stop in range(2, 60, 3):
            for seq in ("a", "b"):
                tokens = [text, len(seq), *range(60)] if seq == "a" else [text, 99, *range(60)]
                cache.reserve(seq, -(-stop // 2))
                cache.extend(seq, reader(tokens), stop)
                cache.check_integrity()
        for seq in ("a", "b"):
            cache.free(seq)


def test_disabled_it_is_a_pool() -> None:
    cache = make(4, enabled=False)
    ended(cache, [1, 2, 3, 4])
    assert known(cache, [1, 2]) == 0 and cache.pool.num_free == 4 and cache.num_cached == 0


def test_check_integrity_says_what_is_wrong() -> None:
    def broken() -> PrefixCache:
        cache = make(6)
        ended(cache, [1, 1, 2, 2])
        return cache

    cache = broken()
    cache._idle.popitem()
    with pytest.raises(AssertionError, match="are idle, but"):
        cache.check_integrity()
    cache = broken()
    cache._idle = dict(reversed(cache._idle.items()))
    with pytest.raises(AssertionError, match="block 0 would be evicted before block 1"):
        cache.check_integrity()
    cache = broken()
    cache.pool.reserve("stray", 1)
    with pytest.raises(AssertionError, match=r"chains of \[\], but blocks of \('stray',\)"):
        cache.check_integrity()
    cache = broken()
    del cache._nodes[1]
    with pytest.raises(AssertionError, match=r"blocks \[0, 1\] in the trie"):
        cache.check_integrity()
    cache = broken()
    cache._nodes[1].block = 0
    with pytest.raises(AssertionError, match="block 0 is out of place"):
        cache.check_integrity()
