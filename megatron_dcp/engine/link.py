"""How the driver of a replica reaches its followers: one small broadcast per message."""

from __future__ import annotations

from typing import Any

import torch

from megatron_dcp.comm.collectives import broadcast, group_device
from megatron_dcp.engine.wire import Message, decode, encode
from megatron_dcp.metrics import Metrics

FIXED = 1024  # numbers that the first broadcast of a message carries; a longer message takes a second one
_TIME_LIMIT_S = 30.0  # where a back end does not tell its own


class Link:
    """The ranks of a replica as one sender and its receivers. One thread at a time.

    Args:
        group: Process group of the replica.
        driver: Rank in ``group`` of the one that sends.
        metrics: Counts the broadcasts.
    """

    def __init__(self, group: Any, driver: int, metrics: Metrics | None = None) -> None:
        self.group = group
        self.driver = driver
        self.metrics = metrics
        self.alone = group.size() == 1
        self.is_driver = group.rank() == driver
        if not self.alone:
            self._device = group_device(group)
            self._fixed = torch.zeros(FIXED, dtype=torch.float64, device=self._device)

    def send(self, message: Message) -> None:
        """Send to all followers. ``CollectiveError`` if one died, or does not listen within the time limit."""
        assert self.is_driver
        if self.alone:
            return
        numbers = torch.from_numpy(encode(message))
        self._fixed[: len(numbers)] = numbers[:FIXED]
        broadcast(self._fixed, self.group, self.metrics, src=self.driver)
        if len(numbers) > FIXED:
            broadcast(numbers[FIXED:].to(self._device), self.group, self.metrics, src=self.driver)

    def receive(self) -> Message:
        """The driver's next message. ``CollectiveError`` if the driver died, or is silent for the time limit."""
        assert not self.is_driver
        broadcast(self._fixed, self.group, self.metrics, src=self.driver)
        numbers, length = self._fixed.cpu(), int(self._fixed[0])
        if length > FIXED:
            rest = torch.empty(length - FIXED, dtype=torch.float64, device=self._device)
            broadcast(rest, self.group, self.metrics, src=self.driver)
            numbers = torch.cat((numbers, rest.cpu()))
        return decode(numbers.numpy())

    @property
    def heartbeat_s(self) -> float:
        """Seconds after which a driver without work should send something, well inside the group's time limit."""
        try:
            limit = self.group._get_backend(self._device).options._timeout.total_seconds()
        except (AttributeError, RuntimeError):
            limit = _TIME_LIMIT_S
        return min(5.0, limit / 4)
