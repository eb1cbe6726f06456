"""``megatron-dcp plan --calibrate``: measures the machine that it runs on, with as many ranks as there are."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

RANKS_ON_CPU = 2


def start_ranks(ranks: int | None, argv: Sequence[str]) -> int:
    """Run a command line under torchrun, on this machine; its exit code.

    Args:
        ranks: How many; ``None``: one for each GPU, or two on a CPU.

    Raises:
        ValueError: More ranks than GPUs.
    """
    import torch

    gpus = torch.cuda.device_count()
    ranks = ranks or gpus or RANKS_ON_CPU
    if 0 < gpus < ranks:
        raise ValueError(f"--gpus {ranks} cannot be measured: this machine has {gpus}; leave --gpus out")
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with subprocess.Popen(
        [*command, "-m", "megatron_dcp", *argv], env={"OMP_NUM_THREADS": threads} | os.environ
    ) as started:
        try:
            return started.wait()
        except BaseException:
            started.terminate()  # it ends its ranks
            raise


def measure(path: str, check: Callable[[], None]) -> bool:
    """Measure with all ranks, write and print; whether this is the rank that goes on.

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
    if first:
        print(render_machine(machine, about), f"written to {path}", sep="\n", flush=True)
    return first
