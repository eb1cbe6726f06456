"""``bench.py convert``: how fast checkpoints are converted, against a plain copy of the files, and in how much memory.

What is measured
    A random Llama, in bf16. Every round copies its files (one buffer after the other, through the page cache), then
    converts it to each Megatron format and back, so that all see the same weather. All files written are synced to
    the disk before the clock stops. GB/s are bytes of the model's tensors per second; medians over rounds.

    Memory is what the process holds at its worst moment (VmHWM, reset before each conversion) beyond what it held
    before, against the largest tensor. Mapped pages of the source count; Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_dcp.checkpoint import convert, open_source
from megatron_dcp.checkpoint.files import Location
from megatron_dcp.checkpoint.hf_config import config_from_hf
from megatron_dcp.checkpoint.hf_write import write_hf
from megatron_dcp.checkpoint.source import Source

COPY = "plain copy"


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="GB/s and peak memory of converting checkpoints, against a plain copy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16000)
    parser.add_argument("--max-shard-bytes", type=int, default=5 * 10**8)
    parser.add_argument("--tp", type=int, default=2, help="of the legacy checkpoint")
    parser.add_argument("--pp", type=int, default=2, help="of the legacy checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    parser.set_defaults(run=run)


class _Random(Source):
    """Random weights that are made when they are read."""

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def _read(self, name: str) -> torch.Tensor:
        return torch.randn(self.specs[name].shape).bfloat16()


def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        original = Path(directory) / "original"
        _make(original, arguments)
        source = open_source(original)
        sizes = {name: prod(spec.shape) * 2 for name, spec in source.specs.items()}
        runs = _rounds(original, Path(directory), arguments)
    total, largest = sum(sizes.values()), max(sizes.values())
    copy_s = median(seconds for seconds, _ in runs[COPY])
    rows = []
    for name, measured in runs.items():
        seconds, peak = median(seconds for seconds, _ in measured), max(peak for _, peak in measured)
        rows.append(
            {
                "name": name,
                "gb_per_s": total / seconds / 1e9,
                "time_to_copy": seconds / copy_s,
                "peak_bytes": peak,
                "peak_to_largest": peak / largest,
            }
        )
    print(f"{total / 1e9:.2f} GB in {len(sizes)} tensors, the largest {largest / 1e6:.0f} MB")
    print(f"{'':24}  {'GB/s':>6}  {'time/copy':>9}  {'peak MB':>8}  {'peak/largest':>12}")
    for row in rows:
        print(
            f"{row['name']:24}  {row['gb_per_s']:>6.2f}  {row['time_to_copy']:>9.2f}  {row['peak_bytes'] / 1e6:>8.0f}  "
            f"{row['peak_to_largest']:>12.2f}"
        )
    setting = {name: value for name, value in vars(arguments).items() if name not in ("run", "command", "directory")}
    setting |= {"torch": torch.__version__, "machine": platform.machine(), "bytes": total, "largest_tensor": largest}
    print(json.dumps({"benchmark": "convert", "setting": setting, "rows": rows}))


def _make(directory: Path, arguments: argparse.Namespace) -> None:
    values = {
        "model_type": "llama",
        "vocab_size": arguments.vocab,
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.ffn,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    config, _ = config_from_hf(values, "the benchmark's model")
    directory.mkdir()
    location = Location(format="hf", root=directory, data=directory)
    write_hf(_Random(location, config, values), directory, max_shard_bytes=arguments.max_shard_bytes)
    _sync(directory)


def _rounds(original: Path, directory: Path, arguments: argparse.Namespace) -> dict[str, list[tuple[float, int]]]:
    """Seconds and peak bytes of every conversion in every round, by its name; one round before that is not counted."""
    sizes = {"tensor_model_parallel_size": arguments.tp, "pipeline_model_parallel_size": arguments.pp}
    dist, legacy, back = (directory / name for name in ("dist", "legacy", "back"))
    legacy_name = f"legacy tp {arguments.tp} pp {arguments.pp}"

    def to_hf(src: Path) -> Path:
        return convert(src, back, to="hf", max_shard_bytes=arguments.max_shard_bytes)

    steps: list[tuple[str, Path, Callable[[], object]]] = [
        (COPY, back, lambda: shutil.copytree(original, back)),
        ("hf to torch_dist", dist, lambda: convert(original, dist)),
        ("torch_dist to hf", back, lambda: to_hf(dist)),
        (f"hf to {legacy_name}", legacy, lambda: convert(original, legacy, to="legacy", **sizes)),
        (f"{legacy_name} to hf", back, lambda: to_hf(legacy)),
    ]
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name, _, _ in steps}
    for number in range(arguments.repeats + 1):
        for name, path, step in steps:
            measured = _measure(path, step)
            if number:
                runs[name].append(measured)
            if path == back:
                shutil.rmtree(back)
        shutil.rmtree(dist)
        shutil.rmtree(legacy)
    return runs


def _measure(path: Path, step: Callable[[], object]) -> tuple[float, int]:
    before = _reset_peak()
    start = time.perf_counter()
    step()
    _sync(path)
    return time.perf_counter() - start, _status("VmHWM") - before


def _reset_peak() -> int:
    """Forget the process's peak; returns what it holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _sync(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
