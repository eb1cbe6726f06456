"""A plan as a picture: what fills the memory of each configuration, and throughput against interactivity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_dcp.figures import new_figure
from megatron_dcp.planner.plan import Plan, Row, frontier

_PARTS = (("weights", "weights"), ("kv", "KV cache"), ("activations", "activations"), ("work", "work space"))
_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3")
_MARKERS = "os^vD*XPd<>"
_MISSED = "#c44e52"
MOST_ROWS = 40  # that can be told apart


def plot(plan: Plan, path: str, top: int) -> None:
    """Draw the ``top`` configurations to ``path``, at most `MOST_ROWS`, those that fit first.

    Raises:
        ValueError: matplotlib is not installed, or the file cannot be written.
    """
    rows = plan.distinct(plan.rows)[: min(top, MOST_ROWS)]
    figure = new_figure(path, 16, 4 + 0.45 * max(len(rows), 8))
    left, right = figure.subplots(1, 2)
    work = plan.workload
    figure.suptitle(
        f"{plan.model_name} on {plan.gpus} x {plan.machine.name}: {work.batch} x {work.context} tokens, "
        f"{work.weight_dtype} weights (estimates; * recommended)"
    )
    _memory(left, plan, rows)
    _frontier(right, plan, [row for row in rows if row.largest_batch >= row.candidate.dp])
    figure.savefig(path, dpi=110)


def _memory(axes: Any, plan: Plan, rows: list[Row]) -> None:
    places, ends = list(range(len(rows))), [0.0] * len(rows)
    for (part, label), color in zip(_PARTS, _COLORS, strict=True):
        sizes = [getattr(row.memory, part) / 1e9 for row in rows]
        axes.barh(places, sizes, left=ends, label=label, color=color)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    limit = plan.workload.memory_share * plan.machine.memory_bytes / 1e9
    near = max(ends) > limit / 20  # else the bars would be slivers beside it
    right = limit if near else 0.0
    if near:
        axes.axvline(limit, color="black", linestyle="--", linewidth=1, label=f"usable: {limit:.3g} GB")
    for place, (row, end) in enumerate(zip(rows, ends, strict=True)):
        fits = row.problem is None
        note = f"  {end:.3g} GB" + ("" if fits else ", does not fit")
        axes.text(max(end, right), place, note, va="center", fontsize="small", color="black" if fits else _MISSED)
    axes.set_yticks(places, [_label(plan, row) for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max([right, *ends]))
    axes.set_xlabel(f"GB per {plan.machine.unit}")
    axes.set_title("memory" if near else f"memory (usable: {limit:.3g} GB)")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=3)


def _frontier(axes: Any, plan: Plan, rows: list[Row]) -> None:
    axes.set_title("throughput and interactivity (numbers: sequences in all)")
    axes.set_xlabel("interactivity: tokens/s of one sequence")
    axes.set_ylabel(f"throughput: tokens/s per {plan.machine.unit}")
    if not rows:
        axes.text(0.5, 0.5, "nothing fits", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    points: list[tuple[int, float, float]] = []
    for number, row in enumerate(rows):
        curve = frontier(plan, row)
        points += curve
        style = {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 4, "linewidth": 0.9}
        axes.plot([x for _, x, _ in curve], [y for _, _, y in curve], label=_label(plan, row), **style)
    best: list[tuple[int, float, float]] = []
    for point in sorted(points, key=lambda each: (-each[1], -each[2])):
        if not best or point[2] > best[-1][2]:
            best.append(point)
    axes.plot([x for _, x, _ in best], [y for _, _, y in best], "k-", linewidth=4, alpha=0.25, label="frontier")
    for batch, x, y in best[:: 1 + len(best) // 8]:
        axes.annotate(f"{batch}", (x, y), textcoords="offset points", xytext=(5, 5), fontsize="small")
    for scale, axis, values in (
        (axes.set_xscale, axes.xaxis, [x for _, x, _ in points]),
        (axes.set_yscale, axes.yaxis, [y for *_, y in points]),
    ):
        scale("log")
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(_between_powers(max(values) / min(values)))
    axes.tick_params(which="both", labelsize="small")
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.45, -0.1), ncols=2)


def _between_powers(span: float) -> Callable[[float, int], str]:
    """Labels of the ticks between powers of ten: as many as there is room for."""
    digits = "123456789" if span < 5 else "25" if span < 100 else ""

    def label(x: float, _: int) -> str:
        return f"{x:g}" if f"{x:e}"[0] in digits else ""

    return label


def _label(plan: Plan, row: Row) -> str:
    return row.candidate.name + (" *" if row is plan.best else "")
