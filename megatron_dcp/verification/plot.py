"""The difference at every token of the text, drawn with matplotlib."""

from __future__ import annotations

import os
from importlib.util import find_spec

from megatron_dcp.verification.report import MEANING, VerifyReport

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


def plot(report: VerifyReport, path: str) -> None:
    """Draw every comparison's log-probability differences by position, on a logarithmic scale, and the threshold.

    Raises:
        ValueError: matplotlib is not installed, or the name of the file says no format.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    smallest = min((d for each in report.comparisons for d in each.logprob_diffs if d > 0), default=1e-8)
    for each in report.comparisons:
        differences = [max(d, smallest / 2) for d in each.logprob_diffs]  # 0 has no logarithm
        axes.plot(each.positions, differences, ".-", markersize=3, linewidth=0.7, label=MEANING[each.name])
    axes.axhline(report.max_logprob_diff, color="black", linestyle="--", linewidth=0.8, label="allowed")
    axes.set_yscale("log")
    axes.set_xlabel("position in the text")
    axes.set_ylabel("log-probability difference")
    axes.set_title(f"{'PASS' if report.passed else 'FAIL'}: {report.settings['model']}, {report.settings['ranks']}")
    axes.legend(fontsize="small")
    figure.savefig(path)
