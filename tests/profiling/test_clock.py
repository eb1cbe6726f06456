"""What the clock says of a step, by a clock of our own: nothing is counted twice, nothing is lost."""

import pytest

from megatron_dcp.profiling.clock import KINDS, PARTS, Clock, ClockMetrics, key_of


class Time:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


@pytest.fixture
def now(monkeypatch):
    return Time(monkeypatch)


def nonzero(step):
    return {
        (KINDS[key // len(PARTS)], PARTS[key % len(PARTS)]): seconds
        for key, seconds in enumerate(step.parts)
        if seconds
    }


def test_every_moment_goes_to_one_part_of_one_kind(now):
    clock = Clock()
    metrics = ClockMetrics(clock)
    clock.restart()
    now.now += 2
    clock.begin_step()
    now.now += 1  # engine
    clock.enter("full attention")
    now.now += 2
    clock.enter_part("gemm")
    now.now += 3
    with metrics.timer("communication"):  # inside a product, as Megatron's row-parallel layers have it
        now.now += 4
    clock.leave()
    with metrics.timer("attention"):
        now.now += 5
        clock.enter_part("gemm")  # of the back end: stays attention
        now.now += 6
        clock.leave()
    clock.turn("dense FFN")
    now.now += 7
    clock.leave()
    now.now += 8
    clock.end_step("decode", 3)
    (step,) = clock.steps
    assert nonzero(step) == {
        ("engine", "rest"): 9,
        ("full attention", "rest"): 2,
        ("full attention", "gemm"): 3,
        ("full attention", "communication"): 4,
        ("full attention", "attention"): 11,
        ("dense FFN", "rest"): 7,
    }
    assert (step.start_s, step.seconds, step.phase, step.tokens, step.waited_s) == (2, 36, "decode", 3, None)
    assert sum(step.parts) == step.seconds
    assert step.times[0] == 0 and len(step.times) == len(step.keys)
    assert all(a != b for a, b in zip(step.keys, step.keys[1:], strict=False))  # runs are joined
    assert step.keys[1] == key_of("full attention", "rest")


def test_outside_of_steps_nothing_is_counted(now):
    clock = Clock()
    with ClockMetrics(clock).timer("communication"):
        now.now += 1
    clock.begin_step()
    now.now += 1
    clock.drop_step()
    clock.enter("logits")
    now.now += 1
    clock.begin_step()  # what was entered before it is forgotten
    clock.leave()
    now.now += 1
    clock.end_step("prefill", 1)
    assert [nonzero(step) for step in clock.steps] == [{("engine", "rest"): 1}]
    clock.restart()
    assert clock.steps == []


class Event:
    """A CUDA event on a GPU that is ten times as fast as the host."""

    def __init__(self, now):
        self._now = now

    def record(self):
        self.at = self._now.now / 10

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def test_on_a_gpu_times_are_those_of_its_events(now):
    waits = []

    def wait():
        waits.append(now.now)
        now.now += 0.5

    clock = Clock(lambda: Event(now), wait)
    clock.begin_step()
    now.now += 10
    clock.enter("MLA")
    now.now += 20
    clock.leave()
    clock.wait()
    clock.end_step("decode", 1)
    (step,) = clock.steps
    assert nonzero(step) == pytest.approx({("engine", "rest"): 1.05, ("MLA", "rest"): 2.0})
    assert step.seconds == pytest.approx(3.05) and step.waited_s == 0.5
    assert len(waits) == 2  # also before the events are read


def test_other_timers_are_those_of_metrics(now):
    metrics = ClockMetrics(Clock())
    with metrics.timer("sampling"):
        now.now += 2
    with metrics.timer("attention"):
        now.now += 2
    assert metrics.end_step() == {"sampling": 2}
