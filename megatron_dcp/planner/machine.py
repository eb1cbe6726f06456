"""What a machine can do, as the planner knows it, and how long a collective takes on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates that programs reach, not peaks; from a data sheet (`megatron_dcp.planner.gpus`) or measured.

    Attributes:
        memory_bytes: Memory of one GPU.
        memory_bandwidth: Bytes per second that a GPU reads.
        flops: Operations per second of dense matrix products, by dtype: ``float32``, ``bfloat16``, ``fp8``.
        link_bandwidth: Bytes per second that a GPU sends to others of its domain (NVLink), in one direction.
        link_gpus: GPUs of one domain.
        network_bandwidth: The same between domains.
        collective_s: What any collective takes before the first byte moves.
        link_step_s: What each step of a collective takes besides its bytes, inside a domain.
        network_step_s: The same between domains.
        layer_s: What a layer takes besides its bytes and operations: its kernels one after the other.
        step_s: What a step takes outside the layers: plan, sampling, the driver's broadcast.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    flops: Mapping[str, float]
    link_bandwidth: float
    link_gpus: int
    network_bandwidth: float
    collective_s: float
    link_step_s: float
    network_step_s: float
    layer_s: float
    step_s: float

    def seconds(self, num_bytes: float, operations: float, dtype: str) -> float:
        """Roofline: what reading and computing take when they overlap."""
        return max(num_bytes / self.memory_bandwidth, operations / self.flops[dtype])

    def collective_seconds(self, sent: Sent) -> float:
        """Latency of all calls and time of all bytes: the alpha-beta model."""
        if sent.ranks == 1 or not sent.calls:
            return 0.0
        inside = sent.span <= self.link_gpus and self.link_gpus % sent.span == 0 or sent.world <= self.link_gpus
        bandwidth = self.link_bandwidth if inside else self.network_bandwidth
        step = self.link_step_s if inside else self.network_step_s
        return sent.calls * (self.collective_s + _steps(sent.op, sent.ranks) * step) + sent.bytes / bandwidth


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Equal collectives of one step on one rank.

    Attributes:
        what: What they are for.
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``ring`` or ``send``.
        ranks: Size of the group.
        span: So many consecutive ranks hold the group.
        world: All ranks.
        calls: How many.
        bytes: What this rank sends in all of them.
        exchange: Whether it is there for decode context parallelism.
        instead: What would be sent without decode context parallelism; of an exchange nothing.
    """

    what: str
    op: str
    ranks: int
    span: int
    world: int
    calls: int
    bytes: float
    exchange: bool = False
    instead: Sent | None = None

    @property
    def exchange_bytes(self) -> float:
        """Bytes that decode context parallelism adds."""
        return 0.0 if not self.exchange else self.bytes - (self.instead.bytes if self.instead else 0.0)

    @property
    def exchange_calls(self) -> int:
        """Collectives that decode context parallelism adds."""
        alone = self.instead is None or self.instead.ranks == 1
        return self.calls if self.exchange and alone else 0


def _steps(op: str, ranks: int) -> int:
    """Steps that follow each other: a tree up and down, a ring, or all ranks at once."""
    if op == "all_reduce":
        return 2 * math.ceil(math.log2(ranks))
    return ranks - 1 if op in ("all_gather", "reduce_scatter", "ring") else 1
