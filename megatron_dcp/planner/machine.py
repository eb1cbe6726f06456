"""What a machine can do, as the planner knows it, and how long a collective takes on it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """How fast the attention of one query reads keys and values, measured.

    Attributes:
        kv_dtype: What they are stored in.
        head_dim: Dim of the keys.
        rows: Query heads that share a KV head.
        latent: The values are part of the keys: MLA.
        bytes_per_s: Of the cache, scales counted.
    """

    kv_dtype: str
    head_dim: int
    rows: int
    latent: bool
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class ChunkRate:
    """How fast a prompt's chunk attends to many keys, measured.

    Attributes:
        dtype: What it is computed in.
        head_dim: Dim of the keys.
        flops: Operations per second, an addition and a multiplication being two.
    """

    dtype: str
    head_dim: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class CollectiveRate:
    """How long one collective takes, measured. Fields as in `Sent`; ``bytes`` are those that a rank sends."""

    op: str
    ranks: int
    span: int
    bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates that programs reach, not peaks; from a data sheet (`megatron_dcp.planner.gpus`) or measured.

    A measured machine (`megatron_dcp.calibration`) has more to say than a data sheet: the fields that have a default.

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
        layer_sequence_s: What a layer takes more for each sequence: on a CPU each has attention calls of its own.
        sequence_s: What a step takes more for each sequence, outside the layers.
        followers_s: What a step takes more where the replica has several ranks, which its driver tells what to do.
        merge_s: What a layer takes more where partials are merged: the kernels, not the collectives themselves.
        imbalance: How much longer the slowest rank attends where ranks wait for each other after every layer.
        activations: How often the outputs of a layer's products are read or written beside the products, by the norms,
            rotations and activation functions that the tokens of a chunk go through.
        attention: Rates of attention; empty: those of ``memory_bandwidth`` and ``flops``.
        chunks: Rates of a chunk's attention; empty: that of ``flops``.
        collectives: Times of collectives; where none fits, those of ``collective_s`` and the fields after it.
        drift: How much faster the memory was at the end of the measurement than at its start, or slower.
        ranks: How many ranks measured; 0: a data sheet.
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
    layer_sequence_s: float = 0.0
    sequence_s: float = 0.0
    followers_s: float = 0.0
    merge_s: float = 0.0
    imbalance: float = 1.0
    activations: float = 0.0
    attention: tuple[AttentionRate, ...] = ()
    chunks: tuple[ChunkRate, ...] = ()
    collectives: tuple[CollectiveRate, ...] = ()
    drift: float = 0.0
    ranks: int = 0

    @property
    def unit(self) -> str:
        """What it has several of: GPUs, or ranks, which on a CPU are processes."""
        return "rank" if self.ranks else "GPU"

    def seconds(self, num_bytes: float, operations: float, dtype: str) -> float:
        """Roofline: what reading and computing take when they overlap."""
        return max(num_bytes / self.memory_bandwidth, operations / self.flops[dtype])

    def attention_rate(self, kv_dtype: str, head_dim: int, rows: int, *, latent: bool) -> float | None:
        """Bytes of the cache per second, at the nearest head dim and between the nearest rows; None: not measured."""
        alike = [one for one in self.attention if one.kv_dtype == kv_dtype and one.latent == latent]
        if not alike:
            return None
        near = _nearest((one.head_dim for one in alike), head_dim)
        points = [(math.log(one.rows), 1 / one.bytes_per_s) for one in alike if one.head_dim == near]
        return 1 / _between(points, math.log(rows), extend=False)

    def chunk_flops(self, dtype: str, head_dim: int) -> float:
        """Operations per second of a chunk's attention, at the nearest head dim."""
        rates = {one.head_dim: one.flops for one in self.chunks if one.dtype == dtype}
        return rates[_nearest(rates, head_dim)] if rates else self.flops[dtype]

    def collective_seconds(self, sent: Sent) -> float:
        """Of all calls with all their bytes: measured, or else latency and bandwidth, the alpha-beta model."""
        if sent.ranks == 1 or not sent.calls:
            return 0.0
        if (points := self._measured(sent)) is not None:
            return sent.calls * _between(points, sent.bytes / sent.calls, extend=True)
        inside = sent.span <= self.link_gpus and self.link_gpus % sent.span == 0 or sent.world <= self.link_gpus
        bandwidth = self.link_bandwidth if inside else self.network_bandwidth
        step = self.link_step_s if inside else self.network_step_s
        return sent.calls * (self.collective_s + num_steps(sent.op, sent.ranks) * step) + sent.bytes / bandwidth

    def _measured(self, sent: Sent) -> list[tuple[float, float]] | None:
        """Bytes and seconds of one such collective, over the group that reaches most nearly as far."""
        op = "ring" if sent.op == "send" else sent.op
        alike = [one for one in self.collectives if one.op == op and one.ranks == sent.ranks]
        if not alike:
            return None
        near = _nearest((one.span for one in alike), sent.span)
        return [(one.bytes, one.seconds) for one in alike if one.span == near]


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


def num_steps(op: str, ranks: int) -> int:
    """Steps that follow each other: a tree up and down, a ring, or all ranks at once."""
    if op == "all_reduce":
        return 2 * math.ceil(math.log2(ranks))
    return ranks - 1 if op in ("all_gather", "reduce_scatter", "ring") else 1


def _nearest(sizes: Iterable[int], size: int) -> int:
    """By their ratio to it."""
    return min(sizes, key=lambda one: abs(math.log(one / size)))


def _between(points: Iterable[tuple[float, float]], x: float, *, extend: bool) -> float:
    """On the line through the two nearest points; before the first as there, behind the last so too or straight on."""
    known = sorted(points)
    x = max(x, known[0][0]) if extend else min(max(x, known[0][0]), known[-1][0])
    if len(known) == 1:
        return known[0][1]
    index = min(max(1, bisect_left(known, (x,))), len(known) - 1)
    (left, low), (right, high) = known[index - 1], known[index]
    return low + (high - low) * (x - left) / (right - left)
