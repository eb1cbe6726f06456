"""The ``torch.distributed`` world that everything runs in: torchrun's, or one process alone."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

_time_limit: timedelta | None = None
_LONGEST_S = 1e9  # about 30 years; the clocks of the back ends count nanoseconds in 64 bits


def initialize_distributed(timeout_s: float = 600.0, backend: str | None = None) -> None:
    """Initialise ``torch.distributed`` from torchrun's environment, or as one process where there is none.

    Does nothing but check ``timeout_s`` where it is initialised already.

    Args:
        timeout_s: Seconds after which a collective that some rank never joins fails, in these groups and in those
            that `parallel_state.initialize_model_parallel` makes.
        backend: ``None``: ``nccl`` where there are GPUs, else ``gloo``.

    Raises:
        ValueError: More processes on this machine than GPUs, or a time limit outside (0, 1e9].
    """
    global _time_limit
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= _LONGEST_S:
        raise ValueError(f"timeout_s={timeout_s!r} must be a number of seconds above 0 and at most {_LONGEST_S:g}")
    if dist.is_initialized():
        return
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if "nccl" in backend and "LOCAL_RANK" in os.environ:
        _set_device(int(os.environ["LOCAL_RANK"]))
    _time_limit = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=_time_limit)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_time_limit)


def time_limit() -> timedelta | None:
    """The time limit given to `initialize_distributed`; ``None`` where something else initialised the world."""
    return _time_limit if dist.is_initialized() else None


def _set_device(local_rank: int) -> None:
    devices = torch.cuda.device_count()
    if local_rank >= devices:
        raise ValueError(
            f"LOCAL_RANK={local_rank} has no GPU: this machine has {devices}; start at most {devices} processes on "
            f"it, or initialise with backend='gloo'"
        )
    torch.cuda.set_device(local_rank)
