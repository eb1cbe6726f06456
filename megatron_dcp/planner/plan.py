"""All configurations of a model on some GPUs with what each costs, and the one to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_dcp.config import EngineConfig, check_at_least
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.planner.candidates import Candidate, Pins, candidates, legal_exchanges
from megatron_dcp.planner.machine import Machine
from megatron_dcp.planner.memory import Memory, largest, memory
from megatron_dcp.planner.prefill import prefill_seconds
from megatron_dcp.planner.timing import StepTime, Traffic, decode_time, decode_traffic
from megatron_dcp.planner.weights import check_weight_dtype, weight_bytes

MOST_SEQUENCES = 1 << 16  # of one replica: what `largest_batch` is looked for in
MOST_LAYERS = 1 << 14  # that are added up one by one
SAME = 1.01  # times that differ by less are the same to a model like this


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is to be served.

    Attributes:
        context: Tokens of every sequence.
        batch: Sequences that decode at the same time, over all replicas.
        weight_dtype: `megatron_dcp.planner.weights.WeightDtype`. The engine itself computes in 16 and 32 bits.
        memory_share: Share of a GPU's memory that may be used; the rest is for CUDA, NCCL and fragmentation.
        chunk: Most prompt tokens of a step.
    """

    context: int
    batch: int = 1
    weight_dtype: str = "bfloat16"
    memory_share: float = 0.9
    chunk: int = EngineConfig.prefill_chunk_size

    def __post_init__(self) -> None:
        for name in ("context", "batch", "chunk"):
            check_at_least(name, getattr(self, name), 1)
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"memory_share={self.memory_share} must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration and what it costs.

    Attributes:
        batch: Sequences of one replica.
        problem: Why it does not fit; ``None``: it does.
        largest_batch: Sequences of all replicas that fit at this context.
        largest_context: Tokens that fit at this batch, at most the model's.
        exchanges: Traffic with every exchange that the layout can run, by its name.
        ttft_s: Seconds to the first token of a prompt of the whole context that has a replica for itself.
    """

    candidate: Candidate
    batch: int
    memory: Memory
    problem: str | None
    largest_batch: int
    largest_context: int
    traffic: Traffic
    exchanges: dict[str, Traffic]
    step: StepTime
    ttft_s: float
    sequences: int

    @property
    def tpot_s(self) -> float:
        """Seconds from one token of a sequence to the next."""
        return self.step.total

    @property
    def throughput(self) -> float:
        """Tokens per second and GPU."""
        return self.sequences / self.tpot_s / self.candidate.gpus

    @property
    def interactivity(self) -> float:
        """Tokens per second of one sequence."""
        return 1 / self.tpot_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Rows that fit, the fastest first, then those that do not, the smallest first."""

    model_name: str
    model: ModelConfig
    machine: Machine
    gpus: int
    workload: Workload
    rows: tuple[Row, ...]

    @cached_property
    def fitting(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.problem is None)

    @cached_property
    def best(self) -> Row | None:
        """The one to take: the fastest that fits; among those as fast, the one with the least dcp, then the most room.

        With a given batch the fastest has the largest throughput and interactivity as well.
        """
        exact = [row for row in self.fitting if row.candidate.kv_cache_dtype not in ("fp8_e4m3", "int8")]
        if not (able := exact or self.fitting):
            return None
        bound = min(row.tpot_s for row in able) * SAME
        near = [row for row in able if row.tpot_s <= bound]
        return min(near, key=_simplest)

    def distinct(self, rows: Sequence[Row]) -> list[Row]:
        """Of configurations that take the same time and differ in how experts are shared only, one: the best, if it is
        among them, else the first.
        """
        seen: dict[tuple[Any, ...], Row] = {}
        for row in rows:
            one = row.candidate
            kind = one.tp, one.dcp, one.layout, one.pp, one.dp, one.kv_cache_dtype, round(row.tpot_s, 5)
            if kind not in seen or row is self.best:
                seen[kind] = row
        return list(seen.values())

    def next_dcp(self, row: Row) -> Row | None:
        """The configuration most like ``row`` with the next larger dcp on the same GPUs; one that fits, if any does."""
        one = row.candidate
        larger = [
            other
            for other in self.rows
            if other.candidate.dcp > one.dcp and other.candidate.kv_cache_dtype == one.kv_cache_dtype
        ]
        if not larger:
            return None

        def unlike(other: Row) -> tuple[bool, bool, int, bool, float]:
            two = other.candidate
            return other.problem is not None, two.pp != one.pp, two.dcp, two.layout != one.layout, other.tpot_s

        return min(larger, key=unlike)


def _simplest(row: Row) -> tuple[int, int, int, int, float]:
    one = row.candidate
    return one.dcp, one.pp, -row.largest_batch, -one.parallel.expert_model_parallel_size, row.tpot_s


def make_plan(
    model_name: str, model: ModelConfig, machine: Machine, gpus: int, workload: Workload, pins: Pins | None = None
) -> Plan:
    """Every legal configuration, evaluated.

    Raises:
        ValueError: Sizes that no configuration can have, a context beyond the model's, or several GPUs of a machine
            that was measured with one rank.
    """
    if machine.ranks == 1 and gpus > 1:
        raise ValueError(
            f"{machine.name} was measured with one rank, so without collectives; for {gpus} GPUs measure it with "
            "several: `megatron-dcp plan --calibrate FILE.json --gpus N`"
        )
    if model.num_layers > MOST_LAYERS:
        raise ValueError(f"num_layers={model.num_layers} is above {MOST_LAYERS}; plan for fewer layers")
    check_weight_dtype(model, workload.weight_dtype)
    if workload.context > model.max_position_embeddings:
        raise ValueError(
            f"context={workload.context} is beyond the {model.max_position_embeddings} positions of {model_name}; "
            f"give at most {model.max_position_embeddings}"
        )
    rows = [evaluate(model, one, machine, workload) for one in candidates(model, gpus, pins or Pins())]
    rows.sort(key=lambda row: (row.problem is not None, row.memory.total if row.problem else row.tpot_s))
    return Plan(model_name=model_name, model=model, machine=machine, gpus=gpus, workload=workload, rows=tuple(rows))


def evaluate(model: ModelConfig, candidate: Candidate, machine: Machine, workload: Workload) -> Row:
    """What one configuration costs."""
    dtype, context, dp = workload.weight_dtype, workload.context, candidate.dp
    limit = workload.memory_share * machine.memory_bytes
    batch = -(-workload.batch // dp)

    weights = weight_bytes(model, candidate.parallel, dtype)

    def needs(batch: int, context: int) -> Memory:
        return memory(model, candidate, dtype, weights=weights, context=context, batch=batch, chunk=workload.chunk)

    own = needs(batch, context)
    most = largest(lambda size: needs(size, context).total <= limit, MOST_SEQUENCES)
    longest = largest(lambda size: needs(batch, size).total <= limit, model.max_position_embeddings)
    return Row(
        candidate=candidate,
        batch=batch,
        sequences=workload.batch,
        memory=own,
        problem=_problem(own, limit, most, longest, workload),
        largest_batch=most * dp,
        largest_context=longest,
        traffic=decode_traffic(model, candidate, dtype, batch=batch),
        exchanges={
            name: decode_traffic(model, replace(candidate, exchange=name), dtype, batch=batch)
            for name in legal_exchanges(candidate)
        },
        step=decode_time(model, candidate, machine, dtype, context=context, batch=batch),
        ttft_s=prefill_seconds(model, candidate, machine, dtype, context=context, chunk=workload.chunk),
    )


def frontier(plan: Plan, row: Row) -> list[tuple[int, float, float]]:
    """``(batch, interactivity, throughput)`` of a configuration at 1, 2, 4, … sequences per replica that fit."""
    points, batch = [], 1
    while batch * row.candidate.dp <= row.largest_batch:
        dp = row.candidate.dp
        step = decode_time(
            plan.model, row.candidate, plan.machine, plan.workload.weight_dtype,
            context=plan.workload.context, batch=batch,
        )  # fmt: skip
        points.append((batch * dp, 1 / step.total, batch * dp / step.total / row.candidate.gpus))
        batch *= 2
    return points


def _problem(own: Memory, limit: float, most: int, longest: int, workload: Workload) -> str | None:
    if own.total <= limit:
        return None
    gb, room = 1e9, limit / 1e9
    if own.weights > limit:
        return f"weights of {own.weights / gb:.1f} GB alone exceed {room:.1f} GB"
    if most == 0:
        return f"one sequence of {workload.context} tokens does not fit beside {own.weights / gb:.1f} GB of weights"
    return f"{own.total / gb:.2f} GB exceed {room:.2f} GB; {most} sequences per replica would fit" + (
        f", or {longest} tokens" if longest else ""
    )
