"""Times calls on all ranks at once, so that they share memory and links as they do in a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median
from typing import Any

import torch
from torch import distributed

from megatron_dcp.comm.collectives import gather_objects

MOST_CALLS = 200
ROUNDS = 5


class Clock:
    """Every rank of the world calls the same methods in the same order.

    Args:
        device: Of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        assert distributed.group.WORLD is not None
        self.world = distributed.group.WORLD

    def seconds(self, call: Callable[[], Any], *, aim_s: float = 0.1) -> float:
        """Mean seconds of a call on the slowest rank, of the middle one of some rounds; after one that is not counted.

        A mean, as now and then a call takes several times as long, and in a step of many calls one of them does.

        Args:
            call: What to time. May be a collective call: every rank makes it as often as the others.
            aim_s: Repeat it for about so long, 1 to 200 times in each of 5 rounds.
        """
        call()
        self.wait()
        first = self.slowest(self._mean(call, 1))
        count = max(1, min(MOST_CALLS, round(aim_s / ROUNDS / max(first, 1e-9))))
        self.wait()
        return self.slowest(median(self._mean(call, count) for _ in range(ROUNDS)))

    def typical(self, times: Sequence[float]) -> float:
        """As `seconds`, of calls that were timed one by one, at least 5."""
        return self.slowest(median(mean(part) for part in _parts(times, ROUNDS)))

    def slowest(self, seconds: float) -> float:
        """The largest of the ranks' numbers."""
        return max(gather_objects(seconds, self.world))

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.world.size() > 1:
            distributed.barrier()

    def _mean(self, call: Callable[[], Any], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) / count


def _parts(times: Sequence[float], count: int) -> Iterator[Sequence[float]]:
    """Stretches of about the same length."""
    bounds = [index * len(times) // count for index in range(count + 1)]
    return (times[first:last] for first, last in zip(bounds, bounds[1:], strict=False))
