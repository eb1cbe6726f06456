"""The worker pool itself: results, errors, deaths and hangs, and that the pool is good for more after each."""

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
from torch import distributed

import workers
from workers import WorkerDied, WorkerTimeout, run_on_ranks


@dataclass(frozen=True)
class Point:
    rank: int
    value: torch.Tensor


class Awkward(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def gathered(rank: int, world: int, offset: int) -> Point:
    value = torch.full((2,), float(rank + offset))
    distributed.all_reduce(value)
    assert distributed.get_rank() == rank and distributed.get_world_size() == world
    return Point(rank, value)


def process_id(rank: int, world: int) -> int:
    return os.getpid()


def threads(rank: int, world: int) -> tuple[int, bool]:
    return torch.get_num_threads(), torch.cuda.is_available()


def raises_on(rank: int, world: int, bad: int) -> None:
    group = distributed.new_group()
    if rank == bad:
        raise LookupError(f"no {bad} here")
    distributed.all_reduce(torch.ones(1), group=group)


def raises_awkwardly(rank: int, world: int) -> None:
    raise Awkward(1, 2)


def returns_lambda(rank: int, world: int) -> object:
    return lambda: rank


def dies_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        os.write(2, b"last words\n")
        os._exit(3)
    distributed.all_reduce(torch.ones(1))


def killed(rank: int, world: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps_on(rank: int, world: int, bad: int) -> int:
    if rank == bad:
        time.sleep(1000)
    return rank


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_in_rank_order(world: int) -> None:
    points = run_on_ranks(world, gathered, 5)
    assert [point.rank for point in points] == list(range(world))
    for point in points:
        assert isinstance(point, Point)
        assert point.value.tolist() == [sum(rank + 5.0 for rank in range(world))] * 2


def test_workers_are_reused_and_the_smaller_world_is_part_of_the_larger() -> None:
    three = run_on_ranks(3, process_id)
    assert len(set(three)) == 3 and os.getpid() not in three
    assert run_on_ranks(2, process_id) == three[:2]


def test_workers_use_one_thread_and_no_gpu() -> None:
    assert run_on_ranks(1, threads) == [(1, False)]


def test_error_is_raised_with_rank_and_traceback_and_workers_live_on() -> None:
    before = run_on_ranks(3, process_id)
    with pytest.raises(LookupError, match="no 1 here") as caught:
        run_on_ranks(3, raises_on, 1)
    note = "\n".join(caught.value.__notes__)
    assert "on rank 1:" in note and "in raises_on" in note
    assert run_on_ranks(3, process_id) == before


def test_expected_errors_are_returned_per_rank() -> None:
    first, second = run_on_ranks(2, raises_on, 0, expect_errors=True)
    assert isinstance(first, LookupError)
    assert isinstance(second, RuntimeError)  # gloo: its peer closed the connection
    assert "in raises_on" in first.__notes__[0] and "on rank 1:" in second.__notes__[0]
    assert run_on_ranks(2, sleeps_on, -1, expect_errors=True) == [0, 1]


def test_exception_that_cannot_be_pickled_keeps_its_name_and_message() -> None:
    with pytest.raises(RuntimeError, match="Awkward: 1 and 2"):
        run_on_ranks(1, raises_awkwardly)


def test_result_that_cannot_be_pickled_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(Exception, match="pickle|local object"):
        run_on_ranks(2, returns_lambda)


def test_dead_rank_is_named_with_its_last_output_and_the_pool_restarts() -> None:
    before = run_on_ranks(2, process_id)
    with pytest.raises(WorkerDied, match=r"rank 1 died \(exit code 3\)(.|\n)*last words"):
        run_on_ranks(2, dies_on, 1)
    assert set(run_on_ranks(2, process_id)).isdisjoint(before)


def test_dead_rank_is_one_of_the_expected_errors() -> None:
    alive, dead = run_on_ranks(2, dies_on, 1, expect_errors=True)
    assert isinstance(alive, RuntimeError) and not isinstance(alive, WorkerDied)
    assert isinstance(dead, WorkerDied)
    assert [point.rank for point in run_on_ranks(2, gathered, 0)] == [0, 1]


def test_signal_that_killed_a_worker_is_named() -> None:
    with pytest.raises(WorkerDied, match="SIGKILL"):
        run_on_ranks(1, killed)


@pytest.mark.parametrize("expect_errors", [False, True])
def test_hanging_rank_is_stopped_with_its_stack(expect_errors: bool) -> None:
    with pytest.raises(WorkerTimeout, match=r"ranks \[1\] did not end within 0.5 s(.|\n)*in sleeps_on"):
        run_on_ranks(2, sleeps_on, 1, timeout=0.5, expect_errors=expect_errors)
    assert run_on_ranks(2, sleeps_on, -1) == [0, 1]


def test_what_cannot_run_is_refused_before_it_starts() -> None:
    with pytest.raises(ValueError, match="world=9"):
        run_on_ranks(9, process_id)
    with pytest.raises(ValueError, match="module-level"):
        run_on_ranks(1, lambda rank, world: None)


def test_close_ends_every_process() -> None:
    (pid,) = run_on_ranks(1, process_id)
    workers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
