"""``AsyncLLM``: many requests at once, each streamed to the coroutine that asked for it."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_dcp.comm.collectives import CollectiveError
from megatron_dcp.engine.core import Sampled
from megatron_dcp.engine.front import Front, eval_mode
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.prompts import Prompt
from megatron_dcp.engine.request import Request, RequestOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOutput:
    """What `AsyncLLM.generate` hands out: a token, or the end of an aborted sample.

    Attributes:
        request_id: As given to `AsyncLLM.generate`.
        sample: Which of the request's ``n`` samples it belongs to.
        token_id: ``None`` where the sample was aborted.
        text: What the token adds to the text, see `Token`.
        logprob: Of the token; ``None`` unless asked for.
        output: The whole sample, with its last token.
    """

    request_id: str
    sample: int
    token_id: int | None
    text: str
    logprob: float | None
    output: RequestOutput | None


class AsyncLLM(Front):
    """A Megatron model that serves: requests come and go at any time, and run together.

    The driver of each replica takes requests, from any number of coroutines; its other ranks follow::

        llm = AsyncLLM("checkpoint", tensor_model_parallel_size=2, decode_context_parallel_size=2)

        async def serve():
            async with llm:
                async for piece in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
                    print(piece.text, end="")

        if llm.is_driver:
            asyncio.run(serve())
        else:
            llm.follow()

    A thread of the driver steps the engine from the start on; until `shutdown` the ranks of the replica may not
    communicate otherwise, and the model is in eval mode. What goes wrong with one request is an error for that one.
    Where the engine itself fails, every request and every rank gets the error, and no request is taken any more. A
    server should have a pool of a configured size (``cache``): without one, a request that does not fit beside those
    that run waits until they have ended.

    Arguments and errors: see `Front`.
    """

    _tell_outcomes = False

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[StreamOutput, None]:
        """Continue a prompt: ``async for piece in llm.generate(...)``, a `StreamOutput` for every token.

        The request begins with the first iteration. Cancelling the task that iterates, or closing the iterator, aborts
        it.

        Args:
            prompt: Text or a list of token ids.
            sampling_params: Default: greedy, up to 128 tokens.
            request_id: Names the request for `abort`; by default it gets a name of its own.

        Raises:
            ValueError: In the call: a prompt that the model cannot take, or a rank that is not the driver. At the first
                iteration: one that the pool cannot take, a ``request_id`` that runs already, an `AsyncLLM` that was
                shut down. Later: logits that are not finite, or of which ``min_tokens`` leaves nothing.
            CollectiveError: A rank of the replica died or hangs.
            RuntimeError: The engine failed in another way.
        """
        self._driven("generate()")
        requests = self.prompt_reader.read([prompt], sampling_params)
        for request in requests:
            request.index = next(self._indices)
        return self._stream(request_id, requests)

    def abort(self, request_id: str) -> None:
        """End a request, from any thread; nothing happens if there is none of that name (any more).

        Whoever iterates over it gets an output with ``finish_reason="abort"`` for each sample that had not ended.
        """
        with self._lock:
            stream = self._streams.get(request_id)
        if stream is not None:
            self._orders.put(partial(self._abort, stream))

    async def shutdown(self) -> None:
        """Abort what runs, let the followers go, and end the thread. On the driver; elsewhere nothing happens."""
        if self._thread is not None:
            self._orders.put(self._stop)
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.shutdown()

    def follow(self) -> None:
        """Compute what the driver plans until it shuts down: what every rank but the driver does.

        Raises:
            ValueError, RuntimeError: What the driver's engine failed with; ``ValueError`` also on the driver itself.
            CollectiveError: A rank of the replica died or hangs.
        """
        if self._follower is None:
            raise ValueError("this rank is the driver of its replica and has nobody to follow; call generate() here")
        with eval_mode(self.model):
            for _ in self._follower.follow():
                pass

    def weights_changed(self) -> None:
        """Forget all keys and values computed so far, for all requests that come after this call.

        ``ValueError`` while requests run.
        """
        if self._engine is None:
            return
        with self._lock:
            if self._streams:
                raise ValueError(
                    f"the weights cannot change while {len(self._streams)} requests run; wait for them, or abort them"
                )
            self._orders.put(self._engine.weights_changed)

    def _ready(self) -> None:
        self._indices = itertools.count()
        self._lock = threading.Lock()  # for the next two
        self._streams: dict[str, _Stream] = {}
        self._closed: Exception | None = None  # why no request is taken any more
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live_streams: dict[Request, _Stream] = {}  # the thread's own, like what follows
        self._stopping = False
        self._thread = None
        if self._engine is not None:
            self._thread = threading.Thread(target=self._serve, name="megatron_dcp engine", daemon=True)
            self._thread.start()

    async def _stream(self, name: str | None, requests: list[Request]) -> AsyncGenerator[StreamOutput, None]:
        stream = _Stream(requests)
        with self._lock:
            if self._closed is not None:
                raise _again(self._closed)
            request_id = name or next(n for n in map("request-{}".format, self._indices) if n not in self._streams)
            if request_id in self._streams:
                raise ValueError(f"request_id={request_id!r} runs already; give every request an id of its own")
            self._streams[request_id] = stream
            self._orders.put(partial(self._add, stream))
        texts = {request: self._text(request) for request in requests}
        left = len(requests)
        try:
            while left:
                news = await stream.queue.get()
                if isinstance(news, Exception):
                    raise _again(news)
                for request, sampled in news:
                    last = sampled is None or sampled.last
                    left -= last
                    yield self._stream_output(request_id, request, sampled, texts[request], last)
        finally:
            with self._lock:
                del self._streams[request_id]
                if left:
                    self._orders.put(partial(self._abort, stream))

    def _stream_output(
        self, request_id: str, request: Request, sampled: Sampled | None, text: Any, last: bool
    ) -> StreamOutput:
        logprob = None
        if sampled is not None:
            piece = self._piece(text, sampled)
            logprob = sampled.logprob if request.params.logprobs else None
        else:
            piece = text.finish() if text is not None else ""
        return StreamOutput(
            request_id=request_id,
            sample=request.sample,
            token_id=sampled.token if sampled is not None else None,
            text=piece,
            logprob=logprob,
            output=self._output(request) if last else None,
        )

    # What follows runs in the thread.

    def _serve(self) -> None:
        engine = self._driven("the engine's thread")
        closed: Exception = ValueError("this AsyncLLM was shut down; make a new one")
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with eval_mode(self.model):
                while not self._stopping:
                    if not self._take_orders(wait_s=0.0 if engine.has_work else self._link.heartbeat_s):
                        engine.idle()
                    elif engine.has_work and not self._stopping:
                        self._hand_out(engine.step())
            for stream in set(self._live_streams.values()):
                self._abort(stream)
            engine.end()
        except BaseException as error:
            closed = error if isinstance(error, Exception) else RuntimeError(f"the engine's thread ended: {error!r}")
            engine.fail(closed)
        with self._lock:
            self._closed = closed
            for stream in self._streams.values():
                stream.push(closed)

    def _take_orders(self, wait_s: float) -> bool:
        """Do what was asked for, and wait for that if need be; ``False`` where nothing was for ``wait_s`` seconds."""
        if wait_s:
            try:
                self._orders.get(timeout=wait_s)()
            except queue.Empty:
                return False
        with suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()
        return True

    def _stop(self) -> None:
        self._stopping = True

    def _add(self, stream: _Stream) -> None:
        try:
            self._driven("a request").add(stream.requests)
        except CollectiveError:
            raise
        except Exception as error:  # also what a tokenizer raises
            stream.push(error)
        else:
            self._live_streams |= dict.fromkeys(stream.requests, stream)

    def _abort(self, stream: _Stream) -> None:
        engine = self._driven("abort()")
        ended = [request for request in stream.requests if engine.abort(request.index) is not None]
        for request in ended:
            del self._live_streams[request]
        if ended:
            stream.push([(request, None) for request in ended])

    def _hand_out(self, sampled: list[Sampled]) -> None:
        for request, error in self._driven("a step").take_failures():
            failed = self._live_streams.pop(request)
            failed.push(error)
            self._abort(failed)
        news: dict[_Stream, list[tuple[Request, Sampled | None]]] = {}
        for one in sampled:
            stream = self._live_streams.get(one.request)
            if stream is None:  # it has failed
                continue
            if one.last:
                del self._live_streams[one.request]
            news.setdefault(stream, []).append((one.request, one))
        for stream, its in news.items():
            stream.push(its)


class _Stream:
    """A request on its way from the engine's thread to the event loop that waits for it."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.queue: asyncio.Queue[list[tuple[Request, Sampled | None]] | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def push(self, news: list[tuple[Request, Sampled | None]] | Exception) -> None:
        """From the thread: tokens, ``None`` in their place for a sample that was aborted, or why there are no more."""
        with suppress(RuntimeError):  # the loop was closed, so nobody waits
            self._loop.call_soon_threadsafe(self.queue.put_nowait, news)


def _again(error: Exception) -> Exception:
    """The error for one more of those that it concerns."""
    if type(error) in (ValueError, CollectiveError):
        return type(error)(str(error))
    again = RuntimeError(f"the engine failed with {type(error).__name__}: {error}")
    again.__cause__ = error
    return again
