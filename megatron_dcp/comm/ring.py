"""Passing tensors around a group: every rank sees those of all others, and holds a few of them at a time.

A transfer is in flight while the caller works on what came before, so that on a GPU, or with a network of its own, it
costs only what is longer than that work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dcp.comm.collectives import Transfer, send_receive
from megatron_dcp.metrics import Metrics


class Hop(NamedTuple):
    """What arrived: the ``number``-th tensor of rank ``source`` of the group."""

    number: int
    source: int
    tensor: Tensor


def ring(tensors: Iterable[Tensor], group: ProcessGroup, metrics: Metrics | None = None) -> Iterator[Hop]:
    """Pass every rank's tensors around; a collective call whose first transfer starts before this returns.

    Args:
        tensors: Own tensors, contiguous. Every rank has as many, of the same shapes and dtypes. Taken one by one, each
            when the one before has gone round.

    Returns:
        For each tensor the ``P - 1`` hops in which those of the other ranks arrive, from the neighbour below on.
        The caller must take all of them, and keep none.

    Raises:
        CollectiveError: A rank of the group is lost.
    """
    hops = _hops(iter(tensors), group, metrics)
    next(hops)
    return hops  # type: ignore[return-value]  # only the first item is None


def _hops(tensors: Iterator[Tensor], group: ProcessGroup, metrics: Metrics | None) -> Iterator[Hop | None]:
    ranks, own = group.size(), group.rank()

    def start(sent: Tensor) -> Transfer:
        return send_receive(sent, torch.empty_like(sent), (own + 1) % ranks, (own - 1) % ranks, group, metrics)

    first = next(tensors, None) if ranks > 1 else None
    transfer = None if first is None else start(first)
    yield None
    number, hop = 0, 1
    while transfer is not None:
        arrived = transfer.wait()
        if hop + 1 < ranks:
            transfer = start(arrived)
        else:
            own_next = next(tensors, None)
            transfer = None if own_next is None else start(own_next)
        yield Hop(number, (own - hop) % ranks, arrived)
        number, hop = (number, hop + 1) if hop + 1 < ranks else (number + 1, 1)
