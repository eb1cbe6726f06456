"""How a shard's staircase becomes virtual sequences under the two masks of a library, held against brute force."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_dcp.attention import AttentionBatch
from megatron_dcp.attention.rows import RowLists, Rows, cut_batch
from reference import shard_positions

CPU = torch.device("cpu")


def seen_by_tokens(lists: RowLists) -> dict[int, list[tuple[int, ...]]]:
    """Per token, the blocks and the number of keys that a library would let it see."""
    seen: dict[int, list[tuple[int, ...]]] = {}
    first = 0
    for q_len, kv_len, table in zip(lists.q_lens, lists.kv_lens, lists.tables, strict=True):
        for place, token in enumerate(lists.tokens[first : first + q_len]):
            keys = kv_len - (q_len - 1 - place) if lists.causal else kv_len
            seen.setdefault(token, []).append((keys, *table))
        first += q_len
    assert first == len(lists.tokens)
    return seen


def staircase(tokens: int, start: int, dcp_size: int, interleave: int, rank: int) -> list[int]:
    shard = shard_positions(start + tokens, rank, dcp_size, interleave)
    return [sum(p <= q for p in shard) for q in range(start, start + tokens)]


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_every_token_sees_its_keys_once(seed: int, uniform: bool) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    q_lens, visible, tables = [], [], []
    blocks = list(range(3000))
    rng.shuffle(blocks)
    for _ in range(rng.randint(1, 6)):
        q_lens.append(rng.choice([1, 1, 2, 9, 70]))
        if rng.random() < 0.5:
            dcp_size = rng.choice([1, 2, 3, 8])
            own = staircase(
                q_lens[-1], rng.choice([0, 5, 90]), dcp_size, rng.choice([1, 2, 16]), rng.randrange(dcp_size)
            )
        else:  # as in striped prefill, where steps of any height occur
            own, seen = [], rng.choice([0, 0, 1, 30])
            for _ in range(q_lens[-1]):
                seen += rng.choice([0, 0, 1, 1, 2, 5])
                own.append(seen)
        needed = -(-own[-1] // block_size)
        visible += own
        tables.append((*blocks[:needed], 2**40))
        del blocks[:needed]
    batch = AttentionBatch(
        q_lens=tuple(q_lens), visible=tuple(visible), block_tables=tuple(tables), block_size=block_size
    )
    found: dict[int, list[tuple[int, ...]]] = {}
    for lists in RowLists.of_batch(batch, uniform=uniform):
        assert min(lists.q_lens) >= 1 and not lists.blind
        assert not uniform or len(set(lists.q_lens)) == 1
        assert uniform or lists.causal or (max(lists.q_lens) == 1) == (min(lists.q_lens) == 1)
        rows = seen_by_tokens(lists)
        assert not found.keys() & rows.keys()
        found.update(rows)
        assert all(keys >= 1 for one in rows.values() for keys, *_ in one), "no row without a key"
    token = 0
    for q_len, table in zip(q_lens, tables, strict=True):
        for _ in range(q_len):
            if not visible[token]:
                assert token not in found
            else:
                ((keys, *own),) = found[token]
                assert keys == visible[token]
                assert own[: -(-keys // block_size)] == list(table[: -(-keys // block_size)])
                assert 2**40 not in own
            token += 1


def shapes(visible: list[int]) -> list[tuple[bool, int, int]]:
    batch = AttentionBatch(
        q_lens=(len(visible),), visible=tuple(visible), block_tables=(tuple(range(1000)),), block_size=4
    )
    return [(one.causal, len(one.tokens), one.keys) for one in cut_batch(batch)]


def test_a_chunk_is_one_chain_on_one_rank() -> None:
    assert shapes(staircase(50, 7, 1, 1, 0)) == [(True, 50, 57)]


def test_chains_cover_all_but_the_ends_without_interleaving() -> None:
    for rank in range(4):
        found = shapes(staircase(64, 64, 4, 1, rank))
        chains = [length for causal, length, _ in found if causal]
        assert len(chains) == 4 and sum(chains) >= 64 - 4 and len(found) <= 5


def test_a_chunk_is_a_chain_and_a_full_sequence_per_interleave_step() -> None:
    found = shapes(staircase(256, 0, 2, 16, 0))
    assert found == [(True, 128, 128), *((False, 16, keys) for keys in range(16, 129, 16))]


def test_sets_are_in_order_and_apart() -> None:
    batch = AttentionBatch(
        q_lens=(1, 3, 4, 1),
        visible=(9, 4, 5, 6, 2, 2, 2, 2, 0),
        block_tables=((0, 1, 2), (3, 4), (5,), ()),
        block_size=4,
    )
    decode, full, causal = RowLists.of_batch(batch)
    assert (decode.tokens, decode.q_lens, decode.kv_lens, decode.tables) == ([0], [1], [9], [[0, 1, 2]])
    assert (full.tokens, full.q_lens, full.kv_lens, full.tables) == ([4, 5, 6, 7], [4], [2], [[5]])
    assert (causal.tokens, causal.q_lens, causal.kv_lens, causal.tables) == ([1, 2, 3], [3], [6], [[3, 4]])
    assert (decode.causal, full.causal, causal.causal) == (False, False, True)


def test_tensors_of_a_set() -> None:
    batch = AttentionBatch(q_lens=(1, 1), visible=(9, 3), block_tables=((7, 8, 2, 2**40), (5,)), block_size=4)
    (lists,) = RowLists.of_batch(batch)
    rows = Rows.of(lists, batch, CPU)
    assert rows.tokens_t is None and rows.max_q == 1
    assert rows.max_kv == 16, "columns are a power of 2"
    assert rows.tensors.cu_q_lens.tolist() == [0, 1, 2]
    assert rows.tensors.cu_kv_lens.tolist() == [0, 9, 12]
    assert rows.tensors.kv_lens.tolist() == [9, 3]
    assert rows.tensors.tables.tolist() == [[7, 8, 2, 0], [5, 0, 0, 0]]
    assert rows.tensors.blind_t is None
    assert {x.dtype for x in rows.tensors if x is not None} == {torch.int32}


def test_sums_of_keys_beyond_int32_keep_their_differences() -> None:
    keys = 2**30
    lists = RowLists(False, [0, 1, 2, 3, 4], [1] * 5, [keys] * 5, [[0]] * 5, [])
    batch = AttentionBatch(q_lens=(1,) * 5, visible=(1,) * 5, block_tables=((0,),) * 5, block_size=1)
    assert Rows.of(lists, batch, CPU).tensors.cu_kv_lens.diff().tolist() == [keys] * 5


def test_refresh_writes_in_place() -> None:
    first = AttentionBatch(q_lens=(1, 1), visible=(9, 0), block_tables=((3, 1, 8), ()), block_size=4)
    rows = Rows.of(RowLists.of_decode(first), first, CPU, blocks=5)
    addresses = [x.data_ptr() for x in rows.tensors if x is not None]
    assert rows.tensors.kv_lens.tolist() == [9, 1], "a token without keys reads one of block 0"
    assert rows.tensors.blind_t is not None and rows.tensors.blind_t.tolist() == [False, True]
    second = AttentionBatch(q_lens=(1, 1), visible=(0, 13), block_tables=((), (3, 1, 8, 2)), block_size=4)
    rows.copy_(RowLists.of_decode(second))
    assert [x.data_ptr() for x in rows.tensors if x is not None] == addresses
    assert rows.tensors.kv_lens.tolist() == [1, 13]
    assert rows.tensors.tables.tolist() == [[0] * 5, [3, 1, 8, 2, 0]]
    assert rows.tensors.blind_t.tolist() == [True, False]
    assert rows.max_kv == 20
