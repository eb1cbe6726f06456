"""Puts a clock around what a run of ``LLM`` calls: steps, layers, products, collectives. Everything is taken off again.

Attention and the collectives of this package tell their time themselves (`megatron_dcp.metrics`); the rest is wrapped
from outside for as long as it is measured.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from megatron_dcp.engine import runner as runner_module
from megatron_dcp.engine.core import Engine
from megatron_dcp.engine.link import Link
from megatron_dcp.engine.llm import LLM
from megatron_dcp.engine.runner import ModelRunner
from megatron_dcp.engine.scheduler import Scheduler
from megatron_dcp.engine.wire import Kind as MessageKind
from megatron_dcp.layers import DCPMoELayer, attention_layers, layer_windows
from megatron_dcp.layers.specs import unwrap
from megatron_dcp.profiling.clock import Clock, Kind, Phase

PRODUCTS = ("mm", "bmm", "matmul", "addmm", "baddbmm")
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class KVMoment(NamedTuple):
    """The pool when a step begins, with the tokens that it computes; on the driver.

    Attributes:
        time_s: Seconds since the run began.
        lengths: Tokens in the cache of each running sequence.
        shared_blocks: Blocks that sequences have of each other: so many are in ``lengths`` more than once.
        held_blocks: Blocks of the pool that running sequences hold.
        num_blocks: Blocks of the pool.
        window_held: Of the blocks of layers with a sliding window, by running sequences; ``None``: no such layers.
        waiting: Sequences that wait.
    """

    time_s: float
    lengths: tuple[int, ...]
    shared_blocks: int
    held_blocks: int
    num_blocks: int
    window_held: float | None
    waiting: int


class Ranges:
    """Named ranges around steps and layers, for tools that show them: NVTX, `torch.profiler`.

    Names are ``prefill step``, ``decode step``, ``embedding``, ``layer 3 attention``, ``layer 3 experts``,
    ``layer 3 ffn`` and ``logits``, layers counted from 0 over all stages.
    """

    def __init__(self, *sinks: tuple[Callable[[str], Any], Callable[[Any], Any]]) -> None:
        self._sinks = sinks

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        opened = [(begin(name), end) for begin, end in self._sinks]
        try:
            yield
        finally:
            for token, end in reversed(opened):
                end(token)

    def __bool__(self) -> bool:
        return bool(self._sinks)


def ranges_here(*, tracing: bool) -> Ranges:
    """NVTX where there is a GPU, and the ranges of `torch.profiler` where it traces."""
    sinks: list[tuple[Callable[[str], Any], Callable[[Any], Any]]] = []
    if torch.cuda.is_available():
        sinks.append((torch.cuda.nvtx.range_push, lambda _: torch.cuda.nvtx.range_pop()))
    if tracing:

        def begin(name: str) -> Any:
            range_ = torch.profiler.record_function(name)
            range_.__enter__()
            return range_

        sinks.append((begin, lambda range_: range_.__exit__(None, None, None)))
    return Ranges(*sinks)


def new_clock(device: torch.device) -> Clock:
    """One that tells the time of the device."""
    if device.type != "cuda":
        return Clock()
    return Clock(lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.synchronize(device))


@contextmanager
def measured(llm: LLM, clock: Clock, ranges: Ranges | None = None) -> Iterator[list[KVMoment]]:
    """Inside the block every step of ``llm`` goes to ``clock.steps``; gives what the driver sees of the pool.

    Args:
        clock: That of the `ClockMetrics` that ``llm`` was made with.
    """
    moments: list[KVMoment] = []
    ranges = ranges or Ranges()
    with ExitStack() as stack:

        def wrap(owner: Any, name: str, make: Wrap) -> None:
            stack.enter_context(_replaced(owner, name, make))

        _wrap_steps(wrap, llm, clock, ranges, moments)
        _wrap_model(wrap, unwrap(llm.model), clock, ranges)
        for name in PRODUCTS:
            wrap(torch, name, lambda call: _in_part(clock, "gemm", call))
        wrap(torch.nn.functional, "linear", lambda call: _in_part(clock, "gemm", call))
        wrap(torch.distributed, "all_reduce", lambda call: _in_part(clock, "communication", call))  # Megatron's own
        yield moments


def phase_of(counts: Sequence[int], num_draft_tokens: int) -> Phase:
    """What a step is whose sequences compute so many tokens each."""
    return "prefill" if max(counts) > 1 + num_draft_tokens else "decode"


def switch_cost_s(new_event: Callable[[], Any] | None = None) -> float:
    """Seconds that one turn of a clock's hand takes in a loop here: a wrapped call of nothing makes two."""
    clock = Clock(new_event, lambda: None)
    clock.begin_step()
    call = _in_part(clock, "gemm", lambda: None)
    rounds = 2000
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    return (time.perf_counter() - start) / (2 * rounds)


def _wrap_steps(wrap: Callable[..., None], llm: LLM, clock: Clock, ranges: Ranges, moments: list[KVMoment]) -> None:
    """A step begins where the driver plans it, or a follower waits for it, and ends with its tokens or logits."""
    drafts = llm.engine_config.num_draft_tokens
    last: list[tuple[Phase, int]] = []

    def planned(plan: Callable[..., Any]) -> Callable[..., Any]:
        def call(engine: Engine) -> None:
            clock.begin_step()
            plan(engine)

        return call

    def received(receive: Callable[..., Any]) -> Callable[..., Any]:
        def call(link: Link) -> Any:
            clock.begin_step()
            message = receive(link)
            if message.kind is not MessageKind.STEP:
                clock.drop_step()
            return message

        return call

    def stepped(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(runner: ModelRunner, batch: Any) -> Any:
            phase = phase_of([len(seq.token_ids) for seq in batch.seqs], drafts)
            last[:] = [(phase, batch.num_tokens)]
            with ranges(f"{phase} step"):
                logits = step(runner, batch)
            clock.wait()
            if not llm.is_driver and clock.open:
                clock.end_step(*last[0])
            return logits

        return call

    def computed(compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(engine: Engine) -> Any:
            last.clear()
            sampled = compute(engine)
            if last and clock.open:
                clock.end_step(*last[0])
            return sampled

        return call

    def scheduled(schedule: Callable[..., Any]) -> Callable[..., Any]:
        def call(scheduler: Scheduler) -> Any:
            step = schedule(scheduler)
            moments.append(_moment(scheduler, step, clock))
            return step

        return call

    wrap(ModelRunner, "step", stepped)
    if llm.is_driver:
        wrap(Engine, "plan", planned)
        wrap(Engine, "compute", computed)
        wrap(Scheduler, "schedule", scheduled)
    else:
        wrap(Link, "receive", received)


def _moment(scheduler: Scheduler, step: Any, clock: Clock) -> KVMoment:
    ends = {
        request.index: seq.start + len(seq.token_ids)
        for request, seq in zip(step.requests, step.batch.seqs, strict=True)
    }
    blocks = sum(len(scheduler.pool.table(request.index)) for request in scheduler.running)
    held, window = scheduler.used_tokens // scheduler.block_tokens, scheduler.window
    return KVMoment(
        time_s=time.perf_counter() - clock.origin,
        lengths=tuple(ends.get(request.index, request.num_computed) for request in scheduler.running),
        shared_blocks=blocks - held,
        held_blocks=held,
        num_blocks=scheduler.pool.num_blocks,
        window_held=None if window is None else 1 - window.num_available / window.pool.num_blocks,
        waiting=scheduler.num_waiting,
    )


def _wrap_model(wrap: Callable[..., None], gpt: Any, clock: Clock, ranges: Ranges) -> None:
    """Layers, embedding, logits, and what goes from stage to stage."""
    windows = layer_windows(gpt.config)
    attending = set(map(id, attention_layers(gpt)))
    for layer in gpt.decoder.layers:
        number = layer.layer_number - 1
        ffn: Kind = "experts" if isinstance(layer.mlp, DCPMoELayer) else "dense FFN"
        first = ffn
        if id(layer) in attending:
            first = _attention_kind(gpt.config, windows[number])
            wrap(layer.self_attention, "forward", _attention(clock, ranges, f"layer {number} attention", ffn))
        wrap(layer, "forward", _in_kind(clock, Ranges(), "", first))
        if ranges and ffn == "experts":
            wrap(layer.mlp, "decode", _in_range(ranges, f"layer {number} experts"))
        elif ranges:
            wrap(layer.mlp, "forward", _in_range(ranges, f"layer {number} ffn"))
    for module in filter(_multiplies_in_te, gpt.modules()):
        wrap(module, "forward", lambda call: _in_part(clock, "gemm", call))
    if gpt.pre_process:
        wrap(gpt.embedding, "forward", _in_kind(clock, ranges, "embedding", "embedding"))
    if getattr(gpt.decoder, "final_layernorm", None) is not None:
        wrap(gpt.decoder.final_layernorm, "forward", _in_kind(clock, Ranges(), "", "logits"))
    wrap(ModelRunner, "logits", _in_kind(clock, ranges, "logits", "logits"))
    wrap(ModelRunner, "_chosen_logits", _in_kind(clock, Ranges(), "", "logits"))  # with what brings the rows together
    wrap(ModelRunner, "receive", _in_kind(clock, Ranges(), "", "stages"))
    wrap(runner_module, "send_to_next_stage", _in_kind(clock, Ranges(), "", "stages"))


def _multiplies_in_te(module: Any) -> bool:
    """Whether it is one of TransformerEngine's linear layers, whose products no Python function makes."""
    return any(
        base.__module__.startswith("transformer_engine") and ("Linear" in base.__name__ or "MLP" in base.__name__)
        for base in type(module).__mro__
    )


def _attention_kind(config: Any, window: int | None) -> Kind:
    if config.multi_latent_attention:
        return "MLA"
    return "full attention" if window is None else "windows"


def _attention(clock: Clock, ranges: Ranges, name: str, ffn: Kind) -> Wrap:
    """Attention; what comes after it in the layer belongs to the other half."""

    def make(call: Callable[..., Any]) -> Callable[..., Any]:
        def attended(*args: Any, **kwargs: Any) -> Any:
            if ranges:
                with ranges(name):
                    out = call(*args, **kwargs)
            else:
                out = call(*args, **kwargs)
            clock.turn(ffn)
            return out

        return attended

    return make


def _in_kind(clock: Clock, ranges: Ranges, name: str, kind: Kind) -> Wrap:
    def make(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            clock.enter(kind)
            try:
                if not ranges:
                    return call(*args, **kwargs)
                with ranges(name):
                    return call(*args, **kwargs)
            finally:
                clock.leave()

        return timed

    return make


def _in_range(ranges: Ranges, name: str) -> Wrap:
    def make(call: Callable[..., Any]) -> Callable[..., Any]:
        def named(*args: Any, **kwargs: Any) -> Any:
            with ranges(name):
                return call(*args, **kwargs)

        return named

    return make


def _in_part(clock: Clock, part: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.enter_part(part)
        try:
            return call(*args, **kwargs)
        finally:
            clock.leave()

    return timed


@contextmanager
def _replaced(owner: Any, name: str, make: Wrap) -> Iterator[None]:
    """``owner.name`` wrapped inside the block, and afterwards what it was."""
    own = vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:  # of a class, or of the class of an instance
            delattr(owner, name)
        else:
            setattr(owner, name, own)
