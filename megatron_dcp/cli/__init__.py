"""The command line: ``megatron-dcp COMMAND`` or ``python -m megatron_dcp COMMAND``, under torchrun where it computes.

Exit codes: 0, 1 for an error (one line on stderr from every rank) or a ``verify`` that found a difference, 2 for a
command line that is not understood, 130 after Ctrl-C, 141 if nobody reads stdout any more.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_dcp.cli import arguments, convert, env, generate, plan, profile, verify
from megatron_dcp.cli.failure import failing_together

COMMANDS = (generate, verify, profile, plan, convert, env)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. ``parse_args`` gives a namespace with ``command`` and ``run``."""
    from megatron_dcp import __version__

    parser = arguments.Parser(
        prog="megatron-dcp",
        description="Decode context parallelism for Megatron-Core: long contexts, the KV cache sharded over ranks.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron-dcp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = command.add_parser(commands)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error, and library warnings")
        sub.set_defaults(run=command.run, options=arguments.options_of_parameters(sub))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Wrong usage raises ``SystemExit(2)``, as ``argparse`` does."""
    args = build_parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    with warnings.catch_warnings():
        if not args.debug:
            warnings.simplefilter("ignore")  # optional packages that Megatron-Core misses, on every rank
        with _startup_on_stderr():
            return failing_together(lambda: args.run(args), args.command, debug=args.debug, options=args.options)


@contextmanager
def _startup_on_stderr() -> Iterator[None]:
    """Show what a run says once about itself (`megatron_dcp.engine.startup`)."""
    logger, handler = logging.getLogger("megatron_dcp.startup"), logging.StreamHandler(sys.stderr)
    level, logger.propagate = logger.level, False
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True
