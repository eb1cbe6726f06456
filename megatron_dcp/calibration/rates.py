"""What the products of a rank read and compute per second, and how long collectives take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from megatron_dcp.calibration.clock import Clock
from megatron_dcp.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter_sum, send_receive
from megatron_dcp.metrics import Metrics
from megatron_dcp.planner.machine import CollectiveRate

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)  # bytes that a rank brings to a collective


class _Sizes(NamedTuple):
    """What a kind of device needs to be busy, and to read from memory rather than from its caches.

    Attributes:
        matrix: Rows and columns of a square weight matrix, ``matrices`` of which are multiplied one after the other.
        rows: Tokens of a product whose operations are to be the limit.
    """

    matrix: int
    matrices: int
    rows: int


_ON_CPU = _Sizes(matrix=2048, matrices=6, rows=512)
_ON_GPU = _Sizes(matrix=8192, matrices=4, rows=8192)


def _sizes(device: torch.device) -> _Sizes:
    return _ON_GPU if device.type == "cuda" else _ON_CPU


def memory_bandwidth(clock: Clock, dtype: torch.dtype) -> float:
    """Bytes of weights that the products of one token read per second."""
    sizes = _sizes(clock.device)
    weights = [_matrix(sizes.matrix, sizes.matrix, dtype, clock.device) for _ in range(sizes.matrices)]
    token = _matrix(1, sizes.matrix, dtype, clock.device)
    seconds = clock.seconds(lambda: [torch.mm(token, weight.t()) for weight in weights], aim_s=0.3)
    return sum(weight.nbytes for weight in weights) / seconds


def product_rate(clock: Clock, dtype: torch.dtype) -> float:
    """Operations per second of a large product, an addition and a multiplication being two."""
    sizes = _sizes(clock.device)
    weight = _matrix(sizes.matrix, sizes.matrix, dtype, clock.device)
    tokens = _matrix(sizes.rows, sizes.matrix, dtype, clock.device)
    return 2 * sizes.rows * sizes.matrix**2 / clock.seconds(lambda: torch.mm(tokens, weight.t()), aim_s=0.2)


def _matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device).to(dtype)


def groups_of_world() -> dict[tuple[int, int], ProcessGroup]:
    """``(ranks, span) -> own group``: of every size that divides the world, ranks side by side, and ranks as far apart
    as they can be. A collective call of the world.
    """
    world, own = distributed.get_world_size(), distributed.get_rank()
    groups: dict[tuple[int, int], ProcessGroup] = {}
    for ranks in range(2, world + 1):
        if world % ranks:
            continue
        apart = world // ranks
        for span, step in sorted({(ranks, 1), (world, apart)}):
            firsts = range(0, world, ranks) if step == 1 else range(apart)
            for first in firsts:
                members = [first + step * index for index in range(ranks)]
                group = distributed.new_group(members)
                if own in members:
                    groups[ranks, span] = group
    return groups


def collective_rates(clock: Clock, groups: dict[tuple[int, int], ProcessGroup]) -> Iterator[CollectiveRate]:
    """Of every operation that a decode step issues; all groups of a kind at the same time. Larger ones never faster."""
    for (ranks, span), group in groups.items():
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring"):
            slowest = 0.0
            for num_bytes in SIZES:
                sent, seconds = _collective(clock, op, group, num_bytes)
                slowest = max(slowest, seconds)
                yield CollectiveRate(op=op, ranks=ranks, span=span, bytes=sent, seconds=slowest)


def _collective(clock: Clock, op: str, group: ProcessGroup, num_bytes: int) -> tuple[float, float]:
    """Bytes that a rank sends, and seconds."""
    ranks, rank = group.size(), group.rank()
    own = torch.ones(num_bytes // 4 // ranks * ranks, device=clock.device)
    parts, received = own.view(ranks, -1), torch.empty_like(own)
    counts = [own.numel() // ranks] * ranks
    metrics = Metrics()
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(own, group, metrics),
        "all_gather": lambda: all_gather(own, group, metrics),
        "reduce_scatter": lambda: reduce_scatter_sum(parts, group, metrics),
        "all_to_all": lambda: all_to_all(own, counts, group, metrics),
        "ring": lambda: send_receive(
            own, received, (rank + 1) % ranks, (rank - 1) % ranks, group, metrics
        ).wait(),
    }  # fmt: skip
    seconds = clock.seconds(calls[op], aim_s=0.05)
    ((count, sent),) = metrics.collectives.values()
    return sent / count, seconds
