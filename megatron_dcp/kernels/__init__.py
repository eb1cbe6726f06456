"""Our own Triton kernels, and whether they can run. Importing this package does not import triton; its modules do."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

OFF = "MEGATRON_DCP_TRITON"  # =0 turns the kernels off


@cache
def unusable(device: torch.device) -> str | None:
    """``None``, or the reason why the modules of this package must not be imported, or not be used on ``device``.

    Answered once per device and process: the kernel launches of every layer ask.
    """
    if os.environ.get(OFF) == "0":
        return f"turned off by {OFF}=0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return None if capability >= (8, 0) else f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if is_interpreted():
        return None
    return f"no kernels for {device.type}, only for a GPU (or any device with TRITON_INTERPRET=1, slowly, as a test)"


def is_interpreted() -> bool:
    """Whether Triton runs kernels in Python, on any device: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
