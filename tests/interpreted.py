"""A process in which Triton interprets its kernels on the CPU: ``interpreted(fn, *args)`` runs a test's body there.

``TRITON_INTERPRET=1`` must be set before triton is imported and changes it for good, so the kernels' tests have a
process of their own. One serves the whole session; a test is still one test here, with its own name and failure.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

LIMIT_S = 300.0


@cache
def _worker() -> Connection:
    ours, theirs = Pipe()
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), *sys.path]))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore:divide by zero:RuntimeWarning", __file__, str(theirs.fileno())],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()

    def stop() -> None:
        ours.close()  # it ends when it reads nothing more
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()

    atexit.register(stop)
    return ours


def interpreted(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` of a test module in that process; its traceback is the error here."""
    worker = _worker()
    try:
        worker.send((fn.__module__, fn.__qualname__, pickle.dumps(args)))
        assert worker.poll(LIMIT_S), f"{fn.__name__} took more than {LIMIT_S} s"
        failed, answer = worker.recv()
    except BaseException as error:
        _worker.cache_clear()  # the next test gets a fresh one
        worker.close()
        if isinstance(error, EOFError | OSError):
            raise AssertionError(f"the interpreting process died in {fn.__name__}") from error
        raise
    assert not failed, answer
    return answer


def _serve(connection: Connection) -> None:
    while True:
        try:
            module, name, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, getattr(importlib.import_module(module), name)(*pickle.loads(args))))
        except Exception:
            connection.send((True, traceback.format_exc()))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
