"""Where pictures go: a matplotlib figure that needs no display."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Raise ``ValueError`` unless a plot can be written to ``path``, as far as can be known beforehand."""
    if not path.lower().endswith(SUFFIXES):
        raise ValueError(f"{path!r} names no format for a plot; use a name that ends in {', '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ValueError("a plot needs matplotlib: pip install 'megatron-dcp[plot]'")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"{os.path.dirname(path)!r} is no directory; make it first")
    new = not os.path.exists(path)
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise ValueError(f"{path!r} cannot be written: {error.strerror}; use another name") from error
    if new:
        os.remove(path)


def new_figure(path: str, width: float, height: float) -> Any:
    """A ``matplotlib.figure.Figure`` of this size in inches, to be saved at ``path``.

    Raises:
        ValueError: As `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
