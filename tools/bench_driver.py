"""``bench.py driver``: what a decode step costs the driver of a replica beside the model.

What is measured
    Steps of the engine over a stand-in for the model that returns the same logits at once: schedule, make the message
    for the followers (encoded, not sent), sample, commit, count. Every sequence decodes one token per step. Medians
    over the steps of a run; the sampler's part is timed inside them.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from statistics import median
from typing import Any

import torch

from megatron_dcp.cache import KVLayout
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.engine.batch import StepBatch
from megatron_dcp.engine.core import Engine
from megatron_dcp.engine.link import Link
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.request import Request
from megatron_dcp.engine.sampler import Sampler
from megatron_dcp.engine.wire import Message, encode
from megatron_dcp.metrics import Metrics


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "driver",
        help="ms of a decode step beside the model: schedule, message, sample, commit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(run=run)


class NoModel:
    """Returns logits that are made ahead."""

    window = None

    def __init__(self, logits_RV: torch.Tensor, num_blocks: int) -> None:
        self.logits_RV, self.num_blocks = logits_RV, num_blocks

    def step(self, batch: StepBatch) -> torch.Tensor:
        return self.logits_RV[: batch.num_logits]


class NoFollowers(Link):
    """Encodes messages as if somebody listened."""

    def __init__(self) -> None:
        super().__init__(_Alone(), 0)
        self.alone = False

    def send(self, message: Message) -> None:
        encode(message)


class _Alone:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    torch.set_num_threads(arguments.threads)
    rows = [_measure(count, arguments) for count in arguments.sequences]
    print(f"{'sequences':>9}  {'ms/step':>8}  {'sampler ms':>10}  {'us/sequence':>11}")
    for row in rows:
        print(
            f"{row['sequences']:>9}  {row['ms_per_step']:>8.3f}  {row['sampler_ms']:>10.3f}  "
            f"{1e3 * row['ms_per_step'] / row['sequences']:>11.1f}"
        )
    setting = {name: value for name, value in vars(arguments).items() if name not in ("run", "command")}
    setting |= {"torch": torch.__version__, "machine": platform.machine()}
    print(json.dumps({"benchmark": "driver", "setting": setting, "rows": rows}))


def _measure(count: int, arguments: argparse.Namespace) -> dict[str, float]:
    layout = KVLayout(2, 1, 64)
    length = arguments.prompt + arguments.steps + 2
    blocks = count * layout.blocks_for(length)
    logits_RV = 4 * torch.randn(count, arguments.vocab, generator=torch.Generator().manual_seed(0))
    sampler, sampling = Sampler(arguments.vocab), []
    sample = sampler.sample

    def timed_sample(*args: Any) -> Any:
        start = time.perf_counter()
        results = sample(*args)
        sampling.append(time.perf_counter() - start)
        return results

    sampler.sample = timed_sample  # type: ignore[method-assign]
    engine = Engine(
        lambda _: NoModel(logits_RV, blocks),
        layout,
        CacheConfig(num_blocks=blocks),
        EngineConfig(max_num_seqs=count, prefill_chunk_size=count * arguments.prompt),
        sampler,
        NoFollowers(),
        metrics=Metrics(),
    )
    params = SamplingParams(max_tokens=arguments.steps + 2, temperature=arguments.temperature, seed=0, ignore_eos=True)
    engine.add(
        [
            Request(index=index, prompt=[index] * arguments.prompt, params=params, max_tokens=params.max_tokens)
            for index in range(count)
        ]
    )
    while any(not request.token_ids for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    spent = []
    sampling.clear()
    for _ in range(arguments.steps):
        start = time.perf_counter()
        engine.step()
        spent.append(time.perf_counter() - start)
    return {"sequences": count, "ms_per_step": 1e3 * median(spent), "sampler_ms": 1e3 * median(sampling)}
