"""Which of MLA's two forms each sequence of a step takes, and what the exchange carries.

Shapes and the two forms: see `megatron_dcp.layers.mla`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.attention.base import Attention, AttentionBatch, AttentionSpec, Planned

WORK_BYTES = 64 << 20  # keys and values of all heads of one slice, fp32


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of MLA on one rank.

    Attributes:
        heads: Query heads of this rank's own, ``N``.
        attend_heads: Query heads that it attends with when absorbed: in ``within_tp`` those of its DCP group.
        qk_head_dim, rotated, rank, v_head_dim: ``D``, ``P``, ``R``, ``V``.
        orthogonal: Whether this rank has the up-projections of all heads that it attends with.
    """

    heads: int
    attend_heads: int
    qk_head_dim: int
    rotated: int
    rank: int
    v_head_dim: int
    orthogonal: bool

    @classmethod
    def of(cls, config: Any, groups: Any) -> LatentShape:
        """From an ``MLATransformerConfig`` and the process groups."""
        heads = config.num_attention_heads // groups.tp.size()
        orthogonal = groups.dcp_layout == "orthogonal"
        return cls(
            heads=heads,
            attend_heads=heads if orthogonal else heads * groups.dcp.size(),
            qk_head_dim=config.qk_head_dim,
            rotated=config.qk_pos_emb_head_dim,
            rank=config.kv_lora_rank,
            v_head_dim=config.v_head_dim,
            orthogonal=orthogonal,
        )

    @property
    def values_first(self) -> bool:
        """Whether the value up-projection comes before the exchange.

        It is linear, so it may stand on either side of the merge: the exchange carries ``V`` numbers per head with the
        values first, ``R`` without. The smaller one is taken. In ``within_tp`` a rank lacks the other ranks'
        up-projections, so the values come after.
        """
        return self.orthogonal and self.v_head_dim <= self.rank

    @property
    def exchanged_dim(self) -> int:
        """Numbers per head that the exchange carries (and one LSE)."""
        return self.v_head_dim if self.values_first else self.rank

    def prefers_expanded(self, tokens: int, keys: int) -> bool:
        """Whether ``tokens`` queries over ``keys`` cached tokens take fewer operations expanded than absorbed.

        Only where the values come first: the exchange carries one form for all tokens of a step.
        """
        D, P, R, V = self.qk_head_dim, self.rotated, self.rank, self.v_head_dim
        absorbed = tokens * R * (D + V) + tokens * keys * (R + P + R)
        expanded = keys * R * (D + V) + tokens * keys * (D + P + V)
        return self.values_first and 0 < expanded < absorbed


@dataclass(frozen=True)
class Slice:
    """Whole blocks of cached tokens that are expanded together: their slots, int64 ``[C]``, and the plan over them."""

    slots: Tensor
    attention: Planned


@dataclass(frozen=True)
class ExpandedSequence:
    """Tokens ``[first, stop)`` of the step, of one sequence, over its cached tokens slice by slice."""

    first: int
    stop: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class LatentPlan:
    """One step of MLA on one rank.

    Attributes:
        absorbed: The plan of the tokens that are absorbed; ``None``: there are none.
        absorbed_tokens: Those tokens, int64; ``None``: all of the step.
        expanded: The sequences that are expanded.
    """

    absorbed: Planned | None
    absorbed_tokens: Tensor | None
    expanded: tuple[ExpandedSequence, ...]


def plan_latent(batch: AttentionBatch, shape: LatentShape, absorbed: Attention, expanded: Attention) -> LatentPlan:
    """Choose a form for every sequence of the step, by this rank's own number of keys, and plan both."""
    starts = [0]
    for q_len in batch.q_lens:
        starts.append(starts[-1] + q_len)
    chosen = [
        shape.prefers_expanded(q_len, batch.visible[stop - 1])
        for q_len, stop in zip(batch.q_lens, starts[1:], strict=True)
    ]
    sequences = tuple(
        ExpandedSequence(start, stop, tuple(_slices(batch, index, start, stop, expanded)))
        for index, (start, stop) in enumerate(zip(starts, starts[1:], strict=False))
        if chosen[index]
    )
    rest = [index for index, expand in enumerate(chosen) if not expand]
    if not rest:
        return LatentPlan(None, None, sequences)
    if not sequences:
        return LatentPlan(absorbed.plan(batch), None, ())
    tokens = [token for index in rest for token in range(starts[index], starts[index + 1])]
    part = AttentionBatch(
        q_lens=tuple(batch.q_lens[index] for index in rest),
        visible=tuple(batch.visible[token] for token in tokens),
        block_tables=tuple(batch.block_tables[index] for index in rest),
        block_size=batch.block_size,
    )
    absorbed_tokens = torch.tensor(tokens, dtype=torch.int64, device=absorbed.spec.device)
    return LatentPlan(absorbed.plan(part), absorbed_tokens, sequences)


def expanded_spec(absorbed: AttentionSpec, shape: LatentShape, dtype: torch.dtype) -> AttentionSpec:
    """What attention over expanded latents asks of a back end, in the model's ``dtype``."""
    return replace(
        absorbed,
        heads=shape.heads,
        kv_heads=shape.heads,
        head_dim=shape.qk_head_dim + shape.rotated,
        v_dim=shape.v_head_dim,
        v_in_k=False,
        dtype=dtype,
        query_dtype=dtype,
    )


def _slices(batch: AttentionBatch, index: int, start: int, stop: int, expanded: Attention) -> Iterator[Slice]:
    visible, table, size = batch.visible[start:stop], batch.block_tables[index], batch.block_size
    spec = expanded.spec
    per_block = spec.heads * (spec.head_dim + spec.v_dim) * 4 * size
    step = max(1, WORK_BYTES // per_block)
    blocks = torch.tensor(table[: batch.blocks_needed(visible[-1])])
    slots = (blocks[:, None] * size + torch.arange(size)).flatten().to(spec.device)
    for first in range(0, len(blocks), step):
        low, high = first * size, min((first + step) * size, visible[-1])
        part = AttentionBatch(
            q_lens=(stop - start,),
            visible=tuple(min(max(seen - low, 0), high - low) for seen in visible),
            block_tables=(tuple(range(min(step, len(blocks) - first))),),
            block_size=size,
        )
        yield Slice(slots[low : (first + step) * size], expanded.plan(part))
