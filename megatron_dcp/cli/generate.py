"""``megatron-dcp generate``: continue prompts with the model of a checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from megatron_dcp.cli import arguments, replicas
from megatron_dcp.cli.jsonl import FORM, OutputFile, read_prompts, to_line
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.request import RequestOutput

if TYPE_CHECKING:
    from megatron_dcp.engine.llm import LLM
    from megatron_dcp.engine.prompts import Prompt

EXAMPLE = f"""\
  torchrun --nproc-per-node 4 -m megatron_dcp generate --checkpoint {arguments.CHECKPOINT} \\
      --tp 2 --dcp 2 --prompt "The harbour was" --max-new-tokens 16"""


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = arguments.new_parser(
        commands,
        "generate",
        "Continue prompts with the model of a checkpoint.",
        "Start it with torchrun where --tp, --pp and --dcp take more than one process. On a multiple of\n"
        "these, that many replicas of the model share out the prompts.\n\n"
        'Writes a line {"index", "prompt_token_ids", "token_ids", "text", "finish_reason", "logprobs"} for every\n'
        "prompt, in their order, to --output or to stdout. On a terminal, the text after --prompt is shown as it\n"
        "comes instead.",
        EXAMPLE,
    )
    arguments.add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="one prompt")
    prompt.add_argument(
        "--prompt-file", type=arguments.path, metavar="F.jsonl", help=f"prompts, a line for each: {FORM}"
    )
    parser.add_argument(
        "--output", type=arguments.path, metavar="F.jsonl", help="where the outputs go (default: stdout)"
    )
    arguments.add_parallel_arguments(parser)
    arguments.add_cache_arguments(parser)
    _add_sampling_arguments(parser)
    return parser


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    default = SamplingParams()
    group.add_argument(
        "--max-new-tokens",
        dest="max_tokens",
        type=arguments.whole(1),
        default=default.max_tokens,
        metavar="N",
        help="most tokens to generate for a prompt (default %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=arguments.number(0),
        default=default.temperature,
        metavar="T",
        help="0 takes the most likely token (default)",
    )
    group.add_argument(
        "--top-k",
        type=arguments.whole(0),
        default=default.top_k,
        metavar="K",
        help="draw only from the K most likely tokens (default 0: from all)",
    )
    group.add_argument(
        "--top-p",
        type=arguments.number(0, 1, above=True),
        default=default.top_p,
        metavar="P",
        help="draw only from the most likely tokens that together reach probability P (default 1)",
    )
    group.add_argument(
        "--min-p",
        type=arguments.number(0, 1),
        default=default.min_p,
        metavar="P",
        help="draw only from tokens at least P times as likely as the most likely one (default 0: from all)",
    )
    for name, what in (
        ("repetition", "divides the logits of tokens of prompt and output (default 1)"),
        ("presence", "taken from the logits of tokens of the output (default 0)"),
        ("frequency", "taken from them as often as they are there (default 0)"),
    ):
        group.add_argument(
            f"--{name}-penalty", type=float, default=getattr(default, f"{name}_penalty"), metavar="X", help=what
        )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end at this text, which is left out; may be given several times",
    )
    group.add_argument(
        "--seed",
        type=arguments.whole(0, arguments.LARGEST_LONG),
        metavar="S",
        help="seed of every prompt's draws (default: a new one each time)",
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not end at an end-of-text token")
    group.add_argument(
        "--logprobs",
        action="store_true",
        help="add the log-probability of every token before temperature, top-k, top-p",
    )


def run(args: argparse.Namespace) -> None:
    """Generate on every rank; the first one prints or writes."""
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
    )
    cache, engine = arguments.cache_config(args), arguments.engine_config(args)
    arguments.check_world(args, int(os.environ.get("WORLD_SIZE", "1")))

    from torch import distributed

    from megatron_dcp import parallel_state
    from megatron_dcp.distributed import initialize_distributed
    from megatron_dcp.engine.llm import LLM
    from megatron_dcp.engine.loading import on_all_ranks

    existed = distributed.is_initialized()
    initialize_distributed(args.timeout)
    prompts = on_all_ranks(_prompts, args)
    first = distributed.get_rank() == 0
    with ExitStack() as stack:
        output = on_all_ranks(lambda: OutputFile(args.output) if args.output is not None and first else None)
        if output is not None:
            stack.enter_context(output)
        llm = LLM(
            args.checkpoint,
            **arguments.parallel_sizes(args),
            cache=cache,
            engine=engine,
            dtype=args.dtype,
        )
        live = args.prompt is not None and args.output is None and sys.stdout.isatty() and llm.tokenizer is not None
        outputs = _generate(llm, prompts, params, show=first and live)
        on_all_ranks(_write, outputs if first else [], output, live)
    if not existed:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    return [args.prompt] if args.prompt is not None else read_prompts(args.prompt_file)


def _generate(llm: LLM, prompts: list[Prompt], params: SamplingParams, *, show: bool) -> list[RequestOutput]:
    if not show:
        return replicas.generate(llm, prompts, params, progress=len(prompts) > 1 and sys.stderr.isatty())
    outputs = replicas.generate(
        llm, prompts, params, on_token=lambda index, token, text: print(text, end="", flush=True)
    )
    print()
    return outputs


def _write(outputs: list[RequestOutput], output: OutputFile | None, live: bool) -> None:
    if output is not None:
        output.finish(outputs)
    elif not live:
        ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        lines = [to_line(line, ascii_only=ascii_only) for line in outputs]
        try:
            sys.stdout.writelines(lines)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ValueError(
                f"stdout cannot be written: {error.strerror}; send it to where there is room, or use --output"
            ) from error
