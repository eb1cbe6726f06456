"""Decode steps as CUDA graphs: captured once for each number of sequences, replayed with other tokens and lengths.

What a step depends on lies in tensors of fixed size: tokens, positions, slots, and the back ends' plans, whose block
tables have room for the longest sequence. A step with fewer sequences than its bucket is padded with rows that see no
key and keep none (slot -1). Every rank of a replica decides by the step alone, so all capture and replay together.

Shapes: ``B`` rows of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_dcp.attention import AttentionBatch, Planned
from megatron_dcp.capture import CUDAGraphs, Graphs, Recorder
from megatron_dcp.config import CudaGraphs
from megatron_dcp.engine.batch import StepBatch
from megatron_dcp.engine.places import Places, place_tokens
from megatron_dcp.kernels import unusable
from megatron_dcp.layers import KindPlan, LatentPlan, StepPlan

if TYPE_CHECKING:
    from megatron_dcp.engine.runner import ModelRunner


def make_graphs(device: torch.device) -> Graphs:
    """What records on ``device``; ``ValueError`` where nothing does."""
    if device.type != "cuda":
        raise ValueError(f"CUDA graphs need a GPU, and this rank computes on {device}; use cuda_graphs='none'")
    return CUDAGraphs(device)


@dataclass(frozen=True)
class Inputs:
    """What a bucket's graphs read.

    Attributes:
        tokens_B, positions_B: int64.
        slots: For each kind of layer, int64 ``[B]``; -1: not kept on this rank.
        plans: For each kind of layer.
        received_B1h: The previous stage's hidden states; ``None`` on the first.
    """

    tokens_B: Tensor
    positions_B: Tensor
    slots: tuple[Tensor, ...]
    plans: tuple[Planned, ...]
    received_B1h: Tensor | None


@dataclass(frozen=True)
class Bucket:
    """A recording, its inputs, and where its result is: logits of the last stage, else hidden states."""

    inputs: Inputs
    recorder: Recorder
    result: Tensor


class DecodeGraphs:
    """Steps of one token per sequence.

    Args:
        runner: Whose steps; all but the graphs of it is made.
        mode: ``piecewise`` or ``full``.

    Raises:
        ValueError: No GPU, no kernel that writes keys, an attention back end whose plans cannot be refreshed, or
            experts in ``full``.
    """

    def __init__(self, runner: ModelRunner, mode: CudaGraphs) -> None:
        if mode == "full" and runner.model.config.num_moe_experts:
            raise ValueError(
                "cuda_graphs='full' cannot hold experts, whose tokens are dealt out on the host; use 'piecewise'"
            )
        self._runner, self._mode = runner, mode
        self._graphs = make_graphs(runner.device)
        for name in (attention.backend.name for attention in runner.attentions if not attention.backend.refreshable):
            raise ValueError(
                f"cuda_graphs={mode!r} needs an attention back end whose plans can be refreshed, and {name!r} cannot; "
                "use cuda_graphs='none' or another backend (`megatron-dcp env` shows which can serve)"
            )
        if runner.device.type == "cuda" and (reason := unusable(runner.device)) is not None:
            raise ValueError(
                f"cuda_graphs={mode!r} needs our own kernel to write keys, which cannot run here ({reason}); use "
                "cuda_graphs='none'"
            )
        self._most = runner.engine.max_num_seqs
        self._blocks = runner.layout.blocks_for(runner.max_sequence_length)
        self._buckets: dict[int, Bucket] = {}

    def takes(self, batch: StepBatch) -> bool:
        """Whether the step computes one token of each sequence, and no more of them than there are buckets for."""
        return len(batch.seqs) <= self._most and all(len(seq.token_ids) == 1 for seq in batch.seqs)

    def step(self, batch: StepBatch) -> tuple[Tensor, Tensor | None]:
        """Hidden states of the batch's tokens, and on the last stage the logits that it asks for."""
        runner, count = self._runner, len(batch.seqs)
        places = place_tokens(batch, runner.layout, runner.rank, [False] * count)
        rows = min(1 << (count - 1).bit_length(), self._most)
        bucket = self._buckets.get(rows)
        inputs = self._make_inputs(rows) if bucket is None else bucket.inputs
        self._fill(inputs, batch, places)
        if bucket is None:
            self._compute(inputs)  # libraries set themselves up, as they cannot while a graph is recorded
            recorder = Recorder(self._graphs, self._mode)
            result = recorder.record(lambda: self._compute(inputs))
            bucket = self._buckets[rows] = Bucket(inputs, recorder, result)
        bucket.recorder.replay()
        if not runner.model.post_process:
            return bucket.result[:count].clone(), None
        wanted = [row for row, seq in enumerate(batch.seqs) if seq.num_logits]
        if not len(bucket.result):  # this rank makes none
            return bucket.result, bucket.result
        logits = bucket.result[:count]
        return logits, logits.clone() if len(wanted) == count else logits[wanted]

    def _make_inputs(self, rows: int) -> Inputs:
        runner = self._runner
        whole = torch.zeros(rows, dtype=torch.int64, device=runner.device)
        nothing = AttentionBatch(
            q_lens=(1,) * rows,
            visible=(0,) * rows,
            block_tables=((),) * rows,
            block_size=runner.layout.block_size,
        )
        received = None
        if not runner.model.pre_process:
            received = runner.empty_hidden(rows)
        return Inputs(
            tokens_B=whole,
            positions_B=whole.clone(),
            slots=tuple(whole.clone() for _ in runner.windows),
            plans=tuple(
                attention.plan(
                    nothing if window is None else replace(nothing, hidden=nothing.visible), blocks=self._blocks
                )
                for attention, window in zip(runner.attentions, runner.windows, strict=True)
            ),
            received_B1h=received,
        )

    def _fill(self, inputs: Inputs, batch: StepBatch, places: Places) -> None:
        """Write the step over what the graphs read, and receive what comes from the previous stage."""
        runner, rows, count = self._runner, len(inputs.tokens_B), len(batch.seqs)
        _write(inputs.tokens_B, places.tokens_T, 0)
        _write(inputs.positions_B, places.positions_T, 0)
        visible: np.ndarray = runner.layout.visible(places.positions_T, runner.rank)  # type: ignore[type-var]
        for kind, window in enumerate(runner.windows):
            kept = np.full(count, -1, dtype=np.int64)
            slots = places.slots_t if window is None else places.window_slots_t
            assert slots is not None
            kept[places.owned_t] = slots
            _write(inputs.slots[kind], kept, -1)
            tables = [seq.block_table if window is None else seq.window_table for seq in batch.seqs]
            hidden: list[int] = []
            if window is not None:
                hidden = runner.layout.hidden(places.positions_T, window, runner.rank).tolist()  # type: ignore[type-var]
                hidden += [0] * (rows - count)
            inputs.plans[kind].refresh(
                AttentionBatch(
                    q_lens=(1,) * rows,
                    visible=(*visible.tolist(), *(0,) * (rows - count)),
                    block_tables=(*map(tuple, tables), *((),) * (rows - count)),
                    block_size=runner.layout.block_size,
                    hidden=tuple(hidden),
                )
            )
        if inputs.received_B1h is not None:
            inputs.received_B1h[:count].copy_(runner.receive(count))

    def _compute(self, inputs: Inputs) -> Tensor:
        runner = self._runner
        kinds = []
        for kind, rotary in enumerate(runner.rotaries):
            cos, sin = (None, None) if rotary is None else rotary.cos_sin(inputs.positions_B, runner.dtype)
            attention: Any = inputs.plans[kind]
            if runner.latent is not None:
                attention = LatentPlan(attention, None, ())
            kinds.append(
                KindPlan(cos_T1R=cos, sin_T1R=sin, slots_t=inputs.slots[kind], attention=attention, striped=None)
            )
        plan = StepPlan(owned_t=None, replicated=len(inputs.tokens_B), striped_counts=(), kinds=tuple(kinds))
        hidden = runner.forward(plan, inputs.tokens_B, inputs.positions_B, inputs.received_B1h)
        return runner.logits(hidden) if runner.model.post_process else hidden


def _write(held_B: Tensor, values: np.ndarray, padding: int) -> None:
    padded = np.full(len(held_B), padding, dtype=np.int64)
    padded[: len(values)] = values
    held_B.copy_(torch.from_numpy(padded))
