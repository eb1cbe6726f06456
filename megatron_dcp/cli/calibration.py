"""``megatron-dcp plan --calibrate``: measures the machine that it runs on, with as many ranks as there are."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from megatron_dcp.cli.failure import GRACE_S

if TYPE_CHECKING:
    from megatron_dcp.planner import Machine

RANKS_ON_CPU = 2
MOST_PER_CORE = 4


def check_machine_file(path: str) -> None:
    """Raise ``ValueError`` unless a measured machine may be written there and is found again."""
    if not path.lower().endswith(".json"):
        raise ValueError(f"--calibrate {path}: give a name that ends in .json, by which --gpu knows it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"--calibrate {path} is no file; give the name of one")


def ranks_here(ranks: int | None) -> int:
    """How many ranks this machine is measured with: as given, else one for each GPU, or two without.

    Raises:
        ValueError: More than there are GPUs, or without any, more than a few for each core.
    """
    import torch

    gpus = torch.cuda.device_count()
    if ranks is not None and 0 < gpus < ranks:
        raise ValueError(f"--gpus {ranks} cannot be measured: this machine has {gpus}; leave --gpus out")
    most = MOST_PER_CORE * len(os.sched_getaffinity(0))
    if ranks is not None and gpus == 0 and ranks > most:
        raise ValueError(
            f"--gpus {ranks} cannot be measured: there is no GPU, and for its cores {most} ranks are the most"
        )
    return ranks or gpus or RANKS_ON_CPU


def start_ranks(ranks: int, argv: Sequence[str]) -> int:
    """Run a command line in so many processes, as torchrun would; the exit code of the first that fails, or 0.

    Their lines on stderr are all that is said. They end with this process, whatever ends it: also while they start.

    Raises:
        ValueError: One was ended by a signal, so that it could not say so itself.
    """
    from torch import multiprocessing

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # a line for each process that it ends
    others = multiprocessing.active_children()
    try:
        with _environment_of_ranks(ranks):
            started = multiprocessing.spawn(_run_rank, (ranks, list(argv)), nprocs=ranks, join=False)
        while not started.join():
            pass
    except multiprocessing.ProcessExitedException as ended:
        if ended.exit_code > 0:
            return ended.exit_code
        name = signal.Signals(-ended.exit_code).name
        raise ValueError(
            f"rank {ended.error_index} was ended by {name}; the measurement is lost, start it anew"
        ) from None
    finally:
        _end([process for process in multiprocessing.active_children() if process not in others])
    return 0


def _end(processes: Sequence[BaseProcess]) -> None:
    """End those that still run, by force where they do not listen: one that waits for another's store does not."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_S + 1.0
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()


@contextmanager
def _environment_of_ranks(ranks: int) -> Iterator[None]:
    """What all of them need before they import torch."""
    before = dict(os.environ)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_rank(rank: int, ranks: int, argv: list[str]) -> None:
    from megatron_dcp.cli import main

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.exit(main(argv))


def measure(path: str, check: Callable[[], None]) -> Machine | None:
    """Measure with all ranks; the first one writes and prints, and gets the machine.

    Args:
        check: Raises where it would be for nothing.
    """
    from torch import distributed

    from megatron_dcp.calibration import about_machine, calibrate
    from megatron_dcp.distributed import initialize_distributed
    from megatron_dcp.engine.loading import on_all_ranks
    from megatron_dcp.planner.measured import save_machine
    from megatron_dcp.planner.render import render_machine

    logging.getLogger("megatron_dcp.startup").setLevel(logging.WARNING)  # of the small models that are run
    existed = distributed.is_initialized()
    initialize_distributed()
    on_all_ranks(check)
    machine, about = calibrate(), about_machine()
    first = distributed.get_rank() == 0
    on_all_ranks(lambda: save_machine(machine, path, about) if first else None)
    if not existed:
        distributed.destroy_process_group()
    if not first:
        return None
    print(render_machine(machine, about), f"written to {path}", sep="\n", flush=True)
    return machine
