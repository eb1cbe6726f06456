"""A calibration that measures next to nothing, for tests of everything around the numbers."""

from __future__ import annotations


def shrink_calibration() -> None:
    """In this process, for good: small matrices and caches, few steps."""
    from megatron_dcp.calibration import attention, rates, steps

    rates._ON_CPU = rates._Sizes(matrix=64, matrices=2, rows=8)
    attention._ON_CPU = attention._Sizes(kv_bytes=1 << 20, layers=2, chunk=32, chunk_keys=128)
    steps.STEPS, steps.CHUNK = 8, 64
