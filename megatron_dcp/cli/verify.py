"""``megatron-dcp verify``: whether training and generation compute the same, before a deployment is trusted."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dcp.cli import arguments

if TYPE_CHECKING:
    from megatron_dcp.engine.prompts import Prompt
    from megatron_dcp.verification import VerifyReport

EXAMPLE = f"""\
  torchrun --nproc-per-node 4 -m megatron_dcp verify {arguments.CHECKPOINT} --tp 2 --dcp 2 \\
      --prompt-file examples/quickstart/haystack.txt"""


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = arguments.new_parser(
        commands,
        "verify",
        "Compare training forward, prefill and decode of a checkpoint.",
        "Start it with torchrun where --tp, --pp and --dcp take more than one process.\n\n"
        "Continues the prompt greedily, then runs the whole text through Megatron's own forward, through prefill in\n"
        "chunks and token by token through decode, and compares log-probabilities, logits and the hidden states after\n"
        "every layer. Exit code 1 if a log-probability differs by more than --max-logprob-diff.",
        EXAMPLE,
    )
    parser.add_argument(
        "checkpoint", type=arguments.path, metavar="CHECKPOINT", help="torch_dist, legacy or Hugging Face checkpoint"
    )
    parser.add_argument(
        "--hf",
        type=arguments.path,
        metavar="DIR",
        help="the checkpoint's Hugging Face twin; transformers runs it in float32 on rank 0",
    )
    arguments.add_dtype_argument(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to compare on (default: a short one)")
    prompt.add_argument("--prompt-file", type=arguments.path, metavar="FILE", help="a file with that text")
    prompt.add_argument("--token-ids", type=_token_ids, metavar="1,2,3", help="token ids instead of text")
    arguments.add_sizes(
        parser.add_argument_group("size"),
        ("--max-new-tokens", None, "N", 32, "tokens to generate after the prompt"),
        ("--decode-tokens", None, "N", 128, "so many of the text's last tokens are decoded one by one"),
    )
    outcome = parser.add_argument_group("outcome")
    outcome.add_argument(
        "--max-logprob-diff",
        type=arguments.number(0),
        metavar="X",
        help="largest difference of a token's log-probability that passes (default: by dtype)",
    )
    outcome.add_argument(
        "--plot", type=arguments.path, metavar="F.png", help="draw the difference at every token; also .svg, .pdf"
    )
    outcome.add_argument("--json", type=arguments.path, metavar="F.json", help="write all numbers")
    arguments.add_parallel_arguments(parser)
    arguments.add_cache_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Verify on every rank; the first one prints and writes. The exit code."""
    cache, engine = arguments.cache_config(args), arguments.engine_config(args)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    arguments.check_world(args, world)
    ranks = args.pp * args.tp * (args.dcp if args.dcp_layout == "orthogonal" else 1)
    if world > ranks:
        raise ValueError(
            f"verify runs one replica, of {ranks} process{'es' if ranks > 1 else ''} here, but {world} were started"
        )

    from torch import distributed

    from megatron_dcp import parallel_state
    from megatron_dcp.distributed import initialize_distributed
    from megatron_dcp.engine.loading import on_all_ranks
    from megatron_dcp.verification import verify

    existed = distributed.is_initialized()
    initialize_distributed(args.timeout)
    prompt = on_all_ranks(_check, args)
    report = verify(
        args.checkpoint,
        hf=args.hf,
        prompt=prompt,
        max_new_tokens=args.max_new_tokens,
        decode_tokens=args.decode_tokens,
        max_logprob_diff=args.max_logprob_diff,
        **arguments.parallel_sizes(args),
        cache=cache,
        engine=engine,
        dtype=args.dtype,
    )
    # Also holds every rank until the first has printed: torchrun ends all once one has left with exit code 1.
    on_all_ranks(lambda: _write(report, args) if distributed.get_rank() == 0 else None)
    if not existed:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()
    return 0 if report.passed else 1


def _check(args: argparse.Namespace) -> Prompt | None:
    """The prompt. ``ValueError`` for it, or for an output that could not be written at the end."""
    if args.plot is not None:
        from megatron_dcp.figures import check_plot

        check_plot(args.plot)
    if args.json is not None and not os.path.isdir(os.path.dirname(args.json) or "."):
        raise ValueError(f"{os.path.dirname(args.json)!r} is no directory; make it first")
    if args.prompt_file is None:
        prompt: Prompt | None = args.prompt if args.prompt is not None else args.token_ids
        return prompt
    try:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.prompt_file} is no UTF-8 text: {error.reason} at byte {error.start}") from error


def _write(report: VerifyReport, args: argparse.Namespace) -> None:
    print(report, flush=True)
    if args.json is not None:
        arguments.write_output("--json", args.json, json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n")
    if args.plot is not None:
        from megatron_dcp.verification.plot import plot

        plot(report, args.plot)


def _token_ids(text: str) -> list[int]:
    whole = arguments.whole(0)
    return [whole(each) for each in text.replace(",", " ").split()]
