"""Where the tokens of a step sit: which of them a rank computes, which of their keys it keeps, and in what slots.

Shapes: ``T`` tokens that this rank computes, ``t`` those of them whose keys it keeps, ``B`` rows of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dcp.cache.layout import KVLayout
from megatron_dcp.engine.batch import StepBatch


@dataclass(frozen=True)
class Places:
    """The tokens of a step on one rank: first the replicated ones, then its share of the striped ones.

    Attributes:
        tokens_T: Token ids.
        positions_T: Global positions.
        replicated: Number of tokens that all ranks of the DCP group compute.
        owned_t: Indices into ``T`` of the tokens whose keys this rank keeps.
        slots_t: The slots that they go to.
        window_slots_t: The same in the pool of the layers with a sliding window; ``None``: there are no such layers.
        rows_B: For every row of logits its index into ``T``, -1 where another rank has the token.
        shared: Whether a row's token is on one rank only.
    """

    tokens_T: np.ndarray
    positions_T: np.ndarray
    replicated: int
    owned_t: np.ndarray
    slots_t: np.ndarray
    window_slots_t: np.ndarray | None
    rows_B: np.ndarray
    shared: bool


def place_tokens(batch: StepBatch, layout: KVLayout, rank: int, striped: Sequence[bool]) -> Places:
    """Places of a step's tokens on one DCP rank.

    Args:
        striped: Of each sequence, whether its tokens are dealt out over the ranks.
    """
    lens = np.array([len(seq.token_ids) for seq in batch.seqs])
    ends = np.cumsum(lens)
    starts = np.array([seq.start for seq in batch.seqs])
    tokens = np.array([token for seq in batch.seqs for token in seq.token_ids], dtype=np.int64)
    positions = np.arange(len(tokens)) + np.repeat(starts - (ends - lens), lens)
    sequence = np.repeat(np.arange(len(lens)), lens)
    mine = layout.owner(positions) == rank
    replicated = len(tokens)
    counts = np.array([seq.num_logits for seq in batch.seqs])
    # Of each sequence the last ``num_logits`` tokens, in order.
    rows = np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())
    shared = False
    if any(striped):
        dealt = np.asarray(striped)[sequence]
        here = np.concatenate((np.flatnonzero(~dealt), np.flatnonzero(dealt & mine)))
        replicated = int((~dealt).sum())
        shared = bool(dealt[rows].any())
        index = np.full(len(tokens), -1)
        index[here] = np.arange(len(here))
        rows = index[rows]
        tokens, positions, sequence, mine = tokens[here], positions[here], sequence[here], mine[here]
    owned = np.flatnonzero(mine)
    local = layout.local_index(positions[owned])

    def slots(tables: Sequence[Sequence[int]]) -> np.ndarray:
        padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return layout.slot(padded[sequence[owned], local // layout.block_size], local)

    in_window = [seq.window_table for seq in batch.seqs]
    return Places(
        tokens,
        positions,
        replicated,
        owned,
        slots([seq.block_table for seq in batch.seqs]),
        slots(in_window) if in_window[0] else None,
        rows,
        shared,
    )
