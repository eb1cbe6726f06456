import pytest
from fake_engine import request
from prometheus_client.parser import text_string_to_metric_families

from megatron_dcp.config import EngineConfig
from megatron_dcp.engine.prometheus import prometheus_text
from megatron_dcp.engine.stats import Recorder


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def snapshot(recorder):
    return recorder.snapshot(
        waiting=3,
        running=2,
        kv_used_tokens=24,
        kv_capacity_tokens=96,
        preemptions=1,
        prefix_query_tokens=50,
        prefix_hit_tokens=20,
    )


@pytest.fixture
def recorder(monkeypatch):
    """One request that waited 2 s for its first token and got 3 tokens in 1 s, one that was aborted."""
    clock = Clock(monkeypatch)
    recorder = Recorder(10.0)
    recorder.clock = clock
    one, other = request(0, [1, 2], 3), request(1, [1], 3)
    recorder.arrived(one)
    recorder.arrived(other)
    clock.now += 2
    recorder.stepped(2.0, 3, {"attention": 0.5, "communication": 0.25})
    recorder.generated([one], 1)
    clock.now += 1
    recorder.stepped(1.0, 0, {"attention": 0.25})
    recorder.generated([one], 2)
    one.token_ids, one.finish_reason, other.finish_reason = [1, 2, 3], "length", "abort"
    recorder.ended(one)
    recorder.ended(other)
    return recorder


def test_times_and_counts(recorder):
    stats = snapshot(recorder)
    assert (stats.ttft_s.count, stats.ttft_s.total) == (1, 2.0)
    assert (stats.tpot_s.count, stats.tpot_s.total) == (1, 0.5)
    assert (stats.step_s, stats.attention_s, stats.communication_s, stats.other_s) == (3.0, 0.75, 0.25, 2.0)
    assert stats.finished == {"length": 1, "abort": 1}
    assert (stats.prompt_tokens, stats.generated_tokens) == (3, 3)
    recorder.ttft_s.observe(1.0)
    assert stats.ttft_s.count == 1 and stats.ttft_s.buckets == {1: 1}  # a copy


def test_tokens_per_second_are_those_of_the_last_interval(recorder):
    stats = snapshot(recorder)
    assert (stats.prompt_tokens_per_s, stats.generated_tokens_per_s) == (1.0, 1.0)  # 3 s so far
    recorder.clock.now += 7
    assert recorder.roll() and not recorder.roll()
    assert recorder.rates() == (0.3, 0.3)
    recorder.clock.now += 5
    recorder.stepped(1.0, 100, {})
    assert recorder.rates() == (0.3, 0.3)
    recorder.clock.now += 15  # nothing has stepped since
    assert recorder.rates() == (5.0, 0.0)


def test_the_log_line(recorder):
    assert str(snapshot(recorder)) == (
        "step 2: 2 running, 3 waiting, 2 finished, KV 24 of 96 tokens (25%), prompt 1.0 tokens/s, "
        "generated 1.0 tokens/s, prefix hits 40%, 1 preemptions, time: attention 25%, communication 8%, other 67%"
    )


def test_prometheus_reads_it(recorder):
    recorder.ttft_s.observe(0.0)
    text = prometheus_text(snapshot(recorder))
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["megatron_dcp_waiting",] == 3
    assert samples["megatron_dcp_kv_capacity_tokens",] == 96
    assert samples["megatron_dcp_generated_tokens_per_second",] == 1.0
    assert samples["megatron_dcp_prefix_hit_tokens_total",] == 20
    assert samples["megatron_dcp_finished_requests_total", "abort"] == 1
    assert samples["megatron_dcp_step_seconds_total", "other"] == 2.0
    ttft = {
        key[1]: value for key, value in samples.items() if key[0] == "megatron_dcp_time_to_first_token_seconds_bucket"
    }
    assert ttft == {"2.0": 2.0, "+Inf": 2.0}  # a value of 0 lies below every bound
    assert samples["megatron_dcp_time_to_first_token_seconds_sum",] == 2.0


def test_prometheus_without_its_package(recorder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ValueError, match="pip install prometheus_client"):
        prometheus_text(snapshot(recorder))


@pytest.mark.parametrize("interval", [-1, "often", float("nan"), True])
def test_an_interval_that_is_none(interval):
    with pytest.raises(ValueError, match="log_interval_s=.* must be a number of seconds >= 0"):
        EngineConfig(log_interval_s=interval)
