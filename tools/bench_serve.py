"""``bench.py serve``: a trace of requests through the engine, beside ``transformers`` in static batches.

Trace
    In the shape of public traces of agents: prompts are short or long (two humps), outputs are short, and many prompts
    begin with one of a few long texts. Requests arrive at random (Poisson, ``--rate`` per second; without it all at
    once). Tokens are random, outputs have a given length, sampling is greedy.
Contenders
    This package at every dcp size, with and without its prefix cache; and batches of ``transformers`` (`generate` with
    left padding): a batch takes those that have arrived, at most ``--max-num-seqs``, and ends with its longest output.
Numbers
    TTFT: from arrival to the first token. TPOT: between tokens, first to last of a request. p50 and p95 are
    over the requests of all rounds. Token rates are medians over rounds, ratios are taken inside a round. The share of
    requests with the same tokens as the first contender says whether all computed the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import textwrap
import time
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import bench_world
import torch
import torch.distributed as dist
from bench_models import PRESETS
from bench_peers import build_random_model, transformers_model
from bench_world import World

from megatron_dcp import AsyncLLM, SamplingParams, default_device, parallel_state
from megatron_dcp.config import CacheConfig, EngineConfig

_TABLE = {"contender": 22, "out tok/s": 9, "x first": 7, "prompt tok/s": 12, "TTFT p50 s": 10, "p95": 6,
          "TPOT p50 ms": 11, "p95 ms": 7, "prefix hit": 10, "preempted": 9, "same": 5}  # fmt: skip


@dataclass(frozen=True)
class Arrival:
    """One request: seconds after the start, prompt, tokens to generate."""

    at_s: float
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True)
class Served:
    """What became of it: the time of its first and last token after the arrival, and all tokens."""

    ttft_s: float
    last_s: float
    tokens: list[int]

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.ttft_s) / max(1, len(self.tokens) - 1)


@dataclass(frozen=True)
class Round:
    """A whole trace."""

    served: list[Served]
    seconds: float
    prefix_hit: float | None = None
    preemptions: int | None = None


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="tokens/s, TTFT and TPOT over a trace of requests, beside transformers in static batches",
        description=__doc__,
        epilog=textwrap.dedent("""\
            examples:
              python tools/bench.py serve
              python tools/bench.py serve --rate 0.5 --dcp 1 2 --threads 2
        """),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="small", help="shape of the model")
    parser.add_argument("--layers", type=int, help="overrides the preset's")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, help="requests per second; default: all at once")
    parser.add_argument(
        "--short", type=int, nargs=2, default=(16, 96), help="tokens of a short prompt after its prefix"
    )
    parser.add_argument("--long", type=int, nargs=2, default=(400, 900), help="tokens of a long one")
    parser.add_argument("--long-share", type=float, default=0.25)
    parser.add_argument("--prefix", type=int, default=256, help="tokens that prompts begin with in common")
    parser.add_argument("--prefixes", type=int, default=3, help="different ones")
    parser.add_argument("--output", type=int, nargs=2, default=(8, 48), help="tokens to generate")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of a step")
    parser.add_argument("--dcp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--threads", type=int, help="of all processes together; default: the CPUs of this process")
    parser.add_argument("--peers", nargs="*", choices=("transformers",), default=["transformers"])
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Start the other ranks where torchrun has not, measure, print on rank 0."""
    arguments.threads = arguments.threads or bench_world.available_cpus()
    shape = PRESETS[arguments.preset].shape
    arguments.shape = shape.with_sizes({} if arguments.layers is None else {"layers": arguments.layers})
    bench_world.run_on_ranks(measure_all, max(arguments.dcp), arguments.threads, arguments)


def make_trace(arguments: argparse.Namespace) -> list[Arrival]:
    """The same for all contenders and runs."""
    rng = random.Random(0)
    vocab = arguments.shape.vocab
    prefixes = [[rng.randrange(vocab) for _ in range(arguments.prefix)] for _ in range(arguments.prefixes)]
    trace, now = [], 0.0
    for _ in range(arguments.requests):
        if arguments.rate is not None:
            now += rng.expovariate(arguments.rate)
        own = rng.randint(*(arguments.long if rng.random() < arguments.long_share else arguments.short))
        prompt = rng.choice(prefixes) + [rng.randrange(vocab) for _ in range(own)]
        trace.append(Arrival(now, prompt, rng.randint(*arguments.output)))
    return trace


def measure_all(world: World, arguments: argparse.Namespace) -> None:
    """Every rank runs this; rank 0 prints."""
    trace = make_trace(arguments)
    config = arguments.shape.config(max(len(arrival.prompt) + arrival.new_tokens for arrival in trace))
    groups = parallel_state.get_process_group_collection()
    model = build_random_model(config, groups, getattr(torch, arguments.dtype), default_device())
    contenders = [(f"dcp {size}{name}", size, cached) for size in arguments.dcp
                  for name, cached in (("", True), (", no prefix cache", False))]  # fmt: skip
    llama = transformers_model(model, config) if "transformers" in arguments.peers and world.rank == 0 else None
    rounds: dict[str, list[Round]] = {}
    for turn in range(arguments.repeats):
        for name, size, cached in contenders:
            world.note(f"round {turn + 1}: {name}")
            rounds.setdefault(name, []).append(_ours(model, size, cached, trace, arguments, world))
        if "transformers" in arguments.peers:
            world.note(f"round {turn + 1}: transformers")
            with world.turn(1) as joins:
                done = _static_batches(llama, trace, arguments.max_num_seqs) if joins else Round([], 1.0)
            rounds.setdefault("transformers", []).append(done)
    if world.rank == 0:
        _report(rounds, trace, arguments)


def _ours(
    model: Any, size: int, prefix_caching: bool, trace: list[Arrival], arguments: argparse.Namespace, world: World
) -> Round:
    """A round through `AsyncLLM` on the first ``size`` ranks; the others are replicas without work."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, decode_context_parallel_size=size)
    block = arguments.block_size * size
    needed = sorted((-(-(len(one.prompt) + one.new_tokens) // block) for one in trace), reverse=True)
    done = Round([], 1.0)
    with world.turn(size):
        llm = AsyncLLM(
            model,
            cache=CacheConfig(block_size=arguments.block_size, num_blocks=2 * sum(needed[: arguments.max_num_seqs])),
            engine=EngineConfig(
                max_num_seqs=arguments.max_num_seqs, prefill_chunk_size=arguments.chunk, prefix_caching=prefix_caching
            ),
        )
        if llm.is_driver:
            done = asyncio.run(_serve(llm, trace if world.rank == 0 else []))
        else:
            llm.follow()
    return done


async def _serve(llm: AsyncLLM, trace: list[Arrival]) -> Round:
    async with llm:
        start = time.perf_counter()

        async def request(arrival: Arrival) -> Served:
            await asyncio.sleep(max(0.0, start + arrival.at_s - time.perf_counter()))
            times, tokens = [], []
            params = SamplingParams(max_tokens=arrival.new_tokens, ignore_eos=True)
            async for piece in llm.generate(arrival.prompt, params):
                times.append(time.perf_counter() - start - arrival.at_s)
                tokens.append(piece.token_id)
            return Served(times[0], times[-1], tokens)

        served = await asyncio.gather(*map(request, trace))
        seconds = time.perf_counter() - start
        stats = llm.stats()
    return Round(list(served), seconds, stats.prefix_hit_tokens / max(1, stats.prefix_query_tokens), stats.preemptions)


@torch.inference_mode()
def _static_batches(llama: Any, trace: list[Arrival], size: int) -> Round:
    """Greedy `generate` of those that have arrived, ``size`` at most, batch after batch."""
    waiting, served, start = list(trace), {}, time.perf_counter()
    while waiting:
        time.sleep(max(0.0, start + waiting[0].at_s - time.perf_counter()))
        now = time.perf_counter() - start
        batch = [arrival for arrival in waiting if arrival.at_s <= now][:size]
        waiting = waiting[len(batch) :]
        longest = max(len(arrival.prompt) for arrival in batch)
        padded = [[0] * (longest - len(arrival.prompt)) + arrival.prompt for arrival in batch]
        mask = [[0] * (longest - len(arrival.prompt)) + [1] * len(arrival.prompt) for arrival in batch]
        times: list[float] = []
        new = llama.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(arrival.new_tokens for arrival in batch),
            do_sample=False,
            stopping_criteria=[_Clock(times, start)],
        )[:, longest:].tolist()
        for arrival, tokens in zip(batch, new, strict=True):
            count = arrival.new_tokens
            served[id(arrival)] = Served(times[0] - arrival.at_s, times[count - 1] - arrival.at_s, tokens[:count])
    return Round([served[id(arrival)] for arrival in trace], time.perf_counter() - start)


class _Clock:
    """Notes when each step of `generate` ends, and stops none."""

    def __init__(self, times: list[float], start: float) -> None:
        self.times, self.start = times, start

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter() - self.start)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _report(rounds: dict[str, list[Round]], trace: list[Arrival], arguments: argparse.Namespace) -> None:
    first = next(iter(rounds.values()))
    prompts, outputs = sum(len(one.prompt) for one in trace), sum(one.new_tokens for one in trace)
    rows = []
    print("  ".join(f"{name:>{width}}" for name, width in _TABLE.items()))
    for name, its in rounds.items():
        ttft = _percentiles([one.ttft_s for done in its for one in done.served])
        tpot = _percentiles([one.tpot_s * 1e3 for done in its for one in done.served])
        same = [one.tokens == other.tokens for one, other in zip(its[0].served, first[0].served, strict=True)]
        row = {
            "contender": name,
            "out tok/s": outputs / median(done.seconds for done in its),
            "x first": median(b.seconds / a.seconds for a, b in zip(its, first, strict=True)),
            "prompt tok/s": prompts / median(done.seconds for done in its),
            "TTFT p50 s": ttft[0],
            "p95": ttft[1],
            "TPOT p50 ms": tpot[0],
            "p95 ms": tpot[1],
            "prefix hit": its[-1].prefix_hit,
            "preempted": its[-1].preemptions,
            "same": sum(same) / len(same),
        }
        rows.append(row)
        cells = [
            "-" if value is None else f"{value:.2f}" if isinstance(value, float) else value for value in row.values()
        ]
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, _TABLE.values(), strict=True)), flush=True)
    setting = {name: value for name, value in vars(arguments).items() if name not in ("run", "shape", "command")}
    setting |= {"shape": vars(arguments.shape), "torch": torch.__version__, "machine": platform.machine()}
    setting |= {"prompt tokens": prompts, "output tokens": outputs, "ranks": dist.get_world_size()}
    print(json.dumps({"benchmark": "serve", "setting": setting, "rows": rows}))


def _percentiles(values: list[float]) -> tuple[float, float]:
    """The 50th and the 95th."""
    if len(values) < 2:
        return values[0], values[0]
    cuts = quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]
