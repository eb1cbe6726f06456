"""The report as one HTML page that needs nothing else: no network, no prompts, its data in it as JSON. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from megatron_dcp.profiling.clock import KINDS, PARTS, Step
from megatron_dcp.profiling.report import PHASES, PhaseReport, ProfileReport, RankRun, part_sums

MAX_STEPS = 3000
"""Steps of a rank that the page has; of longer runs the first."""
MAX_SEGMENTS = 12_000
"""Segments of a rank that it has: steps at equal distances show theirs."""


def page(report: ProfileReport) -> str:
    """The page. Nothing in the report's texts can end its script or become markup."""
    template = files("megatron_dcp.profiling").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(page_data(report), separators=(",", ":"), allow_nan=False)
    return template.replace("__DATA__", text.replace("<", "\\u003c"))  # no "</script>", no "<!--"


def page_data(report: ProfileReport) -> dict[str, Any]:
    """What the page shows; times of the timeline in ms, of tables in seconds."""
    steps = [run.steps[:MAX_STEPS] for run in report.runs]
    end = max(step.start_s + step.seconds for of_rank in steps for step in of_rank)
    notes = [f"Every number is a mean over {len(report.runs)} ranks unless it names one."]
    if any(len(run.steps) > MAX_STEPS for run in report.runs):
        notes.append(f"The timeline has the first {MAX_STEPS:,} of {len(report.runs[0].steps):,} steps.")
    notes.append(
        f"Preemptions: {report.preemptions}; {report.prefix_hits:.0%} of the prompt tokens came from the prefix cache."
    )
    return {
        "settings": list(report.settings.items()),
        "kinds": KINDS,
        "parts": PARTS,
        "advice": [each.text for each in report.advice],
        "phases": [_phase(each, report.cost_share(each.phase)) for each in report.phases],
        "ranks": [_rank(run, of_rank) for run, of_rank in zip(report.runs, steps, strict=True)],
        "kv": [
            [
                _ms(point.time_s),
                round(point.held, 4),
                [round(each, 4) for each in point.fill],
                point.waiting,
                round(point.window_held or 0.0, 4),
            ]
            for point in report.kv[:MAX_STEPS]
        ],
        "windows": any(point.window_held is not None for point in report.kv),
        "end": _ms(end),
        "notes": " ".join(notes),
    }


def _phase(phase: PhaseReport, cost: float) -> dict[str, Any]:
    return {
        "name": phase.phase,
        "steps": phase.steps,
        "tokens": phase.tokens,
        "wall": phase.wall,
        "rows": [[kind, list(parts.values())] for kind, parts in phase.table.items()],
        "note": f"Communication in the model {phase.communication_share:.1%}. Slowest: rank {phase.slowest.rank}, "
        f"computing {phase.imbalance:.1%} longer than the mean and {phase.spread:.1%} longer than the fastest. "
        f"Measuring took at least {cost:.1%}.",
    }


def _rank(run: RankRun, steps: Sequence[Step]) -> dict[str, Any]:
    label = f"rank {run.rank}, dcp {run.dcp_rank}" + (", driver" if run.is_driver else "")
    segments = sum(len(step.times) for step in steps)
    every = max(1, -(-segments // MAX_SEGMENTS))
    return {
        "label": label,
        "steps": [
            [
                _ms(step.start_s),
                _ms(step.seconds),
                PHASES.index(step.phase),
                step.tokens,
                list(map(_ms, part_sums(step))),
            ]
            for step in steps
        ],
        "segments": {
            number: [[_ms(begin), key] for begin, key in zip(step.times, step.keys, strict=True)]
            for number, step in enumerate(steps)
            if number % every == 0
        },
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)
