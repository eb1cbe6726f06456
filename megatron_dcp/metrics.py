"""Counters, histograms and timers of one engine or benchmark. Plain Python: an instance is passed to what it measures.

Timers read the clock of the host and never wait for a device: on a GPU they show the time to launch the work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

Labels = tuple[tuple[str, str], ...]

_NO_TIMER: AbstractContextManager[None] = nullcontext()


@dataclass
class Histogram:
    """Distribution of observed values, in whatever unit they have.

    Attributes:
        buckets: ``exponent -> count`` of values in ``(2 ** (exponent - 1), 2 ** exponent]``; 0 and below are not in it.
    """

    count: int = 0
    total: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf
    buckets: dict[int, int] = field(default_factory=dict)

    def observe(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)
        if value > 0:
            mantissa, exponent = math.frexp(value)
            exponent -= mantissa == 0.5  # a power of two belongs to the bucket that ends with it
            self.buckets[exponent] = self.buckets.get(exponent, 0) + 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan


class Metrics:
    """What happened since the start or the last :meth:`reset`.

    Args:
        enabled: ``False`` makes every method return at once.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._counters: dict[tuple[str, Labels], float] = {}
        self._histograms: dict[tuple[str, Labels], Histogram] = {}
        self._collectives: dict[tuple[str, str], tuple[int, int]] = {}
        self._step: dict[str, float] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add ``amount`` to a counter."""
        if self.enabled:
            key = (name, tuple(sorted(labels.items())))
            self._counters[key] = self._counters.get(key, 0) + amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add ``value`` to a histogram."""
        if self.enabled:
            self._histograms.setdefault((name, tuple(sorted(labels.items()))), Histogram()).observe(value)

    def count_collective(self, op: str, group: str, bytes_sent: int) -> None:
        """Count one collective and the bytes that this rank sends for it."""
        if self.enabled:
            calls, sent = self._collectives.get((op, group), (0, 0))
            self._collectives[op, group] = (calls + 1, sent + bytes_sent)

    @property
    def collectives(self) -> dict[str, tuple[int, int]]:
        """``op -> (calls, bytes sent by this rank)``, all groups together."""
        totals: dict[str, tuple[int, int]] = {}
        for (op, _), (calls, sent) in self._collectives.items():
            earlier = totals.get(op, (0, 0))
            totals[op] = (earlier[0] + calls, earlier[1] + sent)
        return totals

    def timer(self, name: str) -> AbstractContextManager[None]:
        """Time a ``with`` block: adds to this step's seconds under ``name`` and to the histogram ``<name>_seconds``."""
        return self._time(name) if self.enabled else _NO_TIMER

    @contextmanager
    def _time(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._step[name] = self._step.get(name, 0.0) + seconds
            self.observe(f"{name}_seconds", seconds)

    def end_step(self) -> dict[str, float]:
        """Seconds per timer since the last call, e.g. ``{"attention": …, "communication": …}``.

        Each also goes to the histogram ``step_<name>_seconds``.
        """
        step, self._step = self._step, {}
        for name, seconds in step.items():
            self.observe(f"step_{name}_seconds", seconds)
        return step

    def snapshot(self) -> dict[str, Any]:
        """A copy of everything: counters and histograms by ``(name, labels)``, collectives by ``(op, group)``."""
        return {
            "counters": dict(self._counters),
            "histograms": {
                key: Histogram(one.count, one.total, one.smallest, one.largest, dict(one.buckets))
                for key, one in self._histograms.items()
            },
            "collectives": dict(self._collectives),
        }


def timed(metrics: Metrics | None, name: str) -> AbstractContextManager[None]:
    """``metrics.timer(name)``, or nothing where there are no metrics."""
    return _NO_TIMER if metrics is None else metrics.timer(name)
