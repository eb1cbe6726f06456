"""Which tests run with both lines of Megatron-Core: those marked ``mcore_line``, but for cases marked ``one_line``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def some_with_both(cases: Sequence[tuple[Any, ...]], both: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test that is for both lines, of which only ``both`` are: the others differ in sizes alone."""
    assert set(both) < set(cases)
    return [pytest.param(*case, marks=() if case in both else pytest.mark.one_line) for case in cases]
