"""The processes of a benchmark, and how their steps are timed."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_dcp import parallel_state
from megatron_dcp.distributed import initialize_distributed

# Here because every process of a benchmark imports this file before Megatron-Core, which warns once per file.
warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)")


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class World:
    """All ranks of a benchmark. Each runs the same code; in a *turn*, the first ranks work and the others wait."""

    def __init__(self, threads: int) -> None:
        self.rank, self.threads = dist.get_rank(), threads
        self.groups: dict[int, dist.ProcessGroup | None] = {}

    def note(self, message: str) -> None:
        """Say on stderr, from rank 0, what is being measured."""
        if self.rank == 0:
            print(message, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def turn(self, ranks: int) -> Iterator[bool]:
        """The first ``ranks`` ranks share the threads; yields whether this rank is one of them."""
        dist.barrier()
        torch.set_num_threads(max(1, self.threads // ranks))
        yield self.rank < ranks
        dist.barrier()

    def time(self, call: Callable[[], object], ranks: int, aim_s: float) -> float:
        """Median seconds of ``call``, in about ``aim_s`` after one call that is not counted; of the slowest rank."""
        with self.turn(ranks) as joins:
            spent = [0.0]
            if joins:
                call()
                first = seconds(call)
                group = self.groups[ranks]
                more = [max(1, min(20, round(aim_s / max(first, 1e-6))) - 1)]
                dist.broadcast_object_list(more, src=0, group=group)
                spent = [first, *(seconds(call) for _ in range(more[0]))]
                everywhere: list[Any] = [None] * ranks
                dist.all_gather_object(everywhere, spent, group=group)
                spent = [max(of_ranks) for of_ranks in zip(*everywhere, strict=True)]
        return median(spent)

    def make_groups(self, sizes: list[int]) -> None:
        """``groups[n]``: the first ``n`` ranks, for every size; ``None`` on the other ranks. A collective call."""
        groups = {size: dist.new_group(list(range(size))) for size in sizes}
        self.groups = {size: group if self.rank < size else None for size, group in groups.items()}


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def run_on_ranks(function: Callable[..., None], ranks: int, threads: int, *args: Any) -> None:
    """``function(world, *args)`` on torchrun's ranks, or on ``ranks`` processes that this starts: itself and others."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        initialize_distributed()
        _run_rank(function, threads, args)
        return
    with tempfile.TemporaryDirectory() as directory:
        others = [
            mp.get_context("spawn").Process(target=_start, args=(rank, ranks, directory, function, threads, args))
            for rank in range(1, ranks)
        ]
        for process in others:
            process.start()
        try:
            _start(0, ranks, directory, function, threads, args)
        except BaseException:
            for process in others:
                process.terminate()
            raise
        finally:
            for process in others:
                process.join()
    if any(process.exitcode for process in others):
        raise SystemExit(f"a rank ended with exit codes {[process.exitcode for process in others]}")


def _start(rank: int, ranks: int, directory: str, function: Callable[..., None], threads: int, args: Any) -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(directory, "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    _run_rank(function, threads, args)


def _run_rank(function: Callable[..., None], threads: int, args: Any) -> None:
    parallel_state.initialize_model_parallel(1)
    try:
        function(World(threads), *args)
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
