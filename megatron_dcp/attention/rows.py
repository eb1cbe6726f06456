"""A batch as virtual sequences that attention libraries can serve: their masks know no shards.

Shapes: ``T`` query tokens of the batch, ``t`` of one set of virtual sequences, ``s`` virtual sequences, ``N`` query
heads, ``H`` head dim, ``V`` values' head dim.

A library has two masks for a sequence of ``q`` query tokens over ``kv`` keys: *full* (every token sees all keys) and
*causal* aligned to the bottom right (the last token sees all, each one before it one key less). On a shard of D ranks
the visible keys of a chunk grow by 1 every D tokens: a staircase. It is cut into virtual sequences over the same
blocks. Tokens are sorted into levels by what they see. One token of each level, over a run of levels without a gap, is
a causal chain; what stays alone on a level is full. A chunk is one chain at D = 1, D chains at I = 1, and else one
chain and a full sequence per interleave step: few and long.

No row without a key ever reaches a library, whatever it would make of it. Tokens that see none are left out; in a plan
that is refreshed, where every token has its place, they read one key of block 0 and their result is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_dcp.attention.base import AttentionBatch


class Virtual(NamedTuple):
    """One virtual sequence.

    Attributes:
        tokens: Flat query tokens, in the order of what they see.
        keys: Local keys that the last of them sees, at least 1.
        sequence: Of the batch, whose blocks it reads.
        causal: Each token sees one key less than the next one; otherwise all see the same.
    """

    tokens: list[int]
    keys: int
    sequence: int
    causal: bool


def cut_batch(batch: AttentionBatch) -> list[Virtual]:
    """The virtual sequences of a batch without hidden keys; every token that sees a key is in one of them."""
    assert not batch.hidden, "no mask of a library hides the first keys of a shard"
    found: list[Virtual] = []
    first = 0
    for index, q_len in enumerate(batch.q_lens):
        found += _cut_sequence(batch.visible[first : first + q_len], first, index)
        first += q_len
    return found


def _cut_sequence(visible: Sequence[int], first: int, index: int) -> list[Virtual]:
    levels: dict[int, list[int]] = {}
    for token, seen in enumerate(visible, start=first):
        if seen:
            levels.setdefault(seen, []).append(token)
    found = []
    while levels:
        for run in _runs(list(levels)):
            if len(run) > 1:
                found.append(Virtual([levels[level].pop(0) for level in run], run[-1], index, True))
            else:
                found.append(Virtual(levels.pop(run[0]), run[0], index, False))
        levels = {level: tokens for level, tokens in levels.items() if tokens}
    return found


def _runs(levels: list[int]) -> list[list[int]]:
    """Rising numbers as runs without a gap."""
    runs = [[levels[0]]]
    for level in levels[1:]:
        if level == runs[-1][-1] + 1:
            runs[-1].append(level)
        else:
            runs.append([level])
    return runs


@dataclass(frozen=True)
class RowLists:
    """A set of virtual sequences under one mask, in Python integers.

    Attributes:
        causal: The mask.
        tokens: Flat query tokens ``[t]``, sequence by sequence.
        q_lens, kv_lens: Query tokens and keys of each virtual sequence, at least 1.
        tables: Blocks of each that hold its keys.
        blind: Which tokens see no key and read one all the same; empty: none.
    """

    causal: bool
    tokens: list[int]
    q_lens: list[int]
    kv_lens: list[int]
    tables: list[list[int]]
    blind: list[bool]

    @staticmethod
    def of_batch(batch: AttentionBatch, *, uniform: bool = False) -> list[RowLists]:
        """Decode tokens, other full sequences and causal ones, each as a set of its own where there are any.

        Args:
            uniform: Sets whose sequences all have the same number of tokens, however many sets it takes.
        """
        sets: dict[tuple[bool, int], list[Virtual]] = {}
        for virtual in cut_batch(batch):
            q_len = len(virtual.tokens)
            sets.setdefault((virtual.causal, q_len if uniform else min(q_len, 2)), []).append(virtual)
        return [
            RowLists(
                causal=causal,
                tokens=[token for one in virtuals for token in one.tokens],
                q_lens=[len(one.tokens) for one in virtuals],
                kv_lens=[one.keys for one in virtuals],
                tables=[_blocks(batch, one.sequence, one.keys) for one in virtuals],
                blind=[],
            )
            for (causal, _), virtuals in sorted(sets.items())
        ]

    @staticmethod
    def of_decode(batch: AttentionBatch) -> RowLists:
        """Every sequence's one token in its place, those that see no key included."""
        assert not batch.hidden, "no mask of a library hides the first keys of a shard"
        assert all(n == 1 for n in batch.q_lens), "only plans of decode tokens are refreshed"
        kv_lens = [max(1, seen) for seen in batch.visible]
        return RowLists(
            causal=False,
            tokens=list(range(batch.num_tokens)),
            q_lens=[1] * batch.num_tokens,
            kv_lens=kv_lens,
            tables=[_blocks(batch, i, seen) if seen else [0] for i, seen in enumerate(batch.visible)],
            blind=[not seen for seen in batch.visible],
        )


def _blocks(batch: AttentionBatch, sequence: int, keys: int) -> list[int]:
    return list(batch.block_tables[sequence][: batch.blocks_needed(keys)])


class RowTensors(NamedTuple):
    """What kernels read of a set, int32 but for ``blind_t``. A refresh writes it in place.

    Attributes:
        cu_q_lens: ``[s + 1]``, where each virtual sequence's query tokens start.
        cu_kv_lens: ``[s + 1]``, sums of keys, modulo 2 ** 32: a virtual sequence shares its keys with others, so the
            sum may be larger; only differences mean anything.
        kv_lens: ``[s]``.
        tables: ``[s, blocks]``; entries behind a sequence's keys are 0.
        blind_t: Bool, which tokens see no key; ``None``: every one sees some.
    """

    cu_q_lens: Tensor
    cu_kv_lens: Tensor
    kv_lens: Tensor
    tables: Tensor
    blind_t: Tensor | None


@dataclass(frozen=True)
class Rows:
    """A set of virtual sequences under one mask, on a device.

    Attributes:
        causal: The mask: causal aligned to the bottom right, or none.
        max_q: Most query tokens of a virtual sequence.
        max_kv: Keys for which the block tables have room.
        tokens_t: Flat query tokens, int64; ``None``: all of the batch, in order.
        tensors: What kernels read.
    """

    causal: bool
    max_q: int
    max_kv: int
    tokens_t: Tensor | None
    tensors: RowTensors

    @staticmethod
    def of(lists: RowLists, batch: AttentionBatch, device: torch.device, *, blocks: int = 0) -> Rows:
        """Copy a set to a device.

        Args:
            blocks: Columns of the block tables; 0: a power of 2, so that shapes stay the same for many steps
                (cuDNN builds a plan for each).
        """
        width = blocks or 1 << (max(map(len, lists.tables)) - 1).bit_length()
        every = lists.tokens == list(range(batch.num_tokens))
        return Rows(
            causal=lists.causal,
            max_q=max(lists.q_lens),
            max_kv=width * batch.block_size,
            tokens_t=None if every else torch.tensor(lists.tokens, device=device),
            tensors=RowTensors(*(None if x is None else x.to(device) for x in _tensors(lists, width))),  # type: ignore[arg-type]
        )

    def copy_(self, lists: RowLists) -> None:
        """Write another batch's set over this one: as many tokens, whose blocks fit into the tables."""
        for old, new in zip(self.tensors, _tensors(lists, self.tensors.tables.shape[1]), strict=True):
            if old is not None and new is not None:
                old.copy_(new, non_blocking=True)


def _tensors(lists: RowLists, width: int) -> RowTensors:
    def int32(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(torch.int32)

    tables = np.zeros((len(lists.tables), width), dtype=np.int32)
    for row, table in zip(tables, lists.tables, strict=True):
        row[: len(table)] = table
    return RowTensors(
        cu_q_lens=int32([0, *accumulate(lists.q_lens)]),
        cu_kv_lens=int32([0, *accumulate(lists.kv_lens)]),
        kv_lens=int32(lists.kv_lens),
        tables=torch.from_numpy(tables),
        blind_t=torch.tensor(lists.blind) if lists.blind else None,
    )
