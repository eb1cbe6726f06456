"""``bench.py prefill``: time and memory of a long prompt; dcp ranks against one process with the threads of all.

What is measured
    All chunks of one prompt, one after the other, as the engine computes them: every layer, attention over what the
    earlier chunks left in the cache, and the logits of the last token. Contenders are dcp sizes x ways to share a
    chunk's tokens (`EngineConfig.prefill`), on the same random weights; the largest difference of the last logits, as
    a share of their range, is in the table.
Memory
    KV: bytes of the pool. Step: most bytes of tensors that are alive together while the last chunk is computed
    (activations, queries, partials, slabs, masks). Exchange bound: what queries, partials and slabs may take of it at
    most (`ModelRunner.work_bytes`). All per rank, of the largest one.
Interleaving
    A round measures every contender in turn; rows show medians, and ratios are taken inside a round first.
"""

from __future__ import annotations

import argparse
import json
import platform
import textwrap
from statistics import median
from typing import Any

import bench_world
import torch
import torch.distributed as dist
from bench_memory import LiveBytes
from bench_models import PRESETS
from bench_peers import build_random_model, with_dcp
from bench_world import World

from megatron_dcp import default_device, parallel_state
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.engine.runner import ModelRunner
from megatron_dcp.metrics import Metrics

WAYS = ("auto", "pass_kv", "pass_q", "replicated")
_TABLE = {"prompt": 7, "contender": 18, "s": 8, "x dcp 1": 8, "tokens/s": 9, "KV MiB/rank": 12, "step MiB/rank": 14,
          "exchange bound MiB": 18, "sent MB/rank": 13, "logit diff": 11}  # fmt: skip


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "prefill",
        help="seconds and memory of a long prompt, dcp 1 with all threads against dcp ranks that share them",
        description=__doc__,
        epilog=textwrap.dedent("""\
            example:
              python tools/bench.py prefill --prompts 16384 --dcp 2 --ways auto replicated
        """),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="attention", help="shape of the model")
    parser.add_argument("--layers", type=int, help="overrides the preset's")
    parser.add_argument("--prompts", type=int, nargs="+", default=[16384], help="tokens")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--dcp", type=int, nargs="+", default=[2], help="1 is always measured")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["auto"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--interleave", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--threads", type=int, help="of all processes together; default: the CPUs of this process")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Start the other ranks where torchrun has not, measure, print on rank 0."""
    arguments.dcp = sorted({1, *arguments.dcp})
    arguments.threads = arguments.threads or bench_world.available_cpus()
    shape = PRESETS[arguments.preset].shape
    arguments.shape = shape.with_sizes({} if arguments.layers is None else {"layers": arguments.layers})
    bench_world.run_on_ranks(measure_all, max(arguments.dcp), arguments.threads, arguments)


class Prompt:
    """One dcp size and one way to share a chunk's tokens."""

    def __init__(self, ranks: int, way: str, model: Any, groups: Any, arguments: argparse.Namespace) -> None:
        self.name = f"dcp {ranks}" if ranks == 1 else f"dcp {ranks} {way}"
        self.ranks, self.way, self.model, self.groups, self.arguments = ranks, way, model, groups, arguments
        self.metrics = Metrics(enabled=False)

    def prepare(self, prompt: int) -> None:
        arguments, shape = self.arguments, self.arguments.shape
        blocks = -(-prompt // (arguments.block_size * self.ranks))
        self.runner = ModelRunner(
            self.model,
            self.groups,
            cache=CacheConfig(
                block_size=arguments.block_size, kv_interleave_size=arguments.interleave, num_blocks=blocks
            ),
            engine=EngineConfig(prefill=self.way, prefill_chunk_size=arguments.chunk, max_num_seqs=1),
            vocab_size=shape.vocab,
            max_sequence_length=prompt,
            metrics=self.metrics,
        )
        tokens = torch.randint(shape.vocab, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
        size = arguments.chunk
        table = list(range(blocks))
        self.steps = [
            StepBatch([SeqStep(tokens[at : at + size], at, table, int(at + size >= prompt))])
            for at in range(0, prompt, size)
        ]

    def read(self) -> None:
        """The whole prompt; the last logits stay in ``logits``."""
        for step in self.steps:
            self.logits = self.runner.step(step)


def measure_all(world: World, arguments: argparse.Namespace) -> None:
    """Every rank runs this; rank 0 prints."""
    world.make_groups(arguments.dcp)
    config = arguments.shape.config(max(arguments.prompts))
    groups = parallel_state.get_process_group_collection()
    model = build_random_model(config, groups, getattr(torch, arguments.dtype), default_device())
    contenders = []
    for size, group in world.groups.items():
        for way in arguments.ways if size > 1 else ["replicated"]:
            contenders.append(Prompt(size, way, model, with_dcp(groups, group), arguments))
    rows = [row for prompt in arguments.prompts for row in _measure(prompt, contenders, arguments, world)]
    if world.rank == 0:
        setting = {name: value for name, value in vars(arguments).items() if name not in ("run", "shape", "command")}
        setting |= {"shape": vars(arguments.shape), "torch": torch.__version__, "machine": platform.machine()}
        print(json.dumps({"benchmark": "prefill", "setting": setting, "rows": rows}))


def _measure(prompt: int, contenders: list[Prompt], arguments: argparse.Namespace, world: World) -> list[dict]:
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    found: dict[str, dict[str, Any]] = {}
    for turn in range(arguments.repeats):
        for contender in contenders:
            world.note(f"prompt {prompt}, round {turn + 1}: {contender.name}")
            with world.turn(contender.ranks) as joins:
                measured = _read(contender, prompt, world) if joins else {}
            if world.rank == 0:
                seconds[contender.name].append(measured.pop("s"))
                found[contender.name] = measured
    if world.rank:
        return []
    rows = []
    first = found[contenders[0].name]["logits"]
    print("  ".join(f"{name:>{width}}" for name, width in _TABLE.items()))
    for contender in contenders:
        own, more = seconds[contender.name], found[contender.name]
        logits = more.pop("logits")
        row = {
            "prompt": prompt,
            "contender": contender.name,
            "s": median(own),
            "x dcp 1": median(a / b for a, b in zip(own, seconds[contenders[0].name], strict=True)),
            "tokens/s": prompt / median(own),
            **more,
            "logit diff": float((logits - first).abs().max() / (first.max() - first.min())),
        }
        rows.append(row)
        forms = {"s": ".2f", "x dcp 1": ".2f", "tokens/s": ".0f", "logit diff": ".0e"}
        cells = [format(row[name], forms.get(name, ".1f" if isinstance(row[name], float) else "")) for name in _TABLE]
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, _TABLE.values(), strict=True)), flush=True)
    return rows


def _read(contender: Prompt, prompt: int, world: World) -> dict[str, Any]:
    """Seconds of the slowest rank and the largest memory, after the first chunk has been read once to warm up."""
    contender.prepare(prompt)
    contender.runner.step(contender.steps[0])
    group = world.groups[contender.ranks]
    contender.metrics.reset()
    contender.metrics.enabled = True
    dist.barrier(group)
    spent = bench_world.seconds(contender.read)
    contender.metrics.enabled = False
    with LiveBytes() as live:
        contender.runner.step(contender.steps[-1])
    sent = sum(count for _, count in contender.metrics.collectives.values())
    everywhere: list[Any] = [None] * contender.ranks
    dist.all_gather_object(everywhere, (spent, live.peak, sent), group=group)
    spent, peak, sent = (max(values) for values in zip(*everywhere, strict=True))
    logits, bound, pool = contender.logits, contender.runner.work_bytes, contender.runner.kv_bytes
    del contender.runner
    return {
        "s": spent,
        "KV MiB/rank": pool / 2**20,
        "step MiB/rank": peak / 2**20,
        "exchange bound MiB": bound / 2**20,
        "sent MB/rank": sent / 1e6,
        "logits": logits,
    }
