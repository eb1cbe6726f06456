"""``bench.py decode``: one decode step over contexts x batches, this package beside its peers, on the same weights.

What is measured
    The time of the step that decodes one token of every sequence of a batch, with `context` keys per sequence, the
    token's own included. Every step decodes the same token at the same position, so nothing grows.
Caches
    No prompt is computed: all caches are filled with the same random keys and values directly. The largest difference
    between the logits, as a share of their range, is in the table: it says whether all computed the same thing.
Interleaving
    One round measures every contender in turn, and the memory's bandwidth; a row shows medians over rounds. Ratios are
    taken inside a round first, then their median: load from elsewhere changes from round to round.
Bandwidth
    A sum over a buffer of `--buffer-gb`, with as many threads and processes as the contender has. A cache that is small
    against the CPU's own is read faster than that.
"""

from __future__ import annotations

import argparse
import json
import platform
import textwrap
from collections.abc import Callable
from statistics import median
from typing import Any

import bench_world
import torch
from bench_models import PRESETS, Case, Contender, Shape
from bench_peers import make_contenders
from bench_world import World

from megatron_dcp.traffic import expected_traffic

Row = dict[str, Any]
TURN_S = 0.3  # what a contender's turn in a round aims at, within 2 and 20 steps
QUICK = {"contexts": [1024, 4096], "batches": [1], "repeats": 2}


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "decode",
        help="ms per token, bandwidth and traffic of a decode step, beside Megatron-Core and transformers",
        description=__doc__,
        epilog=textwrap.dedent("""\
            examples:
              python tools/bench.py decode                     # attention: how near to the memory's bandwidth
              python tools/bench.py decode --preset small      # 12 layers x 768: overhead per layer at short context
              torchrun --nproc-per-node 4 tools/bench.py decode --dcp 1 2 4 --threads 4
        """),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="attention", help="shape, contexts and batches")
    for field in ("layers", "hidden", "ffn", "heads", "kv-heads", "head-dim", "vocab"):
        parser.add_argument(f"--{field}", type=int, help="overrides the preset's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--contexts", type=int, nargs="+", help="keys per sequence, the new token's included (>= 2)")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--dcp", type=int, nargs="+", default=[1, 2], help="1 is always measured")
    parser.add_argument("--exchange", default="fold", choices=("fold", "all_reduce", "ag_rs", "a2a"))
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--interleave", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--threads", type=int, help="of all processes together; default: the CPUs of this process")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=("megatron", "transformers", "transformers-static"),
        default=["megatron", "transformers", "transformers-static"],
        help="megatron: its static inference; transformers: with DynamicCache, and with StaticCache",
    )
    parser.add_argument("--max-gb", type=float, default=8.0, help="leave out what would take more memory (an estimate)")
    parser.add_argument("--buffer-gb", type=float, default=1.0, help="what the bandwidth is measured on")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK}, where not given")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Fill in the defaults, start the other ranks where torchrun has not, measure, print on rank 0."""
    preset = PRESETS[arguments.preset]
    quick = QUICK if arguments.quick else {}
    arguments.contexts = arguments.contexts or quick.get("contexts") or preset.contexts
    arguments.batches = arguments.batches or quick.get("batches") or preset.batches
    if arguments.quick:
        arguments.repeats = min(arguments.repeats, QUICK["repeats"])
    arguments.dcp = sorted({1, *arguments.dcp})
    arguments.threads = arguments.threads or bench_world.available_cpus()
    given = {name: getattr(arguments, name) for name in Shape.__dataclass_fields__}
    arguments.shape = preset.shape.with_sizes({name: size for name, size in given.items() if size is not None})
    if min(arguments.contexts) < 2:
        raise SystemExit(f"--contexts {min(arguments.contexts)} is below 2: one key in the cache and the token's own")
    bench_world.run_on_ranks(measure_all, max(arguments.dcp), arguments.threads, arguments)


def measure_all(world: World, arguments: argparse.Namespace) -> None:
    """Every rank runs this; rank 0 prints."""
    world.make_groups(arguments.dcp)
    contenders = make_contenders(arguments, world)
    buffer = torch.ones(int(arguments.buffer_gb * 2**30) // 4 // len(arguments.dcp))
    rows: list[Row] = []
    for context in arguments.contexts:
        for batch in arguments.batches:
            case = Case(context=context, batch=batch)
            world.note(f"context {context}, batch {batch}")
            new = _measure_case(case, contenders, buffer, arguments, world)
            if world.rank == 0 and not rows:
                print(_line(_TABLE, {name: name for name in _TABLE}))
            rows += new
            for row in new if world.rank == 0 else ():
                print(_line(_TABLE, _cells(row)), flush=True)
    if world.rank == 0:
        print(json.dumps({"benchmark": "decode", "setting": _setting(arguments), "rows": rows}))


def _setting(arguments: argparse.Namespace) -> Row:
    skipped = ("command", "run", "shape", *Shape.__dataclass_fields__)
    return {
        "shape": vars(arguments.shape),
        "parameters": arguments.shape.parameters,
        **{name: value for name, value in vars(arguments).items() if name not in skipped},
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {bench_world.available_cpus()} CPUs",
        "cache": "random keys, not prefilled",
    }


def _measure_case(
    case: Case, contenders: list[Contender], buffer: torch.Tensor, arguments: argparse.Namespace, world: World
) -> list[Row]:
    skipped, present = {}, []
    for contender in contenders:
        needed = sum(other.memory(case) for other in [*present, contender]) / 1e9
        if needed > arguments.max_gb:
            skipped[contender.name] = f"left out: takes the caches to {needed:.1f} GB"
            continue
        present.append(contender)
        with world.turn(contender.ranks) as joins:
            if joins:
                contender.prepare(case)

    def turns(name: str, ranks: int, call: Callable[[], object], rounds: dict[str, list[float]]) -> None:
        rounds.setdefault(name, []).append(world.time(call, ranks, TURN_S))

    rounds: dict[str, list[float]] = {}
    logits = {}
    for contender in present:
        with world.turn(contender.ranks) as joins:
            if joins:
                logits[contender.name] = contender.step()
                contender.count_traffic()
    for _ in range(arguments.repeats):
        for ranks in sorted({contender.ranks for contender in present}):
            part = buffer[: buffer.numel() // ranks]
            turns(f"bandwidth {ranks}", ranks, part.sum, rounds)
        for contender in present:
            turns(contender.name, contender.ranks, contender.step, rounds)
            if contender.measures_attention:
                turns(f"attend {contender.name}", contender.ranks, contender.attend, rounds)
    rows = []
    for contender in present:
        rows.append(_row(case, contender, rounds, buffer, arguments) if world.rank == 0 else {})
        rows[-1]["logit_difference"] = _difference(logits, contender.name) if world.rank == 0 else None
        with world.turn(contender.ranks) as joins:
            if joins:
                contender.release()
    return rows + [
        {"context": case.context, "batch": case.batch, "name": name, "skipped": why} for name, why in skipped.items()
    ]


def _difference(logits: dict[str, torch.Tensor], name: str) -> float:
    """Largest difference from the first contender's logits, as a share of their range."""
    first = next(iter(logits.values()))
    return float((logits[name] - first).abs().max() / (first.max() - first.min()))


def _row(
    case: Case,
    contender: Contender,
    rounds: dict[str, list[float]],
    buffer: torch.Tensor,
    arguments: argparse.Namespace,
) -> Row:
    shape: Shape = arguments.shape
    read_bytes = buffer.numel() // contender.ranks * contender.ranks * 4
    bandwidths = [read_bytes / seconds for seconds in rounds[f"bandwidth {contender.ranks}"]]
    seconds = rounds[contender.name]
    kv_bytes = case.kv_bytes(shape, arguments.dtype)
    floor_bytes = contender.ranks * shape.weight_bytes(arguments.dtype) + kv_bytes
    row: Row = {
        "context": case.context,
        "batch": case.batch,
        "name": contender.name,
        "ranks": contender.ranks,
        "threads_per_rank": max(1, arguments.threads // contender.ranks),
        "ms_per_token": 1e3 * median(seconds),
        "tokens_per_s": case.batch / median(seconds),
        "ratio_to_dcp1": _paired(seconds, rounds["dcp 1"], lambda own, ours: own / ours),
        "bandwidth_gb_s": median(bandwidths) / 1e9,
        "floor_ms": 1e3 * floor_bytes / median(bandwidths),
        "ratio_to_floor": _paired(seconds, bandwidths, lambda s, speed: s * speed / floor_bytes),
        "kv_gb_s": kv_bytes / median(seconds) / 1e9,
    }
    if f"attend {contender.name}" in rounds:
        attention = rounds[f"attend {contender.name}"]
        row |= {
            "attention_ms": 1e3 * median(attention),
            "attention_kv_gb_s": kv_bytes / median(attention) / 1e9,
            "attention_ratio_to_floor": _paired(attention, bandwidths, lambda s, speed: s * speed / kv_bytes),
        }
    if contender.traffic is not None:
        expected = expected_step_traffic(
            shape, case.batch, contender.ranks, arguments.exchange, getattr(torch, arguments.dtype)
        )
        row |= {
            "collectives_per_step": sum(calls for calls, _ in contender.traffic.values()),
            "sent_bytes_per_token": sum(sent for _, sent in contender.traffic.values()) / case.batch,
            "collectives": contender.traffic,
            "expected_collectives": expected,
            "kv_bytes_per_rank": contender.kv_bytes,
            "kv_ratio_to_total_over_dcp": contender.kv_bytes / (kv_bytes / contender.ranks),
        }
    return row


def _paired(own: list[float], other: list[float], ratio: Callable[[float, float], float]) -> float:
    return median(ratio(*pair) for pair in zip(own, other, strict=True))


def expected_step_traffic(
    shape: Shape, batch: int, dcp: int, exchange: str, dtype: torch.dtype
) -> dict[str, tuple[int, int]]:
    """``op -> (calls, bytes that rank 0 sends)`` of a decode step in the orthogonal layout, tp 1."""
    if dcp == 1:
        return {}
    per_layer = expected_traffic(exchange, batch, shape.heads, shape.head_dim, dcp)
    if exchange != "all_reduce":  # what rank has is a share: the output projection's sum completes it
        sum_bytes = 2 * (dcp - 1) * batch * shape.hidden * dtype.itemsize // dcp
        per_layer = {**per_layer, "all_reduce": (1, sum_bytes)}
    return {op: (shape.layers * calls, shape.layers * sent) for op, (calls, sent) in per_layer.items()}


_TABLE = {  # column: width
    "context": 7, "batch": 5, "contender": 19, "ms/token": 8, "x dcp 1": 7, "x floor": 7, "attn ms": 7,
    "attn x floor": 12, "KV GB/s": 7, "of GB/s": 7, "coll./step": 10, "sent B/token": 12, "KV MiB/rank": 11,
    "x total/dcp": 11, "logit diff": 10,
}  # fmt: skip


def _cells(row: Row) -> dict[str, str]:
    def show(name: str, form: str, unit: float = 1.0) -> str:
        return format(row[name] / unit, form) if row.get(name) is not None else "-"

    cells = {"context": str(row["context"]), "batch": str(row["batch"]), "contender": row["name"]}
    if "skipped" in row:
        return {**dict.fromkeys(_TABLE, ""), **cells, "ms/token": row["skipped"]}
    return {
        **cells,
        "ms/token": show("ms_per_token", ".2f"),
        "x dcp 1": show("ratio_to_dcp1", ".2f"),
        "x floor": show("ratio_to_floor", ".2f"),
        "attn ms": show("attention_ms", ".2f"),
        "attn x floor": show("attention_ratio_to_floor", ".2f"),
        "KV GB/s": show("attention_kv_gb_s" if "attention_kv_gb_s" in row else "kv_gb_s", ".1f"),
        "of GB/s": show("bandwidth_gb_s", ".1f"),
        "coll./step": show("collectives_per_step", ".0f"),
        "sent B/token": show("sent_bytes_per_token", ".0f"),
        "KV MiB/rank": show("kv_bytes_per_rank", ".2f", 2**20),
        "x total/dcp": show("kv_ratio_to_total_over_dcp", ".3f"),
        "logit diff": show("logit_difference", ".0e"),
    }


def _line(widths: dict[str, int], cells: dict[str, str]) -> str:
    return "  ".join(f"{cells[name]:>{width}}" for name, width in widths.items()).rstrip()
