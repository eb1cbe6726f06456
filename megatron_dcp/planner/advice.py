"""The recommendation in words: which resource binds, and what the next larger dcp would cost."""

from __future__ import annotations

from megatron_dcp.planner.plan import Plan, Row
from megatron_dcp.planner.timing import StepTime

_PARTS = {
    "weights": "reading and computing with the weights",
    "kv": "reading the KV cache",
    "exchange": "the exchange of partial attention",
    "collectives": "the other collectives",
    "overhead": "the kernels' own time",
}
SHOWN_PROBLEMS = 3


def advise(plan: Plan) -> str:
    """Two sentences about the configuration to take; where none fits, what would."""
    best = plan.best
    if best is None:
        return _none_fits(plan)
    binds, seconds = binding(best.step)
    room = plan.workload.memory_share * plan.machine.memory_bytes
    first = (
        f"Take {best.candidate.name}: of {_ms(best.tpot_s)} per token, the largest part is {_PARTS[binds]} "
        f"({_ms(seconds)}), with {_gb(best.memory.total)} of the {_gb(room)} of a {plan.machine.unit} in use."
    )
    return f"{first} {_next(plan, best)}"


def binding(step: StepTime) -> tuple[str, float]:
    """The part of a step that takes longest, and its seconds."""
    name = max(_PARTS, key=lambda part: getattr(step, part))
    return name, getattr(step, name)


def problems(plan: Plan) -> list[str]:
    """Why configurations do not fit, those that miss by least first."""
    missing = plan.distinct([row for row in plan.rows if row.problem is not None])
    lines = [f"{row.candidate.name}: {row.problem}" for row in missing[:SHOWN_PROBLEMS]]
    if len(missing) > SHOWN_PROBLEMS:
        lines.append(f"and {len(missing) - SHOWN_PROBLEMS} more")
    return lines


def _next(plan: Plan, best: Row) -> str:
    other, unit = plan.next_dcp(best), plan.machine.unit
    if other is None:
        gpus = f"{plan.gpus} {unit}{'s' if plan.gpus > 1 else ''}"
        return f"No larger dcp than {best.candidate.dcp} is among the listed configurations of {gpus}."
    more, memory = other.tpot_s - best.tpot_s, other.memory
    time = f"{_ms(abs(more))} {'more' if more >= 0 else 'less'} per token"
    exchange = other.step.exchange - best.step.exchange
    kept = (
        f"weights {_gb(best.memory.weights)} -> {_gb(memory.weights)} and KV {_gb(best.memory.kv)} -> "
        f"{_gb(memory.kv)} per {unit}"
    )
    fits = f"room for {other.largest_batch} sequences instead of {best.largest_batch}"
    if other.problem is not None:
        fits = f"and would not fit: {other.problem}"
    return (
        f"The next larger dcp, {other.candidate.name}, would take {time} ({_ms(exchange)} of it for exchanges), "
        f"{kept}, {fits}."
    )


def _none_fits(plan: Plan) -> str:
    work, unit = plan.workload, plan.machine.unit
    what = f"{work.batch} sequence{'s' if work.batch > 1 else ''} of {work.context} tokens"
    most = max(plan.rows, key=lambda row: row.largest_batch)
    longest = max(plan.rows, key=lambda row: row.largest_context)
    text = f"Nothing fits: no configuration of {plan.gpus} x {plan.machine.name} holds {what}."
    if most.largest_batch:
        text += f" {most.candidate.name} would hold {most.largest_batch} at this context."
    elif longest.largest_context:
        text += f" {longest.candidate.name} would hold {longest.largest_context} tokens at this batch."
    else:
        least = min(row.memory.total for row in plan.rows)
        text += f" The least that a {unit} would need is {_gb(least)}; take more {unit}s."
    return text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
