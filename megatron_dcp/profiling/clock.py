"""A stop watch with one hand: at every moment of a step the time goes to one layer kind and one part of it. No torch.

So the parts of a step add up to its wall time, whatever is measured, and what nobody claims is ``rest``.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron_dcp.metrics import Metrics

KINDS = ("full attention", "windows", "MLA", "experts", "dense FFN", "embedding", "logits", "stages", "engine")
PARTS = ("attention", "communication", "gemm", "rest")
Kind = Literal["full attention", "windows", "MLA", "experts", "dense FFN", "embedding", "logits", "stages", "engine"]
Part = Literal["attention", "communication", "gemm", "rest"]
Phase = Literal["prefill", "decode"]

_REST = PARTS.index("rest")
_GEMM = PARTS.index("gemm")
_ENGINE = KINDS.index("engine") * len(PARTS) + _REST


def key_of(kind: Kind, part: Part) -> int:
    """The number of a kind's part: what segments are labelled with."""
    return KINDS.index(kind) * len(PARTS) + PARTS.index(part)


@dataclass(frozen=True)
class Step:
    """One step on one rank.

    Attributes:
        phase: ``prefill`` where a sequence computes a piece of its prompt, else ``decode``.
        tokens: That the step computes, over all ranks.
        start_s: Seconds since the run began.
        seconds: Wall time.
        parts: Seconds of each kind and part, by `key_of`; they add up to ``seconds``.
        times: Where segments begin, seconds since the step did.
        keys: Their kind and part.
        marks: How often the hand of the clock was turned; segments that follow each other in one part are one.
        waited_s: How long the host waited for the GPU at the end of the model's forward; ``None`` without one.
    """

    phase: Phase
    tokens: int
    start_s: float
    seconds: float
    parts: tuple[float, ...]
    times: tuple[float, ...]
    keys: tuple[int, ...]
    marks: int
    waited_s: float | None = None


class Clock:
    """Times the steps of one rank.

    Args:
        new_event: Makes CUDA events (``record``, ``elapsed_time`` in ms), so that the time of a part is the GPU's and
            not the one to launch it; ``None``: the time of the host.
        wait: Waits until the GPU has done all; with ``new_event``.
    """

    def __init__(self, new_event: Callable[[], Any] | None = None, wait: Callable[[], None] | None = None) -> None:
        self.new_event, self._wait = new_event, wait
        self.steps: list[Step] = []
        self.origin = 0.0
        self.open = False
        self._stack = [_ENGINE]
        self._times, self._keys = array("d"), array("B")
        self._events: list[Any] = []
        self._waited: float | None = None

    def use(self, other: Clock) -> None:
        """Tell the time that ``other`` tells."""
        self.new_event, self._wait = other.new_event, other._wait

    def restart(self) -> None:
        """Forget all steps; what comes begins now."""
        self.steps, self.open, self.origin = [], False, time.perf_counter()

    def begin_step(self) -> None:
        """A step begins; one that had begun without an end never was."""
        self._times, self._keys, self._events = array("d"), array("B"), []
        self._stack = [_ENGINE]
        self._waited, self.open = None, True
        self._mark(_ENGINE)

    def drop_step(self) -> None:
        """What had begun was no step."""
        self.open = False

    def wait(self) -> None:
        """Let the GPU come to the end of what was launched, and remember how long that took."""
        if self.open and self._wait is not None:
            start = time.perf_counter()
            self._wait()
            self._waited = time.perf_counter() - start

    def end_step(self, phase: Phase, tokens: int) -> None:
        """The step has ended."""
        self._mark(_ENGINE)
        self.open = False
        times = np.frombuffer(self._times, dtype=np.float64)
        start = float(times[0]) - self.origin
        times = times - times[0]
        if self._events:
            assert self._wait is not None
            self._wait()
            times = np.array([self._events[0].elapsed_time(event) for event in self._events]) / 1e3
        keys = np.frombuffer(self._keys, dtype=np.uint8)[:-1]
        parts = np.bincount(keys, weights=np.diff(times), minlength=len(KINDS) * len(PARTS))
        first = np.flatnonzero(np.diff(keys.astype(np.int16), prepend=-1))  # of each run of equal keys
        self.steps.append(
            Step(
                phase=phase,
                tokens=tokens,
                start_s=start,
                seconds=float(times[-1]),
                parts=tuple(parts.tolist()),
                times=tuple(times[first].tolist()),
                keys=tuple(keys[first].tolist()),
                marks=len(times),
                waited_s=self._waited,
            )
        )

    def enter(self, kind: Kind) -> None:
        """From now on the time goes to this kind's rest, until `leave`."""
        self._push(KINDS.index(kind) * len(PARTS) + _REST)

    def enter_part(self, part: Part) -> None:
        """From now on it goes to this part of the same kind. A product inside attention stays attention."""
        top, number = self._stack[-1], PARTS.index(part)
        inside = top % len(PARTS)
        self._push(top if number == _GEMM and inside != _REST else top - inside + number)

    def turn(self, kind: Kind) -> None:
        """What was entered last goes on as the rest of another kind."""
        self._stack[-1] = KINDS.index(kind) * len(PARTS) + _REST
        self._mark(self._stack[-1])

    def leave(self) -> None:
        """Back to what it was before the last `enter` or `enter_part`."""
        if len(self._stack) > 1:  # else a step began inside
            self._stack.pop()
        self._mark(self._stack[-1])

    def _push(self, key: int) -> None:
        self._stack.append(key)
        self._mark(key)

    def _mark(self, key: int) -> None:
        if not self.open:
            return
        if self.new_event is not None:
            event = self.new_event()
            event.record()
            self._events.append(event)
        self._times.append(time.perf_counter())
        self._keys.append(key)


class _PartTimer:
    def __init__(self, clock: Clock, part: Part) -> None:
        self._clock, self._part = clock, part

    def __enter__(self) -> None:
        self._clock.enter_part(self._part)

    def __exit__(self, *_: Any) -> None:
        self._clock.leave()


class ClockMetrics(Metrics):
    """Metrics whose timers ``attention`` and ``communication`` turn the hand of a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._timers = {part: _PartTimer(clock, part) for part in ("attention", "communication")}

    def timer(self, name: str) -> Any:
        """The clock's, or for another name one of `Metrics`."""
        return self._timers.get(name) or super().timer(name)
