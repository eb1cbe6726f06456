"""Let Megatron-Core run on a machine without a GPU.

Megatron-Core asks ``torch.cuda.current_device()`` for the device of small tables (RoPE, masks, routers), which
raises where there is no GPU. Inside :func:`megatron_on_cpu` that one call answers with the CPU. Entered
explicitly, by the entry points, the examples and the tests; never at import; does nothing where CUDA works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Make ``torch.cuda.current_device()`` answer with the CPU while the block runs, where there is no GPU.

    Re-entrant. Leaves torch as it was, also after an exception.
    """
    if torch.cuda.is_available():
        yield
        return
    original = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        torch.cuda.current_device = original


def default_device() -> torch.device:
    """The device that this rank computes on: its current GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
