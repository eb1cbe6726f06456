"""What a calibration measures on ranks, with small sizes: complete, the same on every rank, and nothing left behind."""

from __future__ import annotations

import math

import pytest
import torch
from small_calibration import shrink_calibration
from torch import distributed

from megatron_dcp.calibration import about_machine, attention, calibrate, rates, run, steps
from megatron_dcp.calibration.clock import Clock
from megatron_dcp.calibration.rates import groups_of_world
from megatron_dcp.calibration.steps import Overheads
from megatron_dcp.planner import machine as machine_of
from megatron_dcp.planner.machine import CollectiveRate, Machine
from megatron_dcp.planner.timing import StepTime
from workers import run_on_ranks


def calibrated(rank: int, world: int) -> tuple[Machine, dict, bool, float]:
    shrink_calibration()
    machine = calibrate()
    from megatron.core import parallel_state as mpu

    flag = torch.ones(1)
    distributed.all_reduce(flag)  # the world still works
    return machine, about_machine(), mpu.model_parallel_is_initialized(), float(flag)


@pytest.fixture(scope="module")
def two() -> list[tuple[Machine, dict, bool, float]]:
    return run_on_ranks(2, calibrated)


@pytest.mark.mcore_line
def test_all_ranks_have_the_same_machine_and_their_world_back(two) -> None:
    assert two[0][0] == two[1][0]
    assert [each[2:] for each in two] == [(False, 2.0)] * 2
    assert two[0][1]["ranks"] == 2 and two[0][1]["communication"] == "gloo"


def test_everything_is_measured(two) -> None:
    machine = two[0][0]
    assert machine.ranks == machine.link_gpus == 2
    assert {one.kv_dtype for one in machine.attention} == {"float32", "bfloat16", "float16", "int8", "fp8_e4m3"}
    for dtype in ("float32", "int8"):
        shapes = {(one.head_dim, one.latent) for one in machine.attention if one.kv_dtype == dtype}
        assert shapes == {(64, False), (128, False), (576, True)}
    assert all(one.bytes_per_s > 0 for one in machine.attention)
    assert {(one.dtype, one.head_dim) for one in machine.chunks} == {
        (dtype, dim) for dtype in ("float32", "bfloat16") for dim in (64, 128)
    }
    assert all(one.flops > 0 for one in machine.chunks) and machine.activations >= 0
    kinds: dict[str, list[CollectiveRate]] = {}
    for one in machine.collectives:
        assert (one.ranks, one.span) == (2, 2)
        kinds.setdefault(one.op, []).append(one)
    for op, sent in {
        "all_reduce": 1.0, "all_gather": 1.0, "reduce_scatter": 0.5, "all_to_all": 0.5, "ring": 1.0,
    }.items():  # fmt: skip
        ordered = kinds.pop(op)
        assert [one.bytes for one in ordered] == [sent * size for size in rates.SIZES]  # as the layers count them
        times = [one.seconds for one in ordered]
        assert times[0] > 0 and times == sorted(times)
    assert not kinds
    assert machine.step_s + machine.layer_s > 0 and 1 <= machine.imbalance < 100
    for name in ("memory_bytes", "memory_bandwidth", "link_bandwidth", "network_bandwidth"):
        assert getattr(machine, name) > 0 and math.isfinite(getattr(machine, name))
    assert 0 <= machine.drift < 100
    assert set(machine.flops) == {"float32", "bfloat16", "fp8"}


def test_alone_there_are_no_collectives() -> None:
    ((machine, about, *_),) = run_on_ranks(1, calibrated)
    assert machine.collectives == () and machine.ranks == 1 and machine.followers_s == machine.merge_s == 0
    assert machine.imbalance == 1
    assert about["ranks"] == 1


def refused(rank: int, world: int) -> str:
    from megatron_dcp import parallel_state

    parallel_state.initialize_model_parallel(1)
    with pytest.raises(ValueError) as caught:
        calibrate()
    parallel_state.destroy_model_parallel()
    return str(caught.value)


def test_groups_that_exist_are_left_alone() -> None:
    assert run_on_ranks(2, refused) == ["process groups exist already; calibrate before initialize_model_parallel, "
                                        "or in a new run"] * 2  # fmt: skip


def test_without_a_world_it_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"call initialize_distributed\(\) first"):
        calibrate()


def own_groups(rank: int, world: int) -> dict[tuple[int, int], list[int]]:
    return {kind: distributed.get_process_group_ranks(group) for kind, group in groups_of_world().items()}


def test_groups_side_by_side_and_apart() -> None:
    by_rank = run_on_ranks(4, own_groups)
    assert by_rank[0] == {(2, 2): [0, 1], (2, 4): [0, 2], (4, 4): [0, 1, 2, 3]}
    assert by_rank[3] == {(2, 2): [2, 3], (2, 4): [1, 3], (4, 4): [0, 1, 2, 3]}


def counted(rank: int, world: int) -> tuple[float, int]:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        if rank == 1:
            torch.randn(300, 300).sum()
        distributed.all_reduce(torch.ones(1))

    return Clock(torch.device("cpu")).seconds(call, aim_s=0.02), len(calls)


def test_every_rank_calls_as_often_and_hears_the_slowest() -> None:
    first, second = run_on_ranks(2, counted)
    assert first == second and first[0] > 0 and first[1] >= 7


def typical(rank: int, world: int) -> float:
    times = [1.0, 3.0] + [2.0 + rank] * 4 + [100.0, 2.0] + [2.0, 2.0]
    return Clock(torch.device("cpu")).typical(times)


def test_one_hiccup_is_not_typical_and_the_slowest_rank_counts() -> None:
    """Means of five pairs: 2, 2 + rank, 2 + rank, 51 and 2."""
    assert run_on_ranks(2, typical) == [3.0, 3.0]


def test_who_waits_for_the_slowest_is_told_from_what_waiting_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 us for every gather; and among ranks that wait attention takes 1.3 times as long."""

    class Cache:
        def __init__(self, *_: object) -> None: ...

        def attention(self, rows: int, *, blocks: int | None = None, after: object = None) -> tuple[bool, bool]:
            return blocks is None, after is not None

    class Slow(Clock):
        def seconds(self, call: object, *, aim_s: float = 0.1) -> float:
            many, waits = call  # type: ignore[misc]
            return (1e-3 if many else 1e-5) * (1.3 if waits else 1.0) + (7e-6 if waits else 0.0)

    monkeypatch.setattr(attention, "_Cache", Cache)
    clock = object.__new__(Slow)
    clock.device, clock.world = torch.device("cpu"), type("World", (), {"size": lambda _: 2})()
    assert attention.imbalance(clock) == pytest.approx(1.3)


EXACT = Overheads(layer_s=3e-4, step_s=1e-3, layer_sequence_s=2e-5, sequence_s=1e-5)
NOTHING = StepTime(weights=0.0, kv=0.0, exchange=0.0, collectives=0.0, overhead=0.0)


def test_overheads_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: object, layers: int, batch: int, dcp: int) -> tuple[float, StepTime]:
        predicted = StepTime(weights=1e-4 * layers, kv=1e-5 * batch, exchange=0.0, collectives=0.0, overhead=0.0)
        own = layers * (EXACT.layer_s + batch * EXACT.layer_sequence_s) + EXACT.step_s + batch * EXACT.sequence_s
        return own + predicted.total, predicted

    monkeypatch.setattr(steps, "_step", step)
    assert steps.overheads(None, None, None) == pytest.approx(EXACT)  # type: ignore[arg-type]


def test_what_sharing_adds_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.distributed, "get_world_size", lambda: 4)

    def step(*_: object, layers: int, batch: int, dcp: int) -> tuple[float, StepTime]:
        assert dcp == 4
        return 5e-4 + layers * 7e-5, NOTHING

    monkeypatch.setattr(steps, "_step", step)
    assert steps.shared_overheads(None, None, None) == pytest.approx((5e-4, 7e-5))  # type: ignore[arg-type]


@pytest.mark.parametrize(("own", "found"), [(3.0, 3.0), (-1.0, 0.0)])
def test_passes_over_activations_are_told_apart(monkeypatch: pytest.MonkeyPatch, own: float, found: float) -> None:
    """4 x 64 queries, 2 x 2 x 64 keys and values, 256 of the projection, 2 x 512 and 256 of the MLP: 2048 numbers."""
    machine = machine_of("H200")
    expected = 2048 * steps.CHUNK * 4 / machine.memory_bandwidth

    def typical(*arguments: object) -> float:
        config = arguments[2]
        predicted = steps.predicted_prompt(config, torch.float32, machine, dcp=1, tokens=steps.CHUNK)  # type: ignore[arg-type]
        return predicted + 5e-3 + own * config.num_layers * expected  # type: ignore[attr-defined]

    monkeypatch.setattr(steps, "_typical", typical)
    clock = object.__new__(Clock)
    clock.device = torch.device("cpu")
    assert steps.activations(clock, torch.float32, machine) == pytest.approx(found)


def test_noise_makes_no_time_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: object, layers: int, batch: int, dcp: int) -> tuple[float, StepTime]:
        return 1e-3 / (layers * batch), NOTHING  # more work, less time

    monkeypatch.setattr(steps, "_step", step)
    assert min(steps.overheads(None, None, None)) >= 0  # type: ignore[arg-type]


def test_unmeasured_groups_follow_start_steps_and_bandwidth() -> None:
    """20 us to start, 3 us a step, 1 GB/s."""

    def one(op: str, ranks: int, count: int) -> list[CollectiveRate]:
        return [
            CollectiveRate(op=op, ranks=ranks, span=ranks, bytes=size, seconds=20e-6 + 3e-6 * count + size / 1e9)
            for size in (0.0, 1e9)
        ]

    found = [*one("all_reduce", 8, 6), *one("all_gather", 8, 7), *one("all_to_all", 8, 1), *one("ring", 2, 1)]
    start, step, bandwidth = run._fit(found) or (0, 0, 0)
    assert start == pytest.approx(20e-6) and step == pytest.approx(3e-6)
    assert bandwidth == pytest.approx(1e9, rel=1e-3)
    assert run._fit([]) is None


def test_memory_of_a_container_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(run, "_CGROUP_LIMIT", limit)
    cpu = torch.device("cpu")
    whole = run._memory_bytes(cpu, 1)
    limit.write_text("1000000\n")
    assert run._memory_bytes(cpu, 4) == 250_000
    limit.write_text("max\n")
    assert run._memory_bytes(cpu, 1) == whole > 1e9
