"""``megatron-dcp profile``: where the time of a run goes, and what to change."""

from __future__ import annotations

import argparse
import json
import os
import random
from typing import TYPE_CHECKING

from megatron_dcp.cli import arguments
from megatron_dcp.cli.jsonl import FORM, read_prompts

if TYPE_CHECKING:
    from megatron_dcp.engine.prompts import Prompt
    from megatron_dcp.profiling.report import ProfileReport

EXAMPLE = f"""\
  torchrun --nproc-per-node 2 -m megatron_dcp profile --checkpoint {arguments.CHECKPOINT} --dcp 2 \\
      --prompt-tokens 1000 --batch 4 --max-new-tokens 32 --html profile.html"""


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = arguments.new_parser(
        commands,
        "profile",
        "Run a workload and report where its time goes, with advice.",
        "Start it with torchrun where --tp, --pp and --dcp take more than one process.\n\n"
        "Generates greedily, without end-of-text tokens: once to warm up, once by the clock. Reports for prefill and\n"
        "decode, and for every kind of layer, the time in attention, communication, matrix products and the rest, the\n"
        "slowest rank, and the KV cache over time. Times of a GPU are those of its own clock.",
        EXAMPLE,
    )
    arguments.add_model_arguments(parser)
    work = parser.add_argument_group("workload")
    prompt = work.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt-file", type=arguments.path, metavar="F.jsonl", help=f"prompts, a line for each: {FORM}"
    )
    prompt.add_argument(
        "--prompt-tokens", type=arguments.whole(1), metavar="N", help="prompts of so many random tokens, see --batch"
    )
    arguments.add_sizes(
        work,
        ("--batch", None, "B", None, "prompts of --prompt-tokens; they share nothing (default 1)"),
        ("--max-new-tokens", None, "N", 32, "tokens to generate after each prompt"),
    )
    outcome = parser.add_argument_group("outcome")
    outcome.add_argument(
        "--html", type=arguments.path, metavar="F.html", help="a page with the timeline of every rank, readable offline"
    )
    outcome.add_argument(
        "--trace",
        type=arguments.path,
        metavar="F.json",
        help="Chrome trace of a short run more by torch.profiler; with several ranks F.rank0.json and so on",
    )
    outcome.add_argument("--json", type=arguments.path, metavar="F.json", help="write all numbers")
    arguments.add_parallel_arguments(parser)
    arguments.add_cache_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Profile on every rank; the first one prints and writes."""
    cache, engine = arguments.cache_config(args), arguments.engine_config(args)
    arguments.check_world(args, int(os.environ.get("WORLD_SIZE", "1")))

    from torch import distributed

    from megatron_dcp import parallel_state
    from megatron_dcp.distributed import initialize_distributed
    from megatron_dcp.engine.loading import on_all_ranks
    from megatron_dcp.profiling.run import profile

    existed = distributed.is_initialized()
    initialize_distributed(args.timeout)
    prompts = on_all_ranks(_check, args)
    report = profile(
        args.checkpoint,
        prompts,
        max_new_tokens=args.max_new_tokens,
        trace=args.trace,
        **arguments.parallel_sizes(args),
        cache=cache,
        engine=engine,
        dtype=args.dtype,
    )
    on_all_ranks(lambda: _write(report, args) if distributed.get_rank() == 0 else None)
    if not existed:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def _check(args: argparse.Namespace) -> list[Prompt]:
    """The prompts. ``ValueError`` for them, or for an output that could not be written at the end."""
    for name in ("html", "trace", "json"):
        if (path := getattr(args, name)) is not None:
            arguments.check_output(f"--{name}", path)
    if args.prompt_file is not None:
        if args.batch is not None:
            raise ValueError("--batch is the number of prompts of --prompt-tokens; --prompt-file has its own number")
        return read_prompts(args.prompt_file)
    from megatron_dcp.checkpoint.load import read_config

    rng, vocab_size = random.Random(0), read_config(args.checkpoint).vocab_size
    return [[rng.randrange(vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.batch or 1)]


def _write(report: ProfileReport, args: argparse.Namespace) -> None:
    print(report, flush=True)
    if args.json is not None:
        arguments.write_output("--json", args.json, json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n")
    if args.html is not None:
        from megatron_dcp.profiling.page import page

        arguments.write_output("--html", args.html, page(report))
