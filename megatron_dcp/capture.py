"""Computations that are recorded once and replayed: CUDA graphs, with what no graph can hold left between them.

A graph replays kernels with the addresses and sizes that they had; nothing that Python decides runs again. Two things
may have to stay outside: collectives (``full`` has them in the graph, ``piecewise`` between graphs), and steps that
read a tensor's values on the host, such as the dealing out of tokens to experts. Whoever does such a thing asks
:func:`current_recorder`; a recording is then cut there, and goes on in a new graph after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_dcp.config import CudaGraphs


class Graphs(Protocol):
    """What records and replays kernels on a device."""

    def stream(self) -> AbstractContextManager[None]:
        """Where recording takes place; afterwards the caller's stream goes on behind it."""

    def begin(self) -> Any:
        """A new graph, which records from now on."""

    def end(self, graph: Any) -> None:
        """Stop recording."""

    def replay(self, graph: Any) -> None:
        """Compute what was recorded."""


class CUDAGraphs:
    """Graphs of one GPU, all in one memory pool: they are replayed in the order in which they were recorded."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def stream(self) -> Iterator[None]:
        caller = torch.cuda.current_stream()
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        with warnings.catch_warnings():  # nothing lies between experts and the collective that adds them up
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty")
            graph.capture_end()

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()


class Recorder:
    """One recording: graphs, and the calls between them.

    Args:
        mode: ``piecewise`` or ``full``.
    """

    def __init__(self, graphs: Graphs, mode: CudaGraphs) -> None:
        self._graphs, self._mode = graphs, mode
        self._parts: list[Callable[[], object]] = []
        self._counts: list[Callable[[], None]] = []
        self._open: Any = None

    def record(self, compute: Callable[[], Tensor]) -> Tensor:
        """Record what ``compute`` does. The tensor that it returns holds the result of every later replay.

        It ran once before on its inputs, so that libraries have set themselves up. While it is recorded, each graph is
        replayed where it ends, so that the calls after it see numbers of the kind that they will see; what is in the
        result then means nothing.
        """
        token = _recorder.set(self)
        try:
            with self._graphs.stream():
                self._open = self._graphs.begin()
                result = compute()
                self._close()
                return result
        except BaseException:
            if self._open is not None:  # leave the stream usable; what went wrong is being raised
                with suppress(RuntimeError):
                    self._graphs.end(self._open)
            raise
        finally:
            _recorder.reset(token)

    def replay(self) -> None:
        """Compute again, with what the inputs hold now."""
        for part in self._parts:
            part()
        for count in self._counts:
            count()

    def collective(self, call: Callable[[], None], count: Callable[[], None]) -> None:
        """Make a collective call, and again at every replay."""
        self._counts.append(count)
        if self._mode == "full":
            call()
        else:
            self._between(call)

    def on_host(self, compute: Callable[[], Tensor]) -> Tensor:
        """Make a computation that reads values on the host, and again at every replay, into the same tensor."""
        result: list[Tensor] = []

        def again() -> None:
            new = compute()
            if result:
                result[0].copy_(new)
            else:
                result.append(new)

        self._between(again)
        return result[0]

    def _between(self, call: Callable[[], None]) -> None:
        self._close()
        call()
        self._parts.append(call)
        self._open = self._graphs.begin()

    def _close(self) -> None:
        graph, self._open = self._open, None
        self._graphs.end(graph)
        self._graphs.replay(graph)
        self._parts.append(lambda: self._graphs.replay(graph))


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def current_recorder() -> Recorder | None:
    """The recording that this code runs in, if any."""
    return _recorder.get()


def on_host(compute: Callable[[], Tensor]) -> Tensor:
    """``compute()``, which reads values of tensors on the host: outside of a graph, if one is being recorded."""
    recorder = _recorder.get()
    return compute() if recorder is None else recorder.on_host(compute)
