"""Tensors that go round a ring: who gets what, in which order, how much is sent, and what becomes of a lost rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import Tensor, distributed

from megatron_dcp.comm.collectives import CollectiveError
from megatron_dcp.comm.ring import ring
from megatron_dcp.metrics import Metrics
from workers import WorkerDied, run_on_ranks

SIZES = (3, 1, 70_000)


def own_tensor(rank: int, number: int) -> Tensor:
    return torch.full((SIZES[number],), float(10 * rank + number))


def everything(rank: int, world: int, tensors: int) -> tuple[list[tuple[int, int, float]], list[int], dict]:
    """What arrived, when own tensors were asked for, and the traffic."""
    asked, arrived = [], []

    def own() -> Iterator[Tensor]:
        for number in range(tensors):
            asked.append(len(arrived))
            yield own_tensor(rank, number)

    metrics = Metrics()
    hops = ring(own(), distributed.group.WORLD, metrics)
    started = len(asked)
    for hop in hops:
        assert hop.tensor.shape == (SIZES[hop.number],) and hop.tensor.unique().numel() == 1
        arrived.append((hop.number, hop.source, float(hop.tensor[0])))
    return arrived, [started, *asked], metrics.collectives


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("tensors", [0, 1, 3])
def test_every_tensor_comes_to_every_rank(world: int, tensors: int) -> None:
    for rank, (arrived, asked, traffic) in enumerate(run_on_ranks(world, everything, tensors)):
        others = [(rank - hop) % world for hop in range(1, world)]
        assert arrived == [(number, of, 10.0 * of + number) for number in range(tensors) for of in others]
        if world == 1 or not tensors:
            assert not arrived and not traffic
            continue
        # The first is sent before the caller asks for anything; the next one a hop before it is needed.
        assert asked[0] == 1 and asked[1:] == [0, *(turn * (world - 1) - 1 for turn in range(1, tensors))]
        sent = sum(4 * size * (world - 1) for size in SIZES[:tensors])
        assert traffic == {"send_receive": (tensors * (world - 1), sent)}


def loses_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(1)
    for _ in ring(iter([torch.ones(1000)]), distributed.group.WORLD):
        pass


def test_lost_rank_is_one_clear_error_on_the_others() -> None:
    results = run_on_ranks(3, loses_rank_1, expect_errors=True)
    assert isinstance(results[1], WorkerDied)
    for rank in (0, 2):
        assert isinstance(results[rank], CollectiveError)
        assert f"send_receive over ranks [0, 1, 2] failed on rank {rank}" in str(results[rank])


def waits_for_rank_1(rank: int, world: int) -> None:
    group = distributed.new_group(timeout=timedelta(seconds=1))
    try:
        if rank == 0:
            list(ring(iter([torch.ones(1000)]), group))
    finally:
        distributed.barrier()


def test_rank_that_does_not_come_is_an_error_within_the_time_limit() -> None:
    first, second = run_on_ranks(2, waits_for_rank_1, expect_errors=True, timeout=30)
    assert isinstance(first, CollectiveError) and second is None
