"""``bench.py plan``: what the planner predicts for this machine, beside what the engine takes.

What is measured
    The time from one token to the next of the quickstart's model in `LLM`, and that of a prompt to its first token,
    everything included: schedule, message to the other ranks, model, sampling. At dcp 1 every rank is a replica of its
    own, and all run at the same time.
Caches
    For the times between tokens no prompt is computed: the pool is filled with random keys. The model's weights do not
    matter for the time, and its positions are not bounded by what it was trained on.
Prediction
    `megatron_dcp.calibration` measures the machine in each round anew, right before the round's cases, as its speed
    changes with what else runs on it. It knows nothing of the model. The memory's speed in each round is printed: where
    it differs much, the machine was not the same while it was measured, and the ratios say little.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import bench_world
import torch
from bench_world import World

from megatron_dcp import LLM, EngineConfig, default_device, load_model, parallel_state
from megatron_dcp.calibration import calibrate
from megatron_dcp.calibration.clock import Clock
from megatron_dcp.calibration.steps import predicted_prompt, predicted_step, prompt_seconds, step_seconds
from megatron_dcp.engine.batch import StepBatch
from megatron_dcp.engine.runner import ModelRunner
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.planner.timing import StepTime

STEPS = 24
PROMPTS = 5


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="predicted and measured time per token of the quickstart's model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", default="examples/quickstart/checkpoint")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens to the first one")
    parser.add_argument("--dcp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--threads", type=int, default=bench_world.available_cpus(), help="of all processes together")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    bench_world.run_on_ranks(measure_all, max(arguments.dcp), arguments.threads, arguments)


def measure_all(world: World, arguments: argparse.Namespace) -> None:
    """Every rank runs this; rank 0 prints."""
    parallel_state.destroy_model_parallel()
    torch.set_num_threads(max(1, arguments.threads // max(arguments.dcp)))
    cases = list(itertools.product(arguments.dcp, arguments.batches, arguments.contexts))
    measured: dict[tuple[int, int, int], list[float]] = {case: [] for case in cases}
    predicted: dict[tuple[int, int, int], list[StepTime]] = {case: [] for case in cases}
    prompts = list(itertools.product(arguments.dcp, arguments.prompts))
    first_measured: dict[tuple[int, int], list[float]] = {case: [] for case in prompts}
    first_predicted: dict[tuple[int, int], list[float]] = {case: [] for case in prompts}
    speeds: list[float] = []
    for number in range(arguments.repeats):
        world.note(f"round {number + 1} of {arguments.repeats}")
        machine = calibrate()
        speeds.append(machine.memory_bandwidth / 1e9)
        for dcp, batch, context in cases:
            seconds, config = _measure(arguments.checkpoint, dcp, batch, context)
            measured[dcp, batch, context].append(seconds)
            prediction = predicted_step(config, torch.float32, machine, dcp=dcp, batch=batch, context=context)
            predicted[dcp, batch, context].append(prediction)
        for dcp, tokens in prompts:
            seconds, config = _measure_prompt(arguments.checkpoint, dcp, tokens)
            first_measured[dcp, tokens].append(seconds)
            first_predicted[dcp, tokens].append(
                predicted_prompt(config, torch.float32, machine, dcp=dcp, tokens=tokens)
            )
    if world.rank == 0:
        rows = [_row(case, measured[case], predicted[case]) for case in cases]
        print("context  batch  dcp  measured ms  predicted ms  ratio  of which: weights  KV  exchange  overhead")
        for row in rows:
            print(
                f"{row['context']:>7}  {row['batch']:>5}  {row['dcp']:>3}  {row['measured_ms']:>11.2f}  "
                f"{row['predicted_ms']:>12.2f}  {row['ratio']:>5.2f}  {row['weights_ms']:>18.2f}  {row['kv_ms']:.2f}  "
                f"{row['exchange_ms']:.2f}  {row['overhead_ms']:.2f}"
            )
        firsts = [_first_row(case, first_measured[case], first_predicted[case]) for case in prompts]
        print("prompt  dcp  to the first token: measured ms  predicted ms  ratio")
        for row in firsts:
            print(
                f"{row['prompt']:>6}  {row['dcp']:>3}  {row['measured_ms']:>32.1f}  {row['predicted_ms']:>12.1f}  "
                f"{row['ratio']:>5.2f}"
            )
        print("memory in each round, GB/s:", ", ".join(f"{speed:.1f}" for speed in speeds))
        found = {"memory_gb_s": speeds, "rows": rows, "prompts": firsts}
        print(json.dumps({"benchmark": "plan", "repeats": arguments.repeats, **found}))


def _row(case: tuple[int, int, int], measured: list[float], predicted: list[StepTime]) -> dict[str, float]:
    dcp, batch, context = case
    parts = {f"{name}_ms": 1e3 * median(getattr(one, name) for one in predicted) for name in vars(predicted[0])}
    return {
        "context": context,
        "batch": batch,
        "dcp": dcp,
        **_compared(measured, [one.total for one in predicted]),
        **parts,
    }


def _first_row(case: tuple[int, int], measured: list[float], predicted: list[float]) -> dict[str, float]:
    dcp, tokens = case
    return {"prompt": tokens, "dcp": dcp, **_compared(measured, predicted)}


def _compared(measured: list[float], predicted: list[float]) -> dict[str, float]:
    return {
        "measured_ms": 1e3 * median(measured),
        "predicted_ms": 1e3 * median(predicted),
        "ratio": median(one / seconds for one, seconds in zip(predicted, measured, strict=True)),
    }


def _measure(checkpoint: str, dcp: int, batch: int, context: int) -> tuple[float, ModelConfig]:
    """Seconds of a step on the slowest rank, and the model's shape."""
    prompt = context - STEPS // 2
    prompts = [[index + place for place in range(prompt)] for index in range(batch)]
    engine = EngineConfig(max_num_seqs=batch, prefill_chunk_size=batch * context)
    with _prompts_filled_in():
        return _typical(checkpoint, dcp, engine, prompts, partial(step_seconds, steps=STEPS))


def _measure_prompt(checkpoint: str, dcp: int, tokens: int) -> tuple[float, ModelConfig]:
    """Seconds from a prompt to its first token on the slowest rank, and the model's shape."""
    prompts = [[index + place for place in range(tokens)] for index in range(1 + PROMPTS)]
    return _typical(checkpoint, dcp, EngineConfig(prefix_caching=False), prompts, prompt_seconds)


def _typical(
    checkpoint: str,
    dcp: int,
    engine: EngineConfig,
    prompts: list[list[int]],
    measure: Callable[[LLM, list[list[int]]], list[float]],
) -> tuple[float, ModelConfig]:
    """What is typical of the seconds that a new engine takes for the prompts, and the model's shape."""
    parallel_state.initialize_model_parallel(1, decode_context_parallel_size=dcp)
    model, config = load_model(checkpoint, parallel_state.get_process_group_collection(), device=default_device())
    model.max_sequence_length = max(map(len, prompts)) + STEPS
    prompts = [[token % config.vocab_size for token in prompt] for prompt in prompts]
    llm = LLM(model, engine=engine)
    torch.distributed.barrier()
    seconds = Clock(default_device()).typical(measure(llm, prompts))
    del llm, model
    parallel_state.destroy_model_parallel()
    gc.collect()  # the groups, whose threads would slow the next case down
    return seconds, config


@contextmanager
def _prompts_filled_in() -> Iterator[None]:
    """Steps with prompts fill the pool with random keys and compute nothing."""
    compute = ModelRunner.step

    def step(self: ModelRunner, batch: StepBatch) -> torch.Tensor:
        if all(len(seq.token_ids) == 1 for seq in batch.seqs):
            return compute(self, batch)
        (pool,) = self.pools
        shape = self.shape
        for layer in range(self.model.config.num_layers):
            for part in torch.arange(pool.num_slots, device=self.device).split(1 << 16):
                size = (len(part), shape.kv_heads, shape.head_dim)
                pool.write(layer, part, torch.randn(size, device=self.device), torch.randn(size, device=self.device))
        return torch.zeros(0 if self.rank else len(batch.seqs), self.vocab_size, device=self.device)

    ModelRunner.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModelRunner.step = compute  # type: ignore[method-assign]
