"""The process behind each worker of ``workers.py``: loads functions, runs them as one rank, cleans up."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Function:
    """Where a function lives. By path: pytest may give test modules names that no other process can import."""

    path: str
    module: str
    qualname: str


@dataclass(frozen=True)
class Call:
    function: Function
    rank: int
    world: int
    args: bytes  # pickled; may need the function's module, so it is opened after that has been imported
    store: str
    timeout_s: float


@dataclass(frozen=True)
class Failure:
    error: BaseException
    trace: str


def _serve(conn: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            request, value = pickle.loads(conn.recv_bytes())
        except EOFError:
            return
        try:
            answer: Any = None
            if request == "load":
                _load(value)
            elif request == "call":
                os.ftruncate(2, 0)  # a tail is about one case
                answer = _call(value)
            else:
                _clean()
            payload = pickle.dumps(answer)
        except BaseException as error:  # pytest.fail raises no Exception
            traceback.print_exc()
            payload = pickle.dumps(Failure(_portable(error), traceback.format_exc()))
            _forget_frames(error)
            conn.send_bytes(payload)
            _clean()  # at once: closed connections make ranks that wait for this one fail instead of hang
            continue
        conn.send_bytes(payload)


def _load(function: Function) -> Any:
    module = sys.modules.get(function.module)
    if module is None or str(Path(getattr(module, "__file__", None) or "").resolve()) != function.path:
        module = _import_file(function)
    value: Any = module
    for name in function.qualname.split("."):
        value = getattr(value, name)
    return value


def _import_file(function: Function) -> ModuleType:
    spec = importlib.util.spec_from_file_location(function.module, function.path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[function.module] = module  # under the test's name for it, so that its classes can be pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[function.module]
        raise
    gc.collect()
    gc.freeze()  # _clean() need not look through what libraries have made, again and again
    return module


def _call(call: Call) -> Any:
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
        earlier = error.__cause__ or error.__context__
        error.__traceback__ = error.__cause__ = error.__context__ = None
        error = earlier


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    os.set_inheritable(int(sys.argv[1]), False)
    _serve(Connection(int(sys.argv[1])))
