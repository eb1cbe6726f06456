"""What a decode step takes besides what it reads, computes and sends: small models are run, and the rest is left."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import distributed

from megatron_dcp import parallel_state
from megatron_dcp._mcore import build_model
from megatron_dcp.calibration.clock import Clock
from megatron_dcp.config import EngineConfig, ParallelConfig
from megatron_dcp.engine.llm import LLM
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.planner.candidates import Candidate, Pins, candidates
from megatron_dcp.planner.machine import Machine
from megatron_dcp.planner.prefill import prefill_seconds
from megatron_dcp.planner.timing import StepTime, decode_time
from megatron_dcp.planner.weights import itemsize, layer_weights

LAYERS = (2, 6)
BATCHES = (1, 8)
KEYS = 256  # that a rank has of each sequence: more than are gathered for several sequences at once
STEPS = 40
CHUNK = EngineConfig.prefill_chunk_size  # tokens of a prompt
PROMPTS = 6
REPEATS = 3  # of runs in which ranks share the keys: their speed differs from one set of groups to the next


class Overheads(NamedTuple):
    """Fields of `Machine` of the same names."""

    layer_s: float
    step_s: float
    layer_sequence_s: float
    sequence_s: float


def small_model(layers: int, context: int, hidden_size: int = 256) -> ModelConfig:
    """A model whose weights and keys are next to nothing, so that a step shows what it takes without them."""
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden_size,
        ffn_hidden_size=2 * hidden_size,
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


def activations(clock: Clock, dtype: torch.dtype, machine: Machine) -> float:
    """``activations`` of `Machine`: of what a layer takes longer for a chunk than its products and its attention.

    Args:
        machine: Everything else is known.
    """
    hidden_size = 4096 if clock.device.type == "cuda" else 256  # on a GPU more than its kernels' own time
    left, unit = {}, 0.0
    for layers in LAYERS:
        config = small_model(layers, CHUNK + 1, hidden_size)
        engine = EngineConfig(prefix_caching=False)
        prompts = [[(7 * place + index) % config.vocab_size for place in range(CHUNK)] for index in range(PROMPTS)]
        seconds = _typical(clock, dtype, config, engine, partial(prompt_seconds, prompts=prompts))
        left[layers] = seconds - predicted_prompt(config, dtype, machine, dcp=1, tokens=CHUNK)
        outputs = layer_weights(config, ParallelConfig(), experts=False).outputs
        unit = CHUNK * outputs * itemsize(_name(dtype)) / machine.memory_bandwidth
    few, many = left.values()
    return max(0.0, (many - few) / (LAYERS[1] - LAYERS[0]) / unit)


def _typical(
    clock: Clock,
    dtype: torch.dtype,
    config: ModelConfig,
    engine: EngineConfig,
    measure: Callable[[LLM], list[float]],
    *,
    dcp: int = 1,
) -> float:
    """What `Clock.typical` says of the seconds that are measured with a new model, whose groups are gone afterwards."""
    parallel_state.initialize_model_parallel(1, decode_context_parallel_size=dcp)
    try:
        model = build_model(
            config, parallel_state.get_process_group_collection(), dtype=dtype, device=clock.device,
            perform_initialization=True,
        )  # fmt: skip
        llm = LLM(model, engine=engine)
        clock.wait()
        seconds = clock.typical(measure(llm))
        del model, llm
    finally:
        parallel_state.destroy_model_parallel()
        gc.collect()  # the groups, whose threads would slow the next measurement down
    return seconds


def _step(
    clock: Clock, dtype: torch.dtype, machine: Machine, *, layers: int, batch: int, dcp: int
) -> tuple[float, StepTime]:
    """Seconds of a decode step, measured; and what the rates of the machine account for."""
    prompt = KEYS * dcp
    config = small_model(layers, prompt + STEPS)
    prompts = [[(7 * index + 3 * place) % config.vocab_size for place in range(prompt)] for index in range(batch)]
    engine = EngineConfig(max_num_seqs=batch, prefill_chunk_size=batch * prompt)
    seconds = _typical(clock, dtype, config, engine, partial(step_seconds, prompts=prompts, steps=STEPS), dcp=dcp)
    return seconds, predicted_step(config, dtype, machine, dcp=dcp, batch=batch, context=prompt + STEPS // 2)


def predicted_step(
    config: ModelConfig, dtype: torch.dtype, machine: Machine, *, dcp: int, batch: int, context: int
) -> StepTime:
    """What the planner says of a decode step at tp 1, ``orthogonal``."""
    return decode_time(config, _candidate(config, dcp), machine, _name(dtype), context=context, batch=batch)


def predicted_prompt(config: ModelConfig, dtype: torch.dtype, machine: Machine, *, dcp: int, tokens: int) -> float:
    """What the planner says of a prompt's time to its first token, in chunks as the engine makes them."""
    chunk = EngineConfig.prefill_chunk_size
    return prefill_seconds(config, _candidate(config, dcp), machine, _name(dtype), context=tokens, chunk=chunk)


def _candidate(config: ModelConfig, dcp: int) -> Candidate:
    (candidate,) = candidates(config, dcp, Pins(tp=1, pp=1, dcp=dcp, layout="orthogonal"))
    return candidate


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def prompt_seconds(llm: LLM, prompts: list[list[int]]) -> list[float]:
    """How long each prompt, alone, takes to its first token; the first one, which warms up, left out."""
    seconds = []
    for prompt in prompts:
        start = time.perf_counter()
        llm.generate([prompt], SamplingParams(max_tokens=1))
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
