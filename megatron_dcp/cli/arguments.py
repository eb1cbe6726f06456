"""Options that commands share, and the values that they take."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_args

from megatron_dcp.cli.failure import rank_prefix
from megatron_dcp.config import (
    BackendName,
    CacheConfig,
    CudaGraphs,
    DcpLayout,
    EngineConfig,
    ExchangeName,
    KVCacheDtype,
    ParallelConfig,
    PrefillName,
)
from megatron_dcp.model_config import ModelConfig

CHECKPOINT = "examples/quickstart/checkpoint"  # the one that the examples in --help use


LARGEST = 2**31 - 1  # of what counts something; sizes in bytes and seeds may have 63 bits
LARGEST_LONG = 2**63 - 1
LONGEST_WAIT_S = 30 * 86400


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line where several ranks say it, and with the usage where one does."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        if rank := rank_prefix():
            self.exit(2, f"{rank}{self.prog}: error: {' '.join(message.split())} (see --help)\n")
        super().error(message)


def path(text: str) -> str:
    """The type of an option that takes the name of a file or directory."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; give the name of a file or directory")
    return text


def check_output(option: str, path: str) -> None:
    """Raise ``ValueError`` unless a file of this name could be written, before what it is to hold is computed."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise ValueError(f"{option} {path} is a directory; give the name of a file")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written: make the folder {folder!r} first, or choose another")


def write_output(option: str, path: str, text: str) -> None:
    """Write a file; ``ValueError`` that names it if that fails, say because the disk is full."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}; choose another place") from error


def whole(at_least: int, at_most: int = LARGEST) -> Callable[[str], int]:
    """The type of an option that takes a whole number from ``at_least`` to ``at_most``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number that can be read") from None
        if value < at_least:
            raise argparse.ArgumentTypeError(f"{text[:40]} is below {at_least}")
        if value > at_most:
            raise argparse.ArgumentTypeError(f"{text[:40]} is above {at_most}")
        return value

    return parse


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """The type of an option that takes a finite number from ``low`` (or ``above`` it) to ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(value) or value < low or (above and value == low) or value > high:
            bounds = f"{'above' if above else 'at least'} {low:g}" + (
                f", at most {high:.10g}" if high < math.inf else ""
            )
            raise argparse.ArgumentTypeError(f"{text} must be {bounds}")
        return value

    return parse


def new_parser(
    commands: argparse._SubParsersAction, name: str, summary: str, details: str, example: str
) -> argparse.ArgumentParser:
    """A command's parser with its example in ``--help``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary} {details}".strip(),
        epilog=f"example (from the root of the repository):\n\n{example}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def parameter_of(option: str) -> str:
    """The name of an option's value in the namespace."""
    return option.removeprefix("--").replace("-", "_")


def options_of_parameters(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The options of a command by the parameters that they set, as ``tensor_model_parallel_size``: ``--tp``.

    Without what describes a model, as files do too, and without a dtype, of which there are several.
    """
    names = {
        parameter_of(name): action.option_strings[0]
        for action in parser._actions
        if action.option_strings and action.nargs != 0
        for name in (*action.option_strings, action.dest)
    }
    others = {"dtype", *(field.name for field in fields(ModelConfig))}
    return {name: option for name, option in names.items() if name not in others}


def add_sizes(group: argparse._ActionsContainer, *options: tuple[str, str | None, str, int | None, str]) -> None:
    """Options that take a whole number from 1: ``(name, long name, metavar, default, help)`` of each."""
    for name, long_name, metavar, default, text in options:
        group.add_argument(
            name,
            *([long_name] if long_name else []),
            dest=parameter_of(name),
            type=whole(1),
            default=default,
            metavar=metavar,
            help=text if default is None else f"{text} (default %(default)s)",
        )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """``--checkpoint`` and ``--dtype``."""
    parser.add_argument(
        "--checkpoint",
        type=path,
        required=True,
        metavar="DIR",
        help="torch_dist, legacy or Hugging Face checkpoint",
    )
    add_dtype_argument(parser)


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    """``--dtype``."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights, and of the cache unless --kv-cache-dtype says otherwise (default float32)",
    )


def add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    """``--tp``, ``--pp``, ``--dcp``, ``--dcp-layout``, ``--ep``, ``--expert-tp``, ``--exchange``, ``--timeout``."""
    group = parser.add_argument_group("parallelism")
    add_sizes(
        group,
        ("--tp", "--tensor-model-parallel-size", "N", 1, "ranks that split the weights"),
        ("--pp", "--pipeline-model-parallel-size", "N", 1, "stages that split the layers, computing one by one"),
        ("--dcp", "--decode-context-parallel-size", "N", 1, "ranks that split the KV cache of every sequence"),
        ("--ep", "--expert-model-parallel-size", "N", 1, "ranks that the experts of a model are dealt out over"),
        ("--expert-tp", "--expert-tensor-parallel-size", "N", None, "ranks that split one expert (default: as --tp)"),
    )
    group.add_argument(
        "--dcp-layout",
        choices=get_args(DcpLayout),
        default="orthogonal",
        help="orthogonal: tp x dcp ranks a stage (default); within_tp: the dcp ranks are part of the tp ranks",
    )
    group.add_argument(
        "--exchange",
        choices=get_args(ExchangeName),
        help="how partial attention is merged (default: fold for orthogonal, a2a for within_tp)",
    )
    group.add_argument(
        "--timeout",
        type=number(0, LONGEST_WAIT_S, above=True),
        default=600.0,
        metavar="S",
        help="seconds to wait for another rank before giving up (default 600)",
    )


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """How the cache is cut and reused, the sizes of pool and batch, and how a step is computed."""
    group = parser.add_argument_group("KV cache and batch")
    cache, engine = CacheConfig(), EngineConfig()
    interleave = "consecutive tokens on one dcp rank; divides the block size"
    add_sizes(
        group,
        ("--kv-interleave", "--kv-interleave-size", "I", cache.kv_interleave_size, interleave),
        ("--block-size", None, "B", cache.block_size, "tokens of a block on one rank"),
        ("--max-num-seqs", None, "N", engine.max_num_seqs, "sequences that decode at the same time"),
        ("--prefill-chunk-size", None, "N", engine.prefill_chunk_size, "most prompt tokens of one step"),
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=get_args(KVCacheDtype),
        default=cache.kv_cache_dtype,
        help="what keys and values are stored in (default auto: the model's dtype); fp8_e4m3 and int8 are not exact",
    )
    group.add_argument(
        "--prefill",
        choices=get_args(PrefillName),
        default=engine.prefill,
        help="how the dcp ranks share a prompt's tokens (default auto: dealt out; keys or queries travel, by bytes)",
    )
    group.add_argument(
        "--num-draft-tokens",
        type=whole(0),
        default=engine.num_draft_tokens,
        metavar="N",
        help="tokens to propose per step from earlier text; the output stays the same (default 0: none)",
    )
    group.add_argument(
        "--backend",
        choices=get_args(BackendName),
        default=engine.backend,
        help="attention back end (default auto: the best that can; `megatron-dcp env` shows them)",
    )
    group.add_argument(
        "--cuda-graphs",
        choices=get_args(CudaGraphs),
        default=engine.cuda_graphs,
        help="capture decode steps on a GPU: full, or piecewise with the exchanges left out (default none)",
    )
    group.add_argument(
        "--symmetric-memory",
        action="store_true",
        help="let small exchanges between the GPUs of one machine go by memory that they have all mapped, not by NCCL",
    )
    group.add_argument("--no-prefix-caching", action="store_true", help="compute known prefixes of prompts again")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--num-blocks", type=whole(1), metavar="N", help="blocks of the pool on every rank")
    size.add_argument(
        "--bytes-per-rank", type=whole(1, LARGEST_LONG), metavar="N", help="most bytes of the pool on every rank"
    )


def cache_config(args: argparse.Namespace) -> CacheConfig:
    """The cache that the options ask for."""
    return CacheConfig(
        block_size=args.block_size,
        kv_interleave_size=args.kv_interleave,
        num_blocks=args.num_blocks,
        bytes_per_rank=args.bytes_per_rank,
        kv_cache_dtype=args.kv_cache_dtype,
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine that the options ask for; ``ValueError`` if exchange and layout do not fit."""
    config = EngineConfig(
        max_num_seqs=args.max_num_seqs,
        prefill_chunk_size=args.prefill_chunk_size,
        exchange=args.exchange,
        prefill=args.prefill,
        num_draft_tokens=args.num_draft_tokens,
        prefix_caching=not args.no_prefix_caching,
        backend=args.backend,
        cuda_graphs=args.cuda_graphs,
        symmetric_memory=args.symmetric_memory,
    )
    config.exchange_for(args.dcp_layout)
    return config


def parallel_sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of a `ParallelConfig`, which `LLM` takes too, from the options of `add_parallel_arguments`."""
    return dict(
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        decode_context_parallel_size=args.dcp,
        dcp_layout=args.dcp_layout,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=args.expert_tp,
    )


def check_world(args: argparse.Namespace, world: int) -> None:
    """Raise ``ValueError`` unless as many processes run as the sizes take, or several times as many: replicas."""
    parallel = ParallelConfig(**parallel_sizes(args))
    if world % parallel.ranks:
        sizes = f"--tp {args.tp}" + (
            f" x --dcp {args.dcp}" if args.dcp_layout == "orthogonal" else " (--dcp within it)"
        )
        sizes += f" x --pp {args.pp}" if args.pp > 1 else ""
        raise ValueError(
            f"{sizes} takes {parallel.ranks} process{'es' if parallel.ranks > 1 else ''}, but {world} "
            f"{'were' if world > 1 else 'was'} started; start them with `torchrun --nproc-per-node {parallel.ranks} -m "
            f"megatron_dcp {args.command} ...`, or several times as many for replicas, or change --tp, --pp and --dcp"
        )
    parallel.check_world_size(world)
