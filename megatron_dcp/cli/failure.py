"""How a command fails: one line from every rank, no rank left behind, exit code 1 (130 after Ctrl-C).

Where the reader of its output has left, as ``head`` does, the rank that writes has no line, and the exit code is 141.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

GRACE_S = 5.0
NOBODY_READS = 128 + signal.SIGPIPE  # as a shell counts it
_PARAMETER = re.compile(r"""(?<![\w./'"-])(?:([a-z_]+)=(?=\S)|([a-z]+(?:_[a-z]+)+)(?![\w'"]|[./]\w))""")  # a=1, a_b


class Terminated(BaseException):
    """The process was asked to end."""

    def __str__(self) -> str:
        return "stopped by SIGTERM before it was done"


def failing_together(
    run: Callable[[], int | None], command: str, *, debug: bool, options: Mapping[str, str] | None = None
) -> int:
    """Call ``run``, which may return an exit code, and turn what it raises into a line on stderr and an exit code.

    Args:
        options: Options of the command by the parameters that they set, for `describe`.
    """
    with _sigterm_raises():
        try:
            code = run() or 0
            print(end="", flush=True)  # not sys.stdout.flush(): there may be no stdout
            return code
        except KeyboardInterrupt:
            _ignore_signals()
            if debug:
                traceback.print_exc()
            sys.stderr.write(f"{rank_prefix()}megatron-dcp {command}: interrupted\n")
            sys.stderr.flush()
            return 130
        except (Exception, Terminated) as error:
            _ignore_signals()
            nobody_reads = isinstance(error, BrokenPipeError) and _nobody_reads()
            _drop_stdout()
            if nobody_reads:
                return NOBODY_READS
            if debug:
                traceback.print_exc()
            sys.stderr.write(f"{rank_prefix()}megatron-dcp {command}: error: {describe(error, options or {})}\n")
            sys.stderr.flush()
            _wait_for_other_ranks()
            return 1


def _nobody_reads() -> bool:
    """Whether stdout is a pipe that its reader has closed."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError):  # there is no stdout, or it is no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _drop_stdout() -> None:
    """Let what stdout still buffers go nowhere if it cannot be written: else the interpreter complains when it ends."""
    try:
        print(end="", flush=True)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def describe(error: BaseException, options: Mapping[str, str]) -> str:
    """An error in one line: what a user can act on as it is, anything else with its type.

    A parameter that an option sets is called by that: ``--tp 3`` for ``tensor_model_parallel_size=3``, ``raise
    --num-blocks`` for ``raise num_blocks``.
    """
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = _PARAMETER.sub(lambda match: _as_option(match, options), " ".join(str(error).split()))
    # By name: an error in the command line is no reason to load torch.
    if isinstance(error, ValueError | Terminated) or type(error).__name__ == "CollectiveError":
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"


def _as_option(match: re.Match[str], options: Mapping[str, str]) -> str:
    with_value, alone = match.groups()
    if (name := with_value or alone) not in options:
        return match[0]
    return options[name] + (" " if with_value else "")


def rank_prefix() -> str:
    """What a line on stderr starts with where several ranks write there: ``"[rank R] "``."""
    world = os.environ.get("WORLD_SIZE", "1")
    return f"[rank {os.environ.get('RANK', '0')}] " if world != "1" else ""


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM raises `Terminated`, a little later: a rank that is about to report what happened shall report that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: Any) -> None:
        raise Terminated

    def soon(*_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, GRACE_S / 2)

    before: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.getsignal(signal.SIGINT),
        signal.SIGTERM: signal.signal(signal.SIGTERM, soon),
        signal.SIGALRM: signal.signal(signal.SIGALRM, terminate),
    }
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """Report undisturbed: torchrun passes an interrupt on to ranks that the terminal has interrupted already."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _wait_for_other_ranks() -> None:
    """Give the other ranks a moment to report the same error: torchrun kills them as soon as one has ended."""
    distributed: Any = sys.modules.get("torch.distributed")  # importing it could fail: perhaps that was interrupted
    if not getattr(distributed, "is_initialized", bool)() or distributed.get_world_size() == 1:
        return
    # A thread, left behind if need be: a store whose host is frozen does not answer, and its calls know no time limit.
    waiting = threading.Thread(target=_count_failed_ranks, daemon=True)
    with _silent_stderr():
        waiting.start()
        waiting.join(GRACE_S + 1.0)  # a little longer than it lasts where the store answers


def _count_failed_ranks() -> None:
    """Add this rank to those that have failed and return when all have, or the time is over."""
    from torch import distributed

    deadline = time.monotonic() + GRACE_S
    with contextlib.suppress(Exception):  # best effort, on a world that may be broken; the error is out already
        store = distributed.distributed_c10d._get_default_store()
        failed = store.add("megatron_dcp/failed", 1)
        while failed < distributed.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.05)
            failed = store.add("megatron_dcp/failed", 0)


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what C++ writes to stderr: a stack of some 15 lines where the host of the store has died."""
    try:
        kept = os.dup(2)
    except OSError:  # closed
        yield
        return
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
