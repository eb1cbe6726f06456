"""KVLayout against dealing the tokens out one by one."""

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_dcp.cache.layout import KVLayout

# D, I, block_size: powers of two and not, I of 1, inside a block, and the whole block.
SIZES = [(d, i, i * m) for d in (1, 2, 3, 4, 5, 8) for i in (1, 2, 3, 4) for m in (1, 2, 3)]


def deal(layout: KVLayout, length: int) -> list[list[int]]:
    """Global positions on every rank: I tokens to a rank, then I to the next, and round again."""
    shards: list[list[int]] = [[] for _ in range(layout.dcp_size)]
    rank = given_out = 0
    for position in range(length):
        if given_out == layout.interleave:
            rank, given_out = (rank + 1) % layout.dcp_size, 0
        shards[rank].append(position)
        given_out += 1
    return shards


@pytest.mark.parametrize(("dcp", "interleave", "block"), SIZES)
def test_equals_dealing_one_by_one(dcp: int, interleave: int, block: int) -> None:
    layout = KVLayout(dcp, interleave, block)
    length = 3 * layout.logical_block_tokens + 2
    shards = deal(layout, length)
    for rank, shard in enumerate(shards):
        for local, position in enumerate(shard):
            assert layout.owner(position) == rank
            assert layout.local_index(position) == local
            assert layout.global_position(local, rank) == position
        for n in range(length + 1):
            assert layout.local_length(n, rank) == sum(position < n for position in shard)
        for query in range(length):
            seen = shard[: layout.visible(query, rank)]
            assert seen == [position for position in shard if position <= query]


@pytest.mark.parametrize(("dcp", "interleave", "block"), SIZES)
def test_one_block_table_serves_all_ranks(dcp: int, interleave: int, block: int) -> None:
    layout = KVLayout(dcp, interleave, block)
    assert layout.logical_block_tokens == block * dcp
    for position in range(3 * block * dcp + 2):
        assert layout.local_index(position) // block == position // (block * dcp)
    for n in range(3 * block * dcp + 2):
        entries = {layout.local_index(position) // block for position in range(n)}
        assert layout.blocks_for(n) == len(entries)


@given(
    dcp=st.integers(1, 40), interleave=st.integers(1, 33), per_block=st.integers(1, 9), position=st.integers(0, 2**40)
)
@example(dcp=8, interleave=1, per_block=1, position=0)
@settings(max_examples=200, deadline=None)
def test_large_positions_keep_their_identities(dcp: int, interleave: int, per_block: int, position: int) -> None:
    layout = KVLayout(dcp, interleave, interleave * per_block)
    rank, local = layout.owner(position), layout.local_index(position)
    assert 0 <= rank < dcp
    assert layout.global_position(local, rank) == position
    assert sum(layout.local_length(position, r) for r in range(dcp)) == position
    grows = [layout.local_length(position + 1, r) - layout.local_length(position, r) for r in range(dcp)]
    assert grows == [int(r == rank) for r in range(dcp)]
    assert layout.local_length(position, rank) == local
    lengths = [layout.local_length(position, r) for r in range(dcp)]
    assert max(lengths) - min(lengths) <= interleave
    assert max(lengths) <= layout.blocks_for(position) * layout.block_size


@given(sizes=st.sampled_from(SIZES), start=st.integers(0, 200), count=st.integers(0, 120))
@settings(max_examples=200, deadline=None)
def test_a_step_writes_every_token_once(sizes: tuple[int, int, int], start: int, count: int) -> None:
    layout = KVLayout(*sizes)
    shards = deal(layout, start + count)
    written = []
    for rank, shard in enumerate(shards):
        mine = layout.local_range(start, start + count, rank)
        assert list(mine) == [local for local, position in enumerate(shard) if position >= start]
        local_t = torch.arange(mine.start, mine.stop)
        token_t = layout.global_position(local_t, rank) - start
        assert token_t.tolist() == [position - start for position in shard if position >= start]
        written += token_t.tolist()
    assert sorted(written) == list(range(count))


@pytest.mark.parametrize(("dcp", "interleave", "block"), SIZES)
def test_tensors_give_what_ints_give(dcp: int, interleave: int, block: int) -> None:
    layout = KVLayout(dcp, interleave, block)
    position_T = torch.cat((torch.arange(2 * block * dcp + 3), torch.arange(2**40, 2**40 + 7)))
    cases = [(layout.owner, ()), (layout.local_index, ()), (layout.blocks_for, ())]
    for rank in range(dcp):
        cases += [(layout.local_length, (rank,)), (layout.visible, (rank,)), (layout.global_position, (rank,))]
    for function, args in cases:
        result_T = function(position_T, *args)
        assert result_T.dtype == torch.int64
        assert result_T.tolist() == [function(position, *args) for position in position_T.tolist()]
        assert all(type(function(position, *args)) is int for position in (0, 1, block))


@pytest.mark.parametrize("dcp,interleave,block", [(1, 1, 4), (2, 1, 2), (3, 2, 4), (4, 4, 4)])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 100])
def test_a_window_is_a_suffix_of_the_visible_keys(dcp: int, interleave: int, block: int, window: int) -> None:
    layout = KVLayout(dcp, interleave, block)
    size = layout.logical_block_tokens
    for position in range(60):
        first = max(0, position - window + 1)
        for rank, own in enumerate(deal(layout, position + 1)):
            hidden, visible = layout.hidden(position, window, rank), layout.visible(position, rank)
            assert own[hidden:visible] == [p for p in own if p >= first]
        assert layout.first_block(position, window) == first // size
        for count in (1, 2, 9):
            last = position + count - 1
            assert last // size - first // size + 1 <= layout.window_blocks(window, count)
    spans = [(p + 8) // size - max(0, p - window + 1) // size + 1 for p in range(window, window + 2 * size)]
    assert max(spans) == layout.window_blocks(window, 9) or window + 9 < size + 2  # no more than is needed
    positions = torch.arange(60)
    for rank in range(dcp):
        expected = [layout.hidden(p, window, rank) for p in range(60)]
        assert layout.hidden(positions, window, rank).tolist() == expected


def test_slot_follows_the_block_table() -> None:
    layout = KVLayout(dcp_size=2, interleave=2, block_size=4)
    table = [7, 2, 9]
    slots = [layout.slot(table[local // 4], local) for local in range(12)]
    assert slots == [28, 29, 30, 31, 8, 9, 10, 11, 36, 37, 38, 39]
    local_t = torch.arange(12)
    assert layout.slot(torch.tensor(table)[local_t // 4], local_t).tolist() == slots


def test_the_drawing_in_the_docstring() -> None:
    layout = KVLayout(dcp_size=2, interleave=2, block_size=4)
    assert [layout.global_position(local, 0) for local in range(9)] == [0, 1, 4, 5, 8, 9, 12, 13, 16]
    assert [layout.global_position(local, 1) for local in range(8)] == [2, 3, 6, 7, 10, 11, 14, 15]
    assert [layout.blocks_for(n) for n in (0, 1, 8, 9, 16, 17)] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((0, 1, 4), "dcp_size=0"),
        ((2, 0, 4), "interleave=0"),
        ((2, 1, 0), "block_size=0"),
        ((2, 1.0, 4), "interleave=1.0"),
        ((2, 3, 4), r"interleave=3 does not divide block_size=4; use one of 1, 2, 4"),
        ((2, 8, 4), "interleave=8 does not divide block_size=4"),
    ],
)
def test_bad_sizes_are_named(sizes: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        KVLayout(*sizes)


def test_is_frozen_and_refuses_a_foreign_rank() -> None:
    layout = KVLayout(2, 1, 4)
    with pytest.raises(FrozenInstanceError):
        layout.dcp_size = 3  # type: ignore[misc]
    for rank in (-1, 2):
        with pytest.raises(AssertionError, match=f"dcp rank {rank} of 2"):
            layout.local_length(5, rank)


def test_imports_no_torch() -> None:
    code = "import sys, megatron_dcp.cache; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
