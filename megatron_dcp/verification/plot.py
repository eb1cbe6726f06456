"""The difference at every token of the text, drawn with matplotlib."""

from __future__ import annotations

from megatron_dcp.figures import new_figure
from megatron_dcp.verification.report import MEANING, VerifyReport


def plot(report: VerifyReport, path: str) -> None:
    """Draw every comparison's log-probability differences by position, on a logarithmic scale, and the threshold.

    Raises:
        ValueError: matplotlib is not installed, or the name of the file says no format.
    """
    figure = new_figure(path, 9, 4)
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
