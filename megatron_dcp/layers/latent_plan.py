"""Which of MLA's two forms each sequence of a step takes, and what the exchange carries.

Shapes and the two forms: see `megatron_dcp.layers.mla`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dcp.attention.base import Attention, AttentionBatch, AttentionSpec, Planned
from megatron_dcp.attention_shape import LatentShape

WORK_BYTES = 64 << 20  # keys and values of all heads of one slice, fp32


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
