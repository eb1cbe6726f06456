"""Counters, histograms, timers and what a snapshot holds."""

import math
import time

import pytest

from megatron_dcp.metrics import Metrics, timed


def test_counters_add_up_per_name_and_labels() -> None:
    metrics = Metrics()
    metrics.count("tokens")
    metrics.count("tokens", 4)
    metrics.count("tokens", 2, kind="prefill", rank="0")
    metrics.count("tokens", 3, rank="0", kind="prefill")
    assert metrics.snapshot()["counters"] == {
        ("tokens", ()): 5,
        ("tokens", (("kind", "prefill"), ("rank", "0"))): 5,
    }


def test_collectives_are_kept_per_group_and_summed_per_op() -> None:
    metrics = Metrics()
    metrics.count_collective("all_reduce", "dcp", 100)
    metrics.count_collective("all_reduce", "dcp", 20)
    metrics.count_collective("all_reduce", "tp", 3)
    metrics.count_collective("all_gather", "tp", 0)
    assert metrics.collectives == {"all_reduce": (3, 123), "all_gather": (1, 0)}
    assert metrics.snapshot()["collectives"] == {
        ("all_reduce", "dcp"): (2, 120),
        ("all_reduce", "tp"): (1, 3),
        ("all_gather", "tp"): (1, 0),
    }


def test_histogram_keeps_count_sum_range_and_power_of_two_buckets() -> None:
    metrics = Metrics()
    for value in (0.5, 0.75, 1.0, 1.5, 4.0, 0.0):
        metrics.observe("size", value)
    histogram = metrics.snapshot()["histograms"]["size", ()]
    assert (histogram.count, histogram.total) == (6, 7.75)
    assert (histogram.smallest, histogram.largest) == (0.0, 4.0)
    assert histogram.mean == 7.75 / 6
    assert histogram.buckets == {-1: 1, 0: 2, 1: 1, 2: 1}  # (1/4, 1/2], (1/2, 1], (1, 2], (2, 4]


def test_empty_histogram_has_no_mean() -> None:
    from megatron_dcp.metrics import Histogram

    assert math.isnan(Histogram().mean)


def test_timers_of_a_step_are_summed_and_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0, 30.0, 38.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    metrics = Metrics()
    for name in ("attention", "attention", "communication"):
        with metrics.timer(name):
            pass
    assert metrics.end_step() == {"attention": 3.0, "communication": 4.0}
    with metrics.timer("attention"):
        pass
    assert metrics.end_step() == {"attention": 8.0}
    histograms = metrics.snapshot()["histograms"]
    assert histograms["attention_seconds", ()].count == 3
    assert (histograms["step_attention_seconds", ()].count, histograms["step_attention_seconds", ()].total) == (2, 11.0)


def test_timer_counts_a_block_that_raises() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError), metrics.timer("attention"):
        raise KeyError
    assert metrics.snapshot()["histograms"]["attention_seconds", ()].count == 1


def test_disabled_metrics_record_nothing() -> None:
    metrics = Metrics(enabled=False)
    metrics.count("tokens")
    metrics.observe("size", 1.0)
    metrics.count_collective("all_reduce", "dcp", 1)
    with metrics.timer("attention"), timed(metrics, "attention"), timed(None, "attention"):
        pass
    assert metrics.end_step() == {}
    assert metrics.snapshot() == {"counters": {}, "histograms": {}, "collectives": {}}


def test_reset_and_snapshot_are_independent_of_each_other() -> None:
    metrics = Metrics()
    metrics.count("tokens")
    metrics.observe("size", 1.0)
    metrics.count_collective("all_reduce", "dcp", 1)
    before = metrics.snapshot()
    metrics.observe("size", 2.0)
    metrics.reset()
    assert before["histograms"]["size", ()].count == 1 and before["counters"] == {("tokens", ()): 1}
    assert metrics.snapshot() == {"counters": {}, "histograms": {}, "collectives": {}}
