"""What ``profile`` found: numbers for a program, a table and advice for a person. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megatron_dcp.profiling.advice import Advice
from megatron_dcp.profiling.clock import KINDS, PARTS, Phase, Step

PHASES: tuple[Phase, ...] = ("prefill", "decode")


class RankRun(NamedTuple):
    """The steps of one rank.

    Attributes:
        rank: In the world.
        dcp_rank: Whose shard it has.
        stage: Pipeline stage.
        is_driver: Whether it plans and samples.
        steps: All of the run.
    """

    rank: int
    dcp_rank: int
    stage: int
    is_driver: bool
    steps: list[Step]


@dataclass(frozen=True, kw_only=True)
class RankPhase:
    """One rank's part of a phase, in seconds.

    Attributes:
        wall: Of its steps.
        compute: Of these, in the model and in no collective.
        communication: Of these, in collectives of the model, waiting for slower ranks included.
        waited: For the GPU; ``None`` without one.
    """

    rank: int
    wall: float
    compute: float
    communication: float
    waited: float | None


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """All steps of one phase.

    Attributes:
        steps, tokens: So many, over the whole run.
        wall: Seconds of the steps, mean over ranks.
        table: Kind → part → seconds, mean over ranks; adds up to ``wall``. Kinds without time are left out.
        ranks: By rank.
    """

    phase: Phase
    steps: int
    tokens: int
    wall: float
    table: dict[str, dict[str, float]]
    ranks: tuple[RankPhase, ...]

    @property
    def slowest(self) -> RankPhase:
        """The rank that computes longest: the others wait for it."""
        return max(self.ranks, key=lambda each: each.compute)

    @property
    def imbalance(self) -> float:
        """By how much it does so longer than the mean of the ranks."""
        mean = sum(each.compute for each in self.ranks) / len(self.ranks)
        return self.slowest.compute / mean - 1 if mean else 0.0

    @property
    def spread(self) -> float:
        """Longest over shortest compute of a rank, minus 1."""
        least = min(each.compute for each in self.ranks)
        return self.slowest.compute / least - 1 if least else 0.0

    @property
    def communication_share(self) -> float:
        """Of the time, in collectives of the model; what followers wait for the driver is not among them."""
        return sum(parts["communication"] for kind, parts in self.table.items() if kind != "engine") / self.wall

    @property
    def engine_share(self) -> float:
        """Of the time, outside the model."""
        return sum(self.table.get("engine", {}).values()) / self.wall

    @property
    def gpu_wait_share(self) -> float | None:
        """Of the time, the host waiting for the GPU."""
        waits = [each.waited for each in self.ranks if each.waited is not None]
        return sum(waits) / len(waits) / self.wall if waits else None

    def share(self, part: str) -> float:
        """Of the time, in one part, all kinds together."""
        return sum(parts[part] for parts in self.table.values()) / self.wall


def phase_report(phase: Phase, runs: Sequence[RankRun]) -> PhaseReport | None:
    """The phase's steps of all ranks; ``None`` if there were none."""
    of_rank = [[step for step in run.steps if step.phase == phase] for run in runs]
    if not of_rank[0]:
        return None
    ranks, totals = [], [0.0] * (len(KINDS) * len(PARTS))
    for run, steps in zip(runs, of_rank, strict=True):
        own = [sum(column) for column in zip(*(step.parts for step in steps), strict=True)]
        totals = [total + mine / len(runs) for total, mine in zip(totals, own, strict=True)]
        in_model = own[: KINDS.index("engine") * len(PARTS)]
        communication = sum(in_model[PARTS.index("communication") :: len(PARTS)])
        waits = [step.waited_s for step in steps if step.waited_s is not None]
        ranks.append(
            RankPhase(
                rank=run.rank,
                wall=sum(step.seconds for step in steps),
                compute=sum(in_model) - communication,
                communication=communication,
                waited=sum(waits) if waits else None,
            )
        )
    rows = {kind: totals[i * len(PARTS) : (i + 1) * len(PARTS)] for i, kind in enumerate(KINDS)}
    return PhaseReport(
        phase=phase,
        steps=len(of_rank[0]),
        tokens=sum(step.tokens for step in of_rank[0]),
        wall=sum(rank.wall for rank in ranks) / len(ranks),
        table={kind: dict(zip(PARTS, row, strict=True)) for kind, row in rows.items() if any(row)},
        ranks=tuple(ranks),
    )


class KVPoint(NamedTuple):
    """The KV pool at one moment.

    Attributes:
        time_s: Since the run began.
        held: Of the blocks, by running sequences.
        fill: Of each DCP rank's slots, with a token in them.
        waiting: Sequences that wait.
        window_held: Of the blocks of layers with a sliding window, by running sequences; ``None``: no such layers.
    """

    time_s: float
    held: float
    fill: tuple[float, ...]
    waiting: int
    window_held: float | None


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """The outcome of ``profile``; ``str()`` of it is the report that a person reads.

    Attributes:
        settings: What ran, by name.
        phases: Prefill and decode, where there were such steps.
        runs: The steps of every rank.
        kv: The pool over time.
        mark_s: Seconds that one turn of the clock's hand costs in a loop.
        preemptions: In the run.
        prefix_hits: Of the prompt tokens, found in the prefix cache.
        advice: By rule.
    """

    settings: dict[str, str]
    phases: tuple[PhaseReport, ...]
    runs: tuple[RankRun, ...]
    kv: tuple[KVPoint, ...]
    mark_s: float
    preemptions: int
    prefix_hits: float
    advice: tuple[Advice, ...]

    def __getitem__(self, phase: str) -> PhaseReport:
        """The phase of that name; ``KeyError`` if there is none."""
        for each in self.phases:
            if each.phase == phase:
                return each
        raise KeyError(phase)

    def cost_share(self, phase: str) -> float:
        """Of a phase's time, the least that measuring takes: turns of the hand times the cost of one in a loop."""
        steps = [step for step in self.runs[0].steps if step.phase == phase]
        return self.mark_s * sum(step.marks for step in steps) / sum(step.seconds for step in steps)

    def to_dict(self) -> dict[str, Any]:
        """All numbers, of types that JSON has; steps without their segments."""
        return {
            "settings": self.settings,
            "phases": [
                {
                    **asdict(each),
                    "communication_share": each.communication_share,
                    "slowest_rank": each.slowest.rank,
                    "imbalance": each.imbalance,
                    "spread": each.spread,
                    "measuring_share": self.cost_share(each.phase),
                }
                for each in self.phases
            ],
            "ranks": [
                {
                    **{name: getattr(run, name) for name in ("rank", "dcp_rank", "stage", "is_driver")},
                    "steps": [
                        {
                            "phase": step.phase,
                            "tokens": step.tokens,
                            "start_s": step.start_s,
                            "seconds": step.seconds,
                            "parts": dict(zip(PARTS, part_sums(step), strict=True)),
                        }
                        for step in run.steps
                    ],
                }
                for run in self.runs
            ],
            "kv": [point._asdict() for point in self.kv],
            "preemptions": self.preemptions,
            "prefix_hits": self.prefix_hits,
            "advice": [asdict(each) for each in self.advice],
        }

    def __str__(self) -> str:
        width = max(map(len, self.settings))
        lines = [f"{name.ljust(width)}  {value}" for name, value in self.settings.items()]
        for each in self.phases:
            lines += ["", *_phase_lines(each, self.cost_share(each.phase))]
        lines += ["", *_kv_lines(self)]
        return "\n".join([*lines, "", "advice", *(f"  - {each.text}" for each in self.advice)])


def part_sums(step: Step) -> list[float]:
    """Seconds of a step in each of `PARTS`, all kinds together."""
    return [sum(step.parts[i :: len(PARTS)]) for i in range(len(PARTS))]


def _phase_lines(phase: PhaseReport, cost: float) -> list[str]:
    header = ["ms per step", *PARTS, "all", "us per token", "share"]
    rows = [_row(kind, list(parts.values()), phase) for kind, parts in phase.table.items()]
    whole = _row("all", [sum(parts[part] for parts in phase.table.values()) for part in PARTS], phase)
    widths = [max(len(row[i]) for row in [header, *rows, whole]) for i in range(len(header))]

    def line(row: list[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "  " + "  ".join(cells)

    slowest = phase.slowest
    return [
        f"{phase.phase}: {phase.steps} steps, {phase.tokens:,} tokens, {phase.wall:.3f} s",
        *map(line, [header, *rows, whole]),
        f"  communication in the model {phase.communication_share:.1%} of the time; slowest rank {slowest.rank}, "
        f"computing {phase.imbalance:.1%} longer than the mean, {phase.spread:.1%} longer than the fastest; measuring "
        f"took at least {cost:.1%}",
    ]


def _row(name: str, parts: list[float], phase: PhaseReport) -> list[str]:
    total = sum(parts)
    cells = [f"{1e3 * seconds / phase.steps:.3f}" for seconds in (*parts, total)]
    return [name, *cells, f"{1e6 * total / phase.tokens:.1f}", f"{total / phase.wall:.1%}"]


def _kv_lines(report: ProfileReport) -> list[str]:
    if not report.kv:
        return []
    fullest = max(report.kv, key=lambda point: point.held)
    fill = ", ".join(f"{max(point.fill[rank] for point in report.kv):.0%}" for rank in range(len(fullest.fill)))
    in_windows = max((point.window_held for point in report.kv if point.window_held is not None), default=None)
    windows = "" if in_windows is None else f" ({in_windows:.0%} of the windows' own)"
    return [
        f"KV pool: at most {fullest.held:.0%} of the blocks held{windows}; slots filled by dcp rank: {fill}; "
        f"preemptions: {report.preemptions}; prefix hits {report.prefix_hits:.0%} of the prompt tokens"
    ]
