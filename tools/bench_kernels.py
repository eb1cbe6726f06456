"""``bench.py kernels``: what one rank does in a decode step on one GPU, against the speed of a copy.

What is measured
    *write*, *pack*, *share*, *merge*: our kernels (on a CPU their twins) for `--batch` tokens of every shape and
    for a chunk's. *attend*:
    decode attention of every back end that serves the shape, over the shards that dcp ranks would have of one long
    context per sequence, one shard after the other. Nothing is sent: the time of the exchange's bytes (``a2a``) at
    `--wire-gb` GB/s stands beside it.
Floor
    A copy of a large buffer; its bytes count twice, read and written.
Interleaving
    A round measures the copy and a contender in turn; ratios are taken inside a round, then their median. On a GPU a
    turn is one CUDA graph of several launches where these can be captured, timed by CUDA events, and passes over more
    memory than a cache holds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.attention import BACKENDS, AttentionBatch, AttentionSpec
from megatron_dcp.cache.pool import KVPool
from megatron_dcp.kernels import choice
from megatron_dcp.traffic import expected_traffic

COLD_BYTES = 256 << 20  # that a turn passes over at least: no cache holds them
MANY_TOKENS = 2048  # of a chunk: what a few tokens take is the time of a launch, and no bandwidth


@dataclass(frozen=True)
class Shape:
    """Heads and dims of one attention layer on a rank."""

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    v_in_k: bool = False


SHAPES = {"gqa": Shape(32, 8, 128, 128), "mla": Shape(128, 1, 576, 512, True)}
Row = dict[str, Any]


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "kernels",
        help="KV write, merge, pack and decode attention of one rank, against a copy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float8_e4m3fn"], help="of the cache")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32 << 10, 128 << 10, 1 << 20])
    parser.add_argument("--dcp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batch", type=int, default=1, help="sequences of a decode step")
    parser.add_argument("--backends", nargs="+", help="default: all")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument(
        "--wire-gb", type=float, default=400.0, help="GB/s that a rank sends, for the modelled exchange"
    )
    parser.add_argument("--buffer-gb", type=float, default=4.0, help="what the copy is measured on")
    parser.add_argument("--cold-mb", type=int, default=COLD_BYTES >> 20, help="that a turn passes over at least")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--seconds", type=float, default=240.0, help="no measurement starts after these")
    parser.set_defaults(run=run)


class Turns:
    """Measures contenders in turn with a copy, until time is up."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.repeats: int = arguments.repeats
        self.cold_bytes: int = arguments.cold_mb << 20
        self.end = time.perf_counter() + arguments.seconds
        half = int(arguments.buffer_gb * 2**30) // 8
        source, target = (torch.ones(half, device=self.device) for _ in range(2))
        self._copy = self._prepared([lambda: target.copy_(source)])[0]
        self._copy_bytes = 2 * source.nbytes
        self.copy_gb_s = self._copy_bytes / median(self._time(self._copy) for _ in range(self.repeats)) / 1e9

    @property
    def over(self) -> bool:
        return time.perf_counter() > self.end

    def measure(self, calls: list[Callable[[], object]], bytes_of_one: int) -> Row:
        """Time of one of ``calls`` (each on memory of its own), and what it moves, against the copy."""
        turn, captured = self._prepared(calls)
        times, ratios = [], []
        for _ in range(self.repeats):
            copy_speed = self._copy_bytes / self._time(self._copy)
            times.append(self._time(turn) / len(calls))
            ratios.append(bytes_of_one / times[-1] / copy_speed)
            if self.over:
                break
        return {
            "us": median(times) * 1e6,
            "gb_s": bytes_of_one / median(times) / 1e9,
            "ratio_to_copy": median(ratios),
            "bytes": bytes_of_one,
            "captured": captured,
        }

    def copies(self, bytes_of_one: int) -> int:
        """How many inputs a turn needs so that none is still in a cache."""
        return max(1, -(-self.cold_bytes // max(1, bytes_of_one)))

    def _prepared(self, calls: list[Callable[[], object]]) -> tuple[Callable[[], object], bool]:
        def eager() -> None:
            for call in calls:
                call()

        eager()  # compiles, allocates
        if self.device.type != "cuda":
            return eager, False
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                eager()
        except RuntimeError:  # a library that synchronises
            torch.cuda.synchronize()
            return eager, False
        return graph.replay, True

    def _time(self, turn: Callable[[], object]) -> float:
        """Seconds."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            turn()
            return time.perf_counter() - start
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        turn()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> None:
    """Measure and print a table, then the same as JSON."""
    turns = Turns(arguments)
    print(f"copy: {turns.copy_gb_s:.1f} GB/s on {turns.device}")
    rows: list[Row] = []
    left_out = 0
    for name, measure in _measurements(turns, arguments):
        if turns.over:
            left_out += 1
            continue
        row = {"name": name, **measure()}
        rows.append(row)
        figures = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
        print("  ".join(f"{key}={value}" if key != "name" else value for key, value in figures.items()), flush=True)
    if left_out:
        print(f"{left_out} measurements left out after {arguments.seconds} s")
    setting = {name: value for name, value in vars(arguments).items() if name not in ("run", "command")}
    setting |= {"torch": torch.__version__, "machine": _machine(turns.device)}
    result = {"benchmark": "kernels", "setting": setting, "copy_gb_s": turns.copy_gb_s, "left_out": left_out}
    print(json.dumps(result | {"rows": rows}))


def _machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _measurements(turns: Turns, arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Row]]]:
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    for shape_name in arguments.shapes:
        shape = SHAPES[shape_name]
        for dtype, tokens in ((dtype, tokens) for dtype in dtypes for tokens in (arguments.batch, MANY_TOKENS)):
            yield (
                f"write {shape_name} {dtype} {tokens} tokens",
                lambda shape=shape, dtype=dtype, tokens=tokens: _write(turns, shape, dtype, tokens),
            )
        for ranks in (ranks for ranks in arguments.dcp if ranks > 1):
            for tokens in (arguments.batch, MANY_TOKENS):
                for step in ("pack", "share", "merge"):
                    yield (
                        f"{step} {shape_name} dcp {ranks} {tokens} tokens",
                        lambda step=step, shape=shape, ranks=ranks, tokens=tokens: _around(
                            turns, step, shape, ranks, tokens
                        ),
                    )
    for context in arguments.contexts:
        for shape_name in arguments.shapes:
            for dtype in dtypes:
                for ranks in arguments.dcp:
                    for kind in BACKENDS:
                        if arguments.backends and kind.name not in arguments.backends:
                            continue
                        yield (
                            f"attend {kind.name} {shape_name} {dtype} context {context} dcp {ranks}",
                            lambda kind=kind, shape=SHAPES[shape_name], dtype=dtype, context=context, ranks=ranks: (
                                _attend(turns, kind, shape, dtype, context, ranks, arguments)
                            ),
                        )


def _write(turns: Turns, shape: Shape, dtype: torch.dtype, tokens: int) -> Row:
    def new(dim: int) -> Tensor:
        return torch.randn(tokens, shape.kv_heads, dim, dtype=torch.bfloat16, device=turns.device)

    blocks = -(-max(tokens, 64) // 64)
    read = tokens * shape.kv_heads * (shape.head_dim if shape.v_in_k else shape.head_dim + shape.v_dim) * 2
    count = min(512, turns.copies(2 * read))
    pool = _pool(shape, dtype, turns.device, count, blocks, 64, "slots_first")
    slot_t = torch.randperm(blocks * 64, device=turns.device)[:tokens]
    inputs = [(new(shape.head_dim), None if shape.v_in_k else new(shape.v_dim)) for _ in range(count)]
    calls = [lambda i=i, k=k, v=v: pool.write(i, slot_t, k, v) for i, (k, v) in enumerate(inputs)]
    return turns.measure(calls, read + tokens * pool.bytes_per_key)


def _around(turns: Turns, step: str, shape: Shape, ranks: int, tokens: int) -> Row:
    """A step around the collectives. ``merge`` is what a rank does after an all-to-all: its heads of all partials."""
    heads, width = shape.heads // ranks if step == "merge" else shape.heads, shape.v_dim + 1
    partial = tokens * heads * width * 4
    moved = {"pack": 2 * partial, "share": 2 * partial + ranks * tokens * heads * 4, "merge": (ranks + 1) * partial}[
        step
    ]
    calls: list[Callable[[], object]] = []
    for _ in range(min(512, turns.copies(moved))):
        packed = torch.randn(ranks if step == "merge" else 1, heads, tokens, width, device=turns.device).transpose(1, 2)
        out, lse = packed[..., :-1], packed[..., -1]
        if step == "merge":
            calls.append(lambda out=out, lse=lse: choice.merge_partials(out, lse))
            continue
        own_out, own_lse = out[0].contiguous(), lse[0].contiguous()
        if step == "pack":
            calls.append(lambda out=own_out, lse=own_lse: choice.pack(out, lse))
        else:
            lses = torch.randn(ranks, tokens, heads, device=turns.device)
            calls.append(lambda out=own_out, lses=lses: choice.share_of(out, lses, 0))
    return turns.measure(calls, moved)


def _attend(
    turns: Turns, kind: Any, shape: Shape, dtype: torch.dtype, context: int, ranks: int, arguments: argparse.Namespace
) -> Row:
    block_size, batch = arguments.block_size, arguments.batch
    spec = AttentionSpec(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_dim=shape.v_dim,
        v_in_k=shape.v_in_k,
        dtype=dtype,
        device=turns.device,
        block_size=block_size,
    )
    backend = kind()
    if (refusal := backend.supports(spec)) is not None:
        return {"refused": refusal}
    keys = -(-context // ranks)
    per_sequence = -(-keys // block_size)
    blocks = torch.randperm(batch * per_sequence).view(batch, per_sequence).tolist()
    one = _pool(shape, dtype, torch.device("cpu"), 1, 1, 1, backend.pool_order).bytes_per_key * keys * batch
    count = max(ranks, turns.copies(one))
    try:
        pool = _pool(shape, dtype, turns.device, count, batch * per_sequence, block_size, backend.pool_order)
        step = AttentionBatch((1,) * batch, (keys,) * batch, tuple(map(tuple, blocks)), block_size)
        plan = backend.plan(step, spec, blocks=per_sequence if backend.refreshable else 0)
        q_dtype = torch.float32 if turns.device.type == "cpu" else torch.bfloat16
        q_TNH = torch.randn(batch, shape.heads, shape.head_dim, dtype=q_dtype, device=turns.device)
        scale = shape.head_dim**-0.5
        calls = [lambda i=i: backend.attend(q_TNH, pool.layer(i), plan, scale=scale) for i in range(count)]
        row = turns.measure(calls, one)
    except (RuntimeError, ValueError, ImportError) as error:  # of a library: the others are still worth measuring
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    sent = sum(size for _, size in expected_traffic("a2a", batch, shape.heads, shape.v_dim, ranks).values())
    return row | {"keys": keys, "wire_us": sent / arguments.wire_gb / 1e3, "splits": getattr(plan, "splits", 1)}


def _pool(
    shape: Shape, dtype: torch.dtype, device: torch.device, layers: int, blocks: int, block_size: int, order: Any
) -> KVPool:
    """With numbers that no kernel stumbles over."""
    v_dim = shape.v_dim
    sizes = (layers, blocks, block_size, shape.kv_heads, shape.head_dim, v_dim)
    pool = KVPool(*sizes, v_in_k=shape.v_in_k, dtype=dtype, device=device, order=order)
    for index in range(layers):
        for part in pool.layer(index):
            if part is None:
                continue
            if part.dtype.itemsize == 1:
                part.view(torch.uint8).random_(0, 64)  # as e4m3 up to 1.9
            else:
                part.normal_()
    return pool
