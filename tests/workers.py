"""Persistent gloo worker processes for distributed tests: ``run_on_ranks(world, fn, *args) -> [result per rank]``.

Importing torch and Megatron takes seconds per process, so one set of workers serves the whole test session. A case is a
module-level function of a test module, called as ``fn(rank, world, *args)`` on every rank, with ``torch.distributed``
initialised for just that case. A case that takes too long, or a worker that dies, costs the set: it is killed, and the
next case starts a fresh one. Importing this module imports no torch.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, cast

from worker_process import Call, Failure, Function

MAX_WORLD = 8
START_LIMIT_S = 300.0  # starting a worker, and importing a test module in it, count on no case's time
GRACE_S = 15.0  # how long the other ranks may still take once one has failed
TAIL_LINES = 40


class WorkerDied(RuntimeError):
    """A worker process ended in the middle of a case."""


class WorkerTimeout(RuntimeError):
    """A case did not end on every rank within its time."""


def run_on_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, expect_errors: bool = False
) -> list[Any]:
    """Run ``fn(rank, world, *args)`` on every rank of a new gloo group and return the results in rank order.

    Args:
        world: Number of ranks, 1 to 8.
        fn: A module-level function; found in the workers by its file and name.
        args: Picklable arguments, the same for every rank.
        timeout: Seconds for the case, imports of ``fn``'s module not counted; also the time limit of each collective.
        expect_errors: Return exceptions in the place of results (``WorkerDied`` for a rank that died) and raise none
            but ``WorkerTimeout``.

    Raises:
        The first exception that a rank raised, with rank and remote traceback as a note; ``WorkerDied``;
        ``WorkerTimeout`` with the stack and the last lines of stderr of every rank that did not end.
    """
    if not 1 <= world <= MAX_WORLD:
        raise ValueError(f"world={world} is outside 1 to {MAX_WORLD}")
    module = sys.modules[fn.__module__]
    if "<locals>" in fn.__qualname__ or not getattr(module, "__file__", None):
        raise ValueError(
            f"{fn.__qualname__} is not a module-level function of a file; define it at a module's top level"
        )
    function = Function(str(Path(str(module.__file__)).resolve()), fn.__module__, fn.__qualname__)
    try:
        return _pool.run(world, function, pickle.dumps(args), timeout, expect_errors)
    except BaseException:
        # Also on Ctrl-C: workers that are still busy with this case would answer the next one with its results.
        if _pool.busy:
            _pool.close()
        raise


def close() -> None:
    """End all workers. The next case starts new ones."""
    _pool.close()


class _Worker:
    def __init__(self, rank: int, folder: Path) -> None:
        self.log = folder / f"rank{rank}.log"
        self.conn, theirs = Pipe()
        paths = [str(Path(__file__).parent), *(path or os.getcwd() for path in sys.path)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # these are tests of gloo on CPUs, also on a machine with GPUs
        }
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works where the host's name does not resolve
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "import worker_process; worker_process.main()", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for pytest alone; kill() also ends what the worker has started
            )
        theirs.close()

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.conn.close()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


class _Pool:
    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.folder: Path | None = None
        self.cases = itertools.count()
        self.busy = False

    def run(self, world: int, function: Function, args: bytes, timeout: float, expect_errors: bool) -> list[Any]:
        self.busy = True
        self._start(world)
        self._ask([("load", function)] * world, START_LIMIT_S)
        store = f"{self.folder}/store{next(self.cases)}"
        calls = [("call", Call(function, rank, world, args, store, timeout)) for rank in range(world)]
        results = self._ask(calls, timeout, expect_errors=expect_errors)
        if any(isinstance(result, WorkerDied) for result in results):
            self.close()
        else:
            # Only now: a rank that left early would break the last collective of a slower one.
            self._ask([("clean", None)] * world, START_LIMIT_S)
            Path(store).unlink(missing_ok=True)
        self.busy = False
        return results

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = []
        self.busy = False
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _start(self, world: int) -> None:
        if any(worker.process.poll() is not None for worker in self.workers):
            self.close()
            self.busy = True
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="gloo-workers-"))
        new = range(len(self.workers), world)
        self.workers += [_Worker(rank, self.folder) for rank in new]

    def _ask(self, requests: list[tuple[str, Any]], limit_s: float, expect_errors: bool = False) -> list[Any]:
        """Send one request to each rank; return what they answer, in rank order, or raise."""
        rank_of = {self.workers[rank].conn: rank for rank in range(len(requests))}
        for (conn, _), request in zip(rank_of.items(), requests, strict=True):
            try:
                conn.send_bytes(pickle.dumps(request))
            except OSError:
                pass  # it has died; seen below
        answers: dict[int, Any] = {}  # in the order of arrival
        deadline = time.monotonic() + limit_s
        while rank_of and (left := deadline - time.monotonic()) > 0:
            for conn in cast(list[Connection], wait(list(rank_of), timeout=left)):
                rank = rank_of.pop(conn)
                answer = self._receive(rank, conn)
                answers[rank] = answer
                if isinstance(answer, Failure) and not expect_errors:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if rank_of and (expect_errors or not failures):
            raise WorkerTimeout(self._describe_timeout(sorted(rank_of.values()), limit_s))
        if failures and not expect_errors:
            if not rank_of and not any(isinstance(failure.error, WorkerDied) for failure in failures.values()):
                self._clean_after_failure(len(requests), requests[0][0])
            _raise_first(failures, sorted(rank_of.values()))
        return [answer.error if isinstance(answer := answers[rank], Failure) else answer for rank in sorted(answers)]

    def _receive(self, rank: int, conn: Connection) -> Any:
        try:
            answer = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            worker = self.workers[rank]
            code = worker.process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Failure(WorkerDied(f"rank {rank} died ({how}); its last output:\n{worker.tail()}"), "")
        if isinstance(answer, Failure):
            answer.error.add_note(f"on rank {rank}:\n{answer.trace}")
        return answer

    def _clean_after_failure(self, world: int, request: str) -> None:
        """All ranks have answered, so the workers are good for the next case."""
        if request != "clean":
            self._ask([("clean", None)] * world, START_LIMIT_S)
            self.busy = False

    def _describe_timeout(self, ranks: list[int], limit_s: float) -> str:
        for rank in ranks:
            if self.workers[rank].process.poll() is None:
                self.workers[rank].process.send_signal(signal.SIGUSR1)  # writes its stack to its log
        time.sleep(0.3)
        tails = [f"--- rank {rank} ---\n{self.workers[rank].tail()}" for rank in ranks]
        return f"ranks {ranks} did not end within {limit_s:g} s\n" + "\n".join(tails)


def _raise_first(failures: dict[int, Failure], stuck: list[int]) -> None:
    """Raise the failure that came first (a death before all others: it is what makes the other ranks fail)."""
    ranks = sorted(failures, key=lambda rank: not isinstance(failures[rank].error, WorkerDied))  # stable
    error = failures[ranks[0]].error
    others = [f"rank {rank}: {type(failures[rank].error).__name__}: {failures[rank].error}" for rank in ranks[1:]]
    stopped = [f"ranks {stuck} had not ended {GRACE_S:g} s later and were stopped"] if stuck else []
    error.add_note("\n".join([*others, *stopped]))
    raise error


_pool = _Pool()
atexit.register(_pool.close)
