"""``bench.py mla``: attention of one absorbed decode step over a cache of latents, against the machine's floors.

What is measured
    The SDPA back end's attention of `--heads` query heads over `context` latents of `--rank` + `--rotated` numbers, the
    first `--rank` of which are the values; one layer, one token of every sequence, random latents.
Floors
    *bandwidth*: the time to read the latents once, at the speed of a sum over a buffer. *arithmetic*: the time of
    2 * heads * context * (2 * rank + rotated) operations at the speed of a square matrix product of the same dtype the
    arithmetic is done in (fp32). The higher one counts.
Peer
    *whole*: scores and values as two matrix products over all latents at once, without chunks.
Interleaving
    One round measures the two floors and both contenders in turn; ratios are taken inside a round, then their median.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from bench_world import available_cpus
from torch import Tensor

from megatron_dcp.attention import AttentionBatch, AttentionSpec
from megatron_dcp.attention.sdpa import SDPABackend, plain
from megatron_dcp.shard import Shard

TURN_S = 0.2  # what a contender's turn in a round aims at


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "mla",
        help="attention of an absorbed MLA decode step, against bandwidth and arithmetic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--rank", type=int, default=512, help="kv_lora_rank")
    parser.add_argument("--rotated", type=int, default=64, help="qk_pos_emb_head_dim")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the cache")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--threads", type=int, help="default: the CPUs of this process")
    parser.add_argument("--buffer-gb", type=float, default=1.0, help="what the bandwidth is measured on")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure every context x batch and print."""
    arguments.threads = arguments.threads or available_cpus()
    torch.set_num_threads(arguments.threads)
    buffer = torch.ones(int(arguments.buffer_gb * 2**30) // 4)
    square = torch.randn(2048, 2048)
    rows = []
    for context in arguments.contexts:
        for batch in arguments.batches:
            row = _measure(context, batch, buffer, square, arguments)
            if not rows:
                print("  ".join(f"{name:>{max(9, len(name))}}" for name in row))
            rows.append(row)
            print("  ".join(f"{value:>{max(9, len(name))}.4g}" for name, value in row.items()), flush=True)
    setting = {name: value for name, value in vars(arguments).items() if name not in ("run", "command")}
    setting |= {"torch": torch.__version__, "machine": f"{platform.machine()}, {available_cpus()} CPUs"}
    print(json.dumps({"benchmark": "mla", "setting": setting, "rows": rows}))


@torch.inference_mode()
def _measure(
    context: int, batch: int, buffer: Tensor, square: Tensor, arguments: argparse.Namespace
) -> dict[str, float]:
    dtype, width = getattr(torch, arguments.dtype), arguments.rank + arguments.rotated
    blocks = -(-context // arguments.block_size)
    k_SKH = torch.randn(batch * blocks * arguments.block_size, 1, width).to(dtype)
    v_SKV = k_SKH[..., : arguments.rank]
    q_TNH = torch.randn(batch, arguments.heads, width)
    backend, scale = SDPABackend(), width**-0.5
    plan = backend.plan(
        AttentionBatch(
            q_lens=(1,) * batch,
            visible=(context,) * batch,
            block_tables=tuple(tuple(range(b * blocks, (b + 1) * blocks)) for b in range(batch)),
            block_size=arguments.block_size,
        ),
        AttentionSpec(
            heads=arguments.heads,
            kv_heads=1,
            head_dim=width,
            v_dim=arguments.rank,
            v_in_k=True,
            dtype=dtype,
            device=k_SKH.device,
            block_size=arguments.block_size,
        ),
    )

    def ours() -> tuple[Tensor, Tensor]:
        return backend.attend(q_TNH, Shard(k_SKH, v_SKV), plan, scale=scale)

    def whole() -> list[tuple[Tensor, Tensor]]:
        k_BCH = k_SKH.view(batch, -1, width)[:, :context].float()
        return [plain(q[None, None], k[None, None], k[None, None, :, : arguments.rank], None, scale)
                for q, k in zip(q_TNH, k_BCH, strict=True)]  # fmt: skip

    out, _ = ours()
    reference = torch.cat([each[0].flatten(0, 1) for each in whole()])
    difference = float((out - reference).abs().max() / reference.abs().max())
    flops = 2 * batch * arguments.heads * context * (width + arguments.rank)
    num_bytes = batch * context * width * dtype.itemsize
    rounds: dict[str, list[float]] = {"bandwidth": [], "arithmetic": [], "ours": [], "whole": []}
    for _ in range(arguments.repeats):
        rounds["bandwidth"].append(_seconds(buffer.sum) * num_bytes / buffer.nbytes)
        rounds["arithmetic"].append(_seconds(lambda: square @ square) * flops / (2 * 2048**3))
        rounds["ours"].append(_seconds(ours))
        rounds["whole"].append(_seconds(whole))
    floors = [max(pair) for pair in zip(rounds["bandwidth"], rounds["arithmetic"], strict=True)]
    return {
        "context": context,
        "batch": batch,
        "ms": 1e3 * median(rounds["ours"]),
        "bandwidth floor ms": 1e3 * median(rounds["bandwidth"]),
        "arithmetic floor ms": 1e3 * median(rounds["arithmetic"]),
        "x floor": median(own / floor for own, floor in zip(rounds["ours"], floors, strict=True)),
        "whole / ours": median(w / own for w, own in zip(rounds["whole"], rounds["ours"], strict=True)),
        "GFLOP/s": flops / median(rounds["ours"]) / 1e9,
        "difference": difference,
    }


def _seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call, in about `TURN_S` after one that is not counted."""
    call()
    times = [_time(call)]
    times += [_time(call) for _ in range(min(20, round(TURN_S / max(times[0], 1e-6))))]
    return median(times)


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
