"""What a decode step takes besides what it reads, computes and sends: small models are run, and the rest is left."""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import NamedTuple

import torch
from torch import distributed

from megatron_dcp import parallel_state
from megatron_dcp._mcore import build_model
from megatron_dcp.calibration.clock import Clock
from megatron_dcp.config import EngineConfig
from megatron_dcp.engine.llm import LLM
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.planner.candidates import Pins, candidates
from megatron_dcp.planner.machine import Machine
from megatron_dcp.planner.timing import StepTime, decode_time

LAYERS = (2, 6)
BATCHES = (1, 8)
KEYS = 256  # that a rank has of each sequence: more than are gathered for several sequences at once
STEPS = 40
REPEATS = 3  # of runs in which ranks share the keys: their speed differs from one set of groups to the next


class Overheads(NamedTuple):
    """Fields of `Machine` of the same names."""

    layer_s: float
    step_s: float
    layer_sequence_s: float
    sequence_s: float


def small_model(layers: int, context: int) -> ModelConfig:
    """A model whose weights and keys are next to nothing, so that a step shows what it takes without them."""
    return ModelConfig(
        num_layers=layers,
        hidden_size=256,
        ffn_hidden_size=512,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=64,
        vocab_size=1024,
        padded_vocab_size=1024,
        max_position_embeddings=context,
    )


def overheads(clock: Clock, dtype: torch.dtype, machine: Machine) -> Overheads:
    """Of a rank alone; all ranks run at once, each its own replica.

    Args:
        machine: Its rates are known, and no times.
    """
    left = {}
    for layers in LAYERS:
        for batch in BATCHES:
            measured, predicted = _step(clock, dtype, machine, layers=layers, batch=batch, dcp=1)
            left[layers, batch] = measured - predicted.total
    (few, many), (one, several) = LAYERS, BATCHES
    per_layer = {batch: (left[many, batch] - left[few, batch]) / (many - few) for batch in BATCHES}
    rest = {batch: left[few, batch] - few * per_layer[batch] for batch in BATCHES}
    layer_sequence = max(0.0, (per_layer[several] - per_layer[one]) / (several - one))
    sequence = max(0.0, (rest[several] - rest[one]) / (several - one))
    return Overheads(
        layer_s=max(0.0, per_layer[one] - one * layer_sequence),
        step_s=max(0.0, rest[one] - one * sequence),
        layer_sequence_s=layer_sequence,
        sequence_s=sequence,
    )


def shared_overheads(clock: Clock, dtype: torch.dtype, machine: Machine) -> tuple[float, float]:
    """``followers_s`` and ``merge_s`` of `Machine`, where all ranks share the keys.

    Args:
        machine: Everything else is known.
    """
    everything: dict[int, list[float]] = {layers: [] for layers in LAYERS}
    for _ in range(REPEATS):
        for layers, left in everything.items():
            measured, predicted = _step(clock, dtype, machine, layers=layers, batch=1, dcp=distributed.get_world_size())
            left.append(measured - predicted.total)
    few, many = (median(left) for left in everything.values())
    merge = max(0.0, (many - few) / (LAYERS[1] - LAYERS[0]))
    return max(0.0, few - LAYERS[0] * merge), merge


def _step(
    clock: Clock, dtype: torch.dtype, machine: Machine, *, layers: int, batch: int, dcp: int
) -> tuple[float, StepTime]:
    """Seconds of a decode step, measured; and what the rates of the machine account for."""
    prompt = KEYS * dcp
    config = small_model(layers, prompt + STEPS)
    parallel_state.initialize_model_parallel(1, decode_context_parallel_size=dcp)
    try:
        model = build_model(
            config, parallel_state.get_process_group_collection(), dtype=dtype, device=clock.device,
            perform_initialization=True,
        )  # fmt: skip
        llm = LLM(model, engine=EngineConfig(max_num_seqs=batch, prefill_chunk_size=batch * prompt))
        prompts = [[(7 * index + 3 * place) % config.vocab_size for place in range(prompt)] for index in range(batch)]
        clock.wait()
        seconds = clock.typical(step_seconds(llm, prompts, STEPS))
        del model, llm
    finally:
        parallel_state.destroy_model_parallel()
        gc.collect()  # the groups, whose threads would slow the next measurement down
    return seconds, predicted_step(config, dtype, machine, dcp=dcp, batch=batch, context=prompt + STEPS // 2)


def predicted_step(
    config: ModelConfig, dtype: torch.dtype, machine: Machine, *, dcp: int, batch: int, context: int
) -> StepTime:
    """What the planner says of a decode step at tp 1, ``orthogonal``."""
    (candidate,) = candidates(config, dcp, Pins(tp=1, pp=1, dcp=dcp, layout="orthogonal"))
    name = str(dtype).removeprefix("torch.")
    return decode_time(config, candidate, machine, name, context=context, batch=batch)


def step_seconds(llm: LLM, prompts: list[list[int]], steps: int) -> list[float]:
    """How long each decode step takes in which all prompts are continued; the first, which warms up, left out.

    The engine must take all prompts in at once: chunks of `EngineConfig.prefill_chunk_size` that hold them all.
    """
    moments: list[float] = []
    last = len(prompts) - 1

    def on_token(index: int, token: int, text: str) -> None:
        if index == last:
            moments.append(time.perf_counter())

    llm.generate(prompts, SamplingParams(max_tokens=steps, ignore_eos=True), on_token=on_token)
    return [after - before for before, after in zip(moments[1:], moments[2:], strict=False)]
