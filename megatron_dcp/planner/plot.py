"""A plan as a picture: what fills the memory of each configuration, and throughput against interactivity."""

from __future__ import annotations

from typing import Any

from megatron_dcp.figures import new_figure
from megatron_dcp.planner.plan import Plan, Row, frontier
from megatron_dcp.planner.render import distinct

_PARTS = (("weights", "weights"), ("kv", "KV cache"), ("activations", "activations"), ("work", "work space"))
_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3")


def plot(plan: Plan, path: str, top: int) -> None:
    """Draw the ``top`` configurations to ``path``, those that fit first.

    Raises:
        ValueError: matplotlib is not installed, or the file cannot be written.
    """
    rows = distinct(plan.rows)[:top]
    figure = new_figure(path, 15, 2.5 + 0.45 * max(len(rows), 8))
    left, right = figure.subplots(1, 2)
    work = plan.workload
    figure.suptitle(
        f"{plan.model_name} on {plan.gpus} x {plan.machine.name}: {work.batch} x {work.context} tokens, "
        f"{work.weight_dtype} weights (estimates)"
    )
    _memory(left, plan, rows)
    _frontier(right, plan, [row for row in rows if row.largest_batch])
    figure.savefig(path, dpi=110)


def _memory(axes: Any, plan: Plan, rows: list[Row]) -> None:
    places, lefts = list(range(len(rows))), [0.0] * len(rows)
    for (part, label), color in zip(_PARTS, _COLORS, strict=True):
        sizes = [getattr(row.memory, part) / 1e9 for row in rows]
        axes.barh(places, sizes, left=lefts, label=label, color=color)
        lefts = [left + size for left, size in zip(lefts, sizes, strict=True)]
    limit = plan.workload.memory_share * plan.machine.memory_bytes / 1e9
    axes.axvline(limit, color="black", linestyle="--", linewidth=1, label=f"usable: {limit:.0f} GB")
    for place, (row, total) in enumerate(zip(rows, lefts, strict=True)):
        note = f" {total:.0f} GB" + ("" if row.problem is None else ", does not fit")
        axes.text(
            total, place, note, va="center", fontsize="small", color="black" if row.problem is None else "#c44e52"
        )
    axes.set_yticks(places, [_label(plan, row) for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max([limit, *lefts]))
    axes.set_xlabel("GB per GPU")
    axes.set_title("memory")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.4, -0.09), ncols=3)


def _frontier(axes: Any, plan: Plan, rows: list[Row]) -> None:
    points = []
    for row in rows:
        curve = frontier(plan, row)
        points += curve
        axes.plot([x for _, x, _ in curve], [y for _, _, y in curve], ".-", linewidth=0.9, label=_label(plan, row))
    best: list[tuple[int, float, float]] = []
    for point in sorted(points, key=lambda each: (-each[1], -each[2])):
        if not best or point[2] > best[-1][2]:
            best.append(point)
    axes.plot(
        [x for _, x, _ in best], [y for _, _, y in best], color="black", linewidth=3, alpha=0.25, label="frontier"
    )
    for batch, x, y in best[:: max(1, len(best) // 6)]:
        axes.annotate(f"{batch}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize="small")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("interactivity: tokens/s of one sequence")
    axes.set_ylabel("throughput: tokens/s per GPU")
    axes.set_title("throughput and interactivity (numbers: sequences in all)")
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize="x-small", loc="lower left")


def _label(plan: Plan, row: Row) -> str:
    return row.candidate.name + (" *" if row is plan.best else "")
