"""`EngineStats` in the text format that Prometheus reads. Needs the package prometheus_client. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_dcp.engine.stats import EngineStats
from megatron_dcp.metrics import Histogram

_PREFIX = "megatron_dcp_"

_GAUGES = {
    "waiting": "Requests that wait",
    "running": "Requests that hold KV cache",
    "kv_used_tokens": "Tokens of KV cache that running requests hold, over the DCP group",
    "kv_capacity_tokens": "Tokens of KV cache that the DCP group has",
    "prompt_tokens_per_s": "Prompt tokens computed per second, over the last interval",
    "generated_tokens_per_s": "Tokens generated per second, over the last interval",
}
_COUNTERS = {
    "steps": "Steps of the engine",
    "preemptions": "Requests whose KV cache was taken away and computed again",
    "prefix_query_tokens": "Prompt tokens looked up in the prefix cache",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache",
    "prompt_tokens": "Prompt tokens computed",
    "generated_tokens": "Tokens generated",
}
_HISTOGRAMS = {
    "ttft_s": ("time_to_first_token_seconds", "From a request's arrival to its first token"),
    "tpot_s": ("time_per_output_token_seconds", "Per token after a request's first one"),
}


def prometheus_text(stats: EngineStats) -> str:
    """The statistics as a page for ``GET /metrics``.

    Raises:
        ValueError: The package prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise ValueError(
            "prometheus_client is not installed; pip install prometheus_client, or pip install 'megatron-dcp[serve]'"
        ) from None
    registry = CollectorRegistry()
    registry.register(_Collector(stats))
    return generate_latest(registry).decode()


class _Collector:
    """What prometheus_client asks for metrics."""

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        stats = self.stats
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(_PREFIX + name.replace("_per_s", "_per_second"), text, getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, getattr(stats, name))
        finished = CounterMetricFamily(_PREFIX + "finished_requests", "Requests that ended", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
        seconds = CounterMetricFamily(
            _PREFIX + "step_seconds", "Seconds in steps, by what they went to", labels=["part"]
        )
        for part in ("attention", "communication", "other"):
            seconds.add_metric([part], getattr(stats, f"{part}_s"))
        yield seconds
        for name, (full, text) in _HISTOGRAMS.items():
            histogram = getattr(stats, name)
            yield HistogramMetricFamily(_PREFIX + full, text, _buckets(histogram), histogram.total)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bounds and how many values lie at or below them."""
    count = histogram.count - sum(histogram.buckets.values())  # values of 0 and below
    buckets = []
    for exponent in sorted(histogram.buckets):
        count += histogram.buckets[exponent]
        buckets.append((str(2.0**exponent), float(count)))
    return [*buckets, ("+Inf", float(histogram.count))]
