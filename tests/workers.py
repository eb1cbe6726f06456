"""Persistent gloo worker processes for distributed tests: ``run_on_ranks(world, fn, *args) -> [result per rank]``.

Importing torch and Megatron takes seconds per process, so one set of workers serves the whole test session. A case is a
module-level function of a test module, called as ``fn(rank, world, *args)`` on every rank, with ``torch.distributed``
initialised for just that case. A case that takes too long, or a worker that dies, costs the set: it is killed, and the
next case starts a fresh one. Importing this module imports no torch.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib.util
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_WORLD = 8
START_LIMIT_S = 300.0  # starting a worker, and importing a test module in it, count on no case's time
GRACE_S = 15.0  # how long the other ranks may still take once one has failed
TAIL_LINES = 40


class WorkerDied(RuntimeError):
    """A worker process ended in the middle of a case."""


class WorkerTimeout(RuntimeError):
    """A case did not end on every rank within its time."""


@dataclass(frozen=True)
class _Function:
    """Where a function lives. By path: pytest may give test modules names that no other process can import."""

    path: str
    module: str
    qualname: str


@dataclass(frozen=True)
class _Call:
    function: _Function
    rank: int
    world: int
    args: bytes  # pickled; may need the function's module, so it is opened after that has been imported
    store: str
    timeout_s: float


@dataclass(frozen=True)
class _Failure:
    error: BaseException
    trace: str


def run_on_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, expect_errors: bool = False
) -> list[Any]:
    """Run ``fn(rank, world, *args)`` on ranks ``0 … world - 1`` of a new gloo group and return the results in rank order.

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
        raise ValueError(f"{fn.__qualname__} is not a module-level function of a file; define it at a module's top level")
    function = _Function(str(Path(str(module.__file__)).resolve()), fn.__module__, fn.__qualname__)
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


# ---------------------------------------------------------------------------------------------- the test's side


class _Worker:
    def __init__(self, rank: int, folder: Path) -> None:
        self.log = folder / f"rank{rank}.log"
        ours, theirs = Pipe()
        self.conn = ours
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
                [sys.executable, __file__, str(theirs.fileno())],
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

    def run(self, world: int, function: _Function, args: bytes, timeout: float, expect_errors: bool) -> list[Any]:
        self.busy = True
        self._start(world)
        self._ask([("load", function)] * world, START_LIMIT_S)
        store = f"{self.folder}/store{next(self.cases)}"
        calls = [("call", _Call(function, rank, world, args, store, timeout)) for rank in range(world)]
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
            for conn in wait(list(rank_of), timeout=left):
                assert isinstance(conn, Connection)
                rank = rank_of.pop(conn)
                answer = self._receive(rank, conn)
                answers[rank] = answer
                if isinstance(answer, _Failure) and not expect_errors:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, _Failure)}
        if rank_of and (expect_errors or not failures):
            raise WorkerTimeout(self._describe_timeout(sorted(rank_of.values()), limit_s))
        if failures and not expect_errors:
            if not rank_of and not any(isinstance(failure.error, WorkerDied) for failure in failures.values()):
                self._clean_after_failure(len(requests), requests[0][0])
            _raise_first(failures, sorted(rank_of.values()))
        return [answer.error if isinstance(answer := answers[rank], _Failure) else answer for rank in sorted(answers)]

    def _receive(self, rank: int, conn: Connection) -> Any:
        try:
            return pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            worker = self.workers[rank]
            code = worker.process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return _Failure(WorkerDied(f"rank {rank} died ({how}); its last output:\n{worker.tail()}"), "")

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


def _raise_first(failures: dict[int, _Failure], stuck: list[int]) -> None:
    """Raise the failure that came first (a death before all others: it is what makes the other ranks fail)."""
    ranks = sorted(failures, key=lambda rank: not isinstance(failures[rank].error, WorkerDied))  # stable
    first = failures[ranks[0]]
    others = [f"rank {rank}: {type(failures[rank].error).__name__}: {failures[rank].error}" for rank in ranks[1:]]
    stopped = [f"ranks {stuck} had not ended {GRACE_S:g} s later and were stopped"] if stuck else []
    first.error.add_note("\n".join([f"on rank {ranks[0]}:\n{first.trace}", *others, *stopped]))
    raise first.error


_pool = _Pool()
atexit.register(_pool.close)


# -------------------------------------------------------------------------------------------- the worker's side


def _serve(conn: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            request, value = pickle.loads(conn.recv_bytes())
        except EOFError:
            return
        try:
            if request == "load":
                _load(value)
                answer: Any = None
            elif request == "call":
                os.ftruncate(2, 0)  # a tail is about one case
                answer = _call(value)
            else:
                answer = _clean()
            payload = pickle.dumps(answer)
        except BaseException as error:  # pytest's own skip and fail are no Exceptions
            traceback.print_exc()
            payload = pickle.dumps(_Failure(_portable(error), traceback.format_exc()))
            _forget_frames(error)
            conn.send_bytes(payload)
            _clean()  # at once: closed connections make ranks that wait for this one fail instead of hang
            continue
        conn.send_bytes(payload)


def _load(function: _Function) -> Any:
    module = sys.modules.get(function.module)
    if module is None or str(Path(getattr(module, "__file__", None) or "").resolve()) != function.path:
        module = _import_file(function)
    value: Any = module
    for name in function.qualname.split("."):
        value = getattr(value, name)
    return value


def _import_file(function: _Function) -> ModuleType:
    spec = importlib.util.spec_from_file_location(function.module, function.path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[function.module] = module  # under the test's name for it, so that its classes can be pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[function.module]
        raise
    return module


def _call(call: _Call) -> Any:
    import torch
    from torch import distributed

    fn, args = _load(call.function), pickle.loads(call.args)
    torch.manual_seed(0)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(call.store, call.world),
        rank=call.rank,
        world_size=call.world,
        timeout=timedelta(seconds=call.timeout_s),
    )
    return fn(call.rank, call.world, *args)


def _clean() -> None:
    """Take down what a case may have left: model-parallel state, process groups, objects that hold on to them."""
    from torch import distributed

    for name in ("megatron_dcp.parallel_state", "megatron.core.parallel_state"):
        if (state := sys.modules.get(name)) is not None:
            state.destroy_model_parallel()
    gc.collect()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _portable(error: BaseException) -> BaseException:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a foreign __reduce__ or __init__ may raise
        return RuntimeError(f"{type(error).__name__}: {error}")


def _forget_frames(error: BaseException | None) -> None:
    """Frames in tracebacks keep process groups, and so their connections, alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error, error.__cause__ = error.__cause__ or error.__context__, None


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _main() -> None:
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    os.set_inheritable(int(sys.argv[1]), False)
    _serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    _main()
