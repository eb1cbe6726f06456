"""``megatron-dcp convert``: write a checkpoint in another format."""

from __future__ import annotations

import argparse
import os
import sys

from megatron_dcp.cli import arguments

FORMATS = ("torch_dist", "legacy", "hf")
CLEAR_LINE = "\r\x1b[K"
EXAMPLE = f"  megatron-dcp convert {arguments.CHECKPOINT} build/quickstart-hf --to hf"


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = arguments.new_parser(
        commands,
        "convert",
        "Write a checkpoint in another format.",
        "The format of SRC is found out.\n\n"
        "Weights are copied bit by bit, and tokenizer files go along. Runs in one process. DST appears only when it\n"
        "is complete.",
        EXAMPLE,
    )
    parser.add_argument("src", type=arguments.path, metavar="SRC", help="torch_dist, legacy or Hugging Face checkpoint")
    parser.add_argument("dst", type=arguments.path, metavar="DST", help="directory to write; must not exist yet")
    parser.add_argument("--to", required=True, choices=FORMATS, help="format of DST")
    return parser


def run(args: argparse.Namespace) -> None:
    """Convert, in a single process."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("convert runs in one process; start it without torchrun")
    from megatron_dcp.checkpoint import convert

    live = sys.stderr.isatty()
    path = convert(args.src, args.dst, to=args.to, progress=_show if live else None)
    print(f"{CLEAR_LINE if live else ''}wrote {path} ({args.to})")


def _show(tensor: str) -> None:
    print(f"{CLEAR_LINE}{tensor}", end="", file=sys.stderr, flush=True)
