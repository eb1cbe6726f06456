"""How a shard is cut into kernel calls, held against brute force over slots; and the batch itself."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_dcp.attention import AttentionBatch
from megatron_dcp.attention.pieces import Limits, Unit, clip_runs, cut_batch, find_runs, slots_of, thread_ways

CPU = torch.device("cpu")


def slots_seen(unit: Unit, group: int) -> dict[int, list[list[int]]]:
    """Per flat query token, the slots that each of its rows sees, read off a unit's pieces and masks."""
    seen: dict[int, list[list[int]]] = {}
    tokens = list(range(unit.first, unit.stop)) if unit.tokens is None else unit.tokens.tolist()
    for piece in unit.pieces:
        keys = piece.keys if isinstance(piece.keys, torch.Tensor) else torch.arange(piece.length) + piece.keys[0]
        assert len(keys) % piece.parts == 0 and len(keys) > 0
        for part, keys_C in enumerate(keys.view(piece.parts, -1)):
            own = [tokens[part]] if unit.tokens is not None else tokens[piece.skip : piece.stop]
            mask = torch.zeros(1, 1) if piece.mask is None else piece.mask.expand(piece.parts, -1, -1, -1)[part, 0]
            mask_RC = mask.expand(len(own) * group, len(keys_C))
            for row, row_mask in enumerate(mask_RC):
                assert (row_mask == 0).any(), "no row may be without a key"
                rows = seen.setdefault(own[row // group], [[] for _ in range(group)])
                rows[row % group] += keys_C[row_mask == 0].tolist()
    return seen


@pytest.mark.parametrize("seed", range(60))
def test_every_token_sees_its_keys_once(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    work_keys = rng.choice([1, 6, 50, 4000])
    limits = Limits(
        group=rng.choice([1, 3]),
        tokens=rng.choice([1, 2, 7, 64]),
        copy_keys=min(work_keys, rng.choice([0, 1, 5, 1000])),
        work_keys=work_keys,
        call_keys=rng.choice([None, 3, 40]),
        head_keys=rng.choice([2, 9, 1000]),
        ways=1,
    )
    q_lens, visible, hidden, tables = [], [], [], []
    window = rng.choice([None, None, 0, 1, 3, 30])
    blocks = list(range(400))
    if rng.random() < 0.5:
        rng.shuffle(blocks)
    for _ in range(rng.randint(1, 6)):
        q_lens.append(rng.choice([1, 1, 2, 9, 40]))
        seen = rng.choice([0, 0, 1, 5, 60])
        for _ in range(q_lens[-1]):
            seen += rng.choice([0, 1])
            visible.append(seen)
            hidden.append(0 if window is None else max(0, seen - window))
        needed = -(-seen // block_size)
        gone = hidden[-q_lens[-1]] // block_size
        tables.append((-1,) * gone + tuple(blocks[gone:needed]) + (2**40,))
        del blocks[:needed]
    batch = AttentionBatch(
        q_lens=tuple(q_lens),
        visible=tuple(visible),
        block_tables=tuple(tables),
        block_size=block_size,
        hidden=() if window is None else tuple(hidden),
    )
    units = cut_batch(batch, limits, CPU)
    found: dict[int, list[list[int]]] = {}
    for unit in units:
        assert unit.tokens is not None or unit.stop - unit.first <= limits.tokens
        whole = (None, unit.stop - unit.first)
        assert unit.tokens is not None or (unit.pieces[0].skip == 0 and unit.pieces[0].stop in whole)
        for piece in unit.pieces:
            assert isinstance(piece.keys, tuple) or piece.length <= limits.work_keys
        rows = slots_seen(unit, limits.group)
        assert not found.keys() & rows.keys()
        found.update(rows)
    token = 0
    for q_len, table in zip(q_lens, tables, strict=True):
        for _ in range(q_len):
            keys = range(hidden[token], visible[token])
            expected = [table[i // block_size] * block_size + i % block_size for i in keys]
            for row in found.pop(token, [[]] * limits.group):
                # padding repeats the last key behind a mask, so nothing may be seen twice
                assert sorted(row) == sorted(expected), (token, limits)
            token += 1
    assert not found


def test_split_over_threads_covers_all_keys() -> None:
    limits = Limits(group=2, tokens=8, copy_keys=4, work_keys=100, call_keys=None, head_keys=1000, ways=3)
    batch = AttentionBatch(q_lens=(1,), visible=(2000,), block_tables=(tuple(range(125)),), block_size=16)
    (unit,) = cut_batch(batch, limits, CPU)
    assert [piece.parts for piece in unit.pieces] == [3, 1]
    assert all(sorted(row) == list(range(2000)) for row in slots_seen(unit, 2)[0])


@pytest.mark.parametrize(("kv_heads", "threads", "ways"), [(8, 2, 1), (1, 2, 2), (3, 2, 2), (8, 64, 8), (6, 4, 2)])
def test_thread_ways(kv_heads: int, threads: int, ways: int) -> None:
    assert thread_ways(kv_heads, threads) == ways


def test_runs_join_neighbouring_blocks() -> None:
    assert find_runs((3, 4, 5), 0, 11, 4) == [(12, 11)]
    assert find_runs((3, 4, 9, 2**40), 0, 9, 4) == [(12, 8), (36, 1)]
    assert find_runs((-1, -1, 4, 5, 9), 9, 19, 4) == [(17, 7), (36, 3)]
    assert find_runs((-1, 0, 1), 6, 7, 4) == [(2, 1)]
    assert find_runs((4, 3), 0, 8, 4) == [(16, 4), (12, 4)]
    with pytest.raises(AssertionError, match="9 keys need 3 blocks of 4, the table has 2"):
        find_runs((4, 3), 0, 9, 4)


@pytest.mark.parametrize("low", [0, 3, 4, 9, 12])
@pytest.mark.parametrize("high", [0, 4, 5, 11, 12])
def test_clip_runs_and_slots(low: int, high: int) -> None:
    runs = [(12, 4), (40, 7), (5, 1)]
    slots = [*range(12, 16), *range(40, 47), 5]
    clipped = clip_runs(runs, low, high)
    assert [s for slot, n in clipped for s in range(slot, slot + n)] == slots[low:high]
    if clipped:
        assert slots_of(clipped).tolist() == slots[low:high]


def test_batch_tensors_hold_no_block_that_no_query_needs() -> None:
    batch = AttentionBatch(
        q_lens=(2, 1, 1), visible=(4, 5, 0, 3), block_tables=((7, 9, 2**40), (2**40,), (1, 2**40)), block_size=4
    )
    tensors = batch.tensors(CPU)
    assert tensors.cu_q_lens.tolist() == [0, 2, 3, 4]
    assert tensors.visible_T.tolist() == [4, 5, 0, 3]
    assert tensors.kv_lens.tolist() == [5, 0, 3]
    assert tensors.block_tables.tolist() == [[7, 9], [0, 0], [1, 0]]
    assert {x.dtype for x in tensors if x is not None} == {torch.int32}
    assert batch.tensors(CPU) is tensors


def test_batch_written_over_another() -> None:
    """With the padded sequences of a bucket: no keys, no blocks."""
    first = AttentionBatch(q_lens=(1, 1), visible=(9, 2), block_tables=((3, 1, 8), (4,)), block_size=4)
    held = first.tensors(CPU, 5)
    addresses = [x.data_ptr() for x in held if x is not None]
    AttentionBatch(q_lens=(1, 1), visible=(13, 0), block_tables=((3, 1, 8, 2), ()), block_size=4).copy_to(held)
    assert [x.data_ptr() for x in held if x is not None] == addresses
    assert held.kv_lens.tolist() == held.visible_T.tolist() == [13, 0]
    assert held.block_tables.tolist() == [[3, 1, 8, 2, 0], [0] * 5]
