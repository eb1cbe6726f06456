"""``megatron-dcp convert``: write a checkpoint in another format."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator

from megatron_dcp.cli import arguments

FORMATS = ("torch_dist", "legacy", "hf")
EXAMPLE = f"  megatron-dcp convert {arguments.CHECKPOINT} build/quickstart-hf --to hf"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = arguments.new_parser(
        commands,
        "convert",
        "Write a checkpoint in another format.",
        "The format of SRC is found out.\n\n"
        "Weights are copied bit by bit, and tokenizer files go along; optimizer states do not. Runs in one process,\n"
        "one tensor at a time. DST appears only when it is complete.",
        EXAMPLE,
    )
    parser.add_argument(
        "src", type=arguments.path, metavar="SRC", help="torch_dist, fsdp_dtensor, legacy or Hugging Face checkpoint"
    )
    parser.add_argument("dst", type=arguments.path, metavar="DST", help="directory to write; must not exist yet")
    parser.add_argument("--to", required=True, choices=FORMATS, help="format of DST")
    arguments.add_sizes(
        parser.add_argument_group("ranks that --to legacy is for (torch_dist is loaded at any sizes)"),
        ("--tp", "--tensor-model-parallel-size", "N", None, "ranks that split the weights (default 1)"),
        ("--pp", "--pipeline-model-parallel-size", "N", None, "stages that split the layers (default 1)"),
        ("--ep", "--expert-model-parallel-size", "N", None, "ranks that the experts are dealt out over (default 1)"),
        ("--expert-tp", "--expert-tensor-parallel-size", "N", None, "ranks that split one expert (default: as --tp)"),
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        dest="max_shard_bytes",
        metavar="SIZE",
        help="most bytes of a file of --to hf, as 200MB (default 5GB)",
    )
    bridge = parser.add_argument_group("with another converter")
    bridge.add_argument(
        "--via", choices=("bridge",), help="Megatron-Bridge, where it is installed: hf to Megatron or back"
    )
    bridge.add_argument(
        "--hf-model", metavar="NAME", help="the Hugging Face model that SRC comes from; --via bridge --to hf needs it"
    )
    return parser


def run(args: argparse.Namespace) -> None:
    """Convert, in a single process."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("convert runs in one process; start it without torchrun")
    if args.via is None and args.hf_model is not None:
        raise ValueError("--hf-model is for --via bridge; leave it out")
    from megatron_dcp.checkpoint import convert
    from megatron_dcp.checkpoint.bridge import convert_via_bridge

    sizes = {
        "tensor_model_parallel_size": args.tp,
        "pipeline_model_parallel_size": args.pp,
        "expert_model_parallel_size": args.ep,
        "expert_tensor_parallel_size": args.expert_tp,
        "max_shard_bytes": args.max_shard_bytes,
    }
    if args.via == "bridge":
        if given := [name for name, value in sizes.items() if value is not None]:
            option = args.options[given[0]]
            raise ValueError(f"{option} cannot be given to Megatron-Bridge from here; leave it out, or --via bridge")
        path = convert_via_bridge(args.src, args.dst, to=args.to, hf_model=args.hf_model)
    else:
        with _bar(show=sys.stderr.isatty()) as progress:
            path = convert(args.src, args.dst, to=args.to, progress=progress, **sizes)
    print(f"wrote {path} ({args.to})")


def _size(text: str) -> int:
    """The type of an option that takes bytes, as ``5GB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = match and _UNITS.get(match[2].upper().removesuffix("B") + "B" if match[2] else "")
    size = int(float(match[1]) * unit) if match and unit else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no size; give one as 500000000, 500MB, 5GB or 2GiB")
    return size


@contextlib.contextmanager
def _bar(*, show: bool) -> Iterator[Callable[[int, int], object] | None]:
    """Bytes that are done, of all, and the rate, on stderr."""
    if not show:
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc="convert", unit="B", unit_scale=True) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
