"""What an engine has done and does now, in numbers. No torch."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_dcp.engine.request import FinishReason, Request
from megatron_dcp.metrics import Histogram

_log = logging.getLogger("megatron_dcp")


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """An engine at one moment. Numbers "so far" count from its start.

    Attributes:
        waiting: Requests that wait, preempted ones among them.
        running: Requests that hold blocks of the pool.
        kv_used_tokens: Tokens of the blocks that running requests hold, over the whole DCP group.
        kv_capacity_tokens: Tokens that the pool of the whole DCP group holds; 0 before there is one.
        steps: So far.
        preemptions: So far.
        prefix_query_tokens: Prompt tokens of the requests admitted so far.
        prefix_hit_tokens: Those of them that were found in the prefix cache.
        prompt_tokens: Prompt tokens computed so far; those found in the prefix cache are not among them.
        generated_tokens: So far.
        prompt_tokens_per_s: Over the last ``log_interval_s`` or what there is of it.
        generated_tokens_per_s: Over the same time.
        finished: Requests that ended so far, by reason.
        ttft_s: Seconds from a request's arrival to its first token.
        tpot_s: Seconds per token after the first, one value for each request that ended.
        step_s: Seconds in steps so far.
        attention_s: Of these, in attention over the own shard, on the driver.
        communication_s: Of these, in collectives, on the driver.
    """

    waiting: int
    running: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    steps: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    finished: Mapping[FinishReason, int]
    ttft_s: Histogram
    tpot_s: Histogram
    step_s: float
    attention_s: float
    communication_s: float

    @property
    def other_s(self) -> float:
        """Seconds in steps so far that are neither attention nor communication."""
        return max(0.0, self.step_s - self.attention_s - self.communication_s)

    def __str__(self) -> str:
        used = self.kv_used_tokens / self.kv_capacity_tokens if self.kv_capacity_tokens else 0.0
        hits = self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0
        whole = self.step_s or 1.0
        return (
            f"step {self.steps}: {self.running} running, {self.waiting} waiting, "
            f"{sum(self.finished.values())} finished, "
            f"KV {self.kv_used_tokens} of {self.kv_capacity_tokens} tokens ({used:.0%}), "
            f"prompt {self.prompt_tokens_per_s:.1f} tokens/s, generated {self.generated_tokens_per_s:.1f} tokens/s, "
            f"prefix hits {hits:.0%}, {self.preemptions} preemptions, time: attention {self.attention_s / whole:.0%}, "
            f"communication {self.communication_s / whole:.0%}, other {self.other_s / whole:.0%}"
        )


class Recorder:
    """Counts what an engine does. Costs a few microseconds a step.

    Args:
        interval_s: Over which tokens per second are counted.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.steps = self.prompt_tokens = self.generated_tokens = 0
        self.step_s = self.attention_s = self.communication_s = 0.0
        self.finished: Counter[FinishReason] = Counter()
        self.ttft_s, self.tpot_s = Histogram(), Histogram()
        self._arrivals: dict[Request, float] = {}
        self._firsts: dict[Request, float] = {}
        self._rates: tuple[float, float] | None = None  # of the last whole interval
        self._mark = (time.monotonic(), 0, 0)  # start of the interval, tokens until then

    def arrived(self, request: Request) -> None:
        """A request was handed to the engine."""
        self._arrivals[request] = time.monotonic()

    def generated(self, requests: Iterable[Request], num_tokens: int) -> None:
        """The requests have got tokens, ``num_tokens`` together."""
        self.generated_tokens += num_tokens
        for request in requests:
            if request not in self._firsts and request in self._arrivals:
                now = self._firsts[request] = time.monotonic()
                self.ttft_s.observe(now - self._arrivals[request])

    def ended(self, request: Request) -> None:
        """A request has its finish reason."""
        if self._arrivals.pop(request, None) is None:
            return
        assert request.finish_reason is not None
        self.finished[request.finish_reason] += 1
        first = self._firsts.pop(request, None)
        if first is not None and len(request.token_ids) > 1:
            self.tpot_s.observe((time.monotonic() - first) / (len(request.token_ids) - 1))

    def forgot(self, request: Request) -> None:
        """A request was dropped without an end."""
        self._arrivals.pop(request, None)
        self._firsts.pop(request, None)

    def stepped(self, seconds: float, prompt_tokens: int, timers: Mapping[str, float]) -> None:
        """A step has been computed; ``timers`` as `Metrics.end_step` gives them."""
        self.steps += 1
        self.step_s += seconds
        self.prompt_tokens += prompt_tokens
        self.attention_s += timers.get("attention", 0.0)
        self.communication_s += timers.get("communication", 0.0)

    def roll(self) -> bool:
        """Begin a new interval if the last one is over; whether that is so."""
        now = time.monotonic()
        start, *_ = self._mark
        if now - start < self.interval_s:
            return False
        self._rates = self._since_mark(now)
        self._mark = now, self.prompt_tokens, self.generated_tokens
        return True

    def rates(self) -> tuple[float, float]:
        """Prompt and generated tokens per second over the last interval, or since the start within the first one."""
        now = time.monotonic()
        recent = now - self._mark[0] < self.interval_s
        return self._rates if self._rates is not None and recent else self._since_mark(now)

    def snapshot(
        self,
        *,
        waiting: int,
        running: int,
        kv_used_tokens: int,
        kv_capacity_tokens: int,
        preemptions: int,
        prefix_query_tokens: int,
        prefix_hit_tokens: int,
    ) -> EngineStats:
        """The statistics, with what the scheduler knows of itself."""
        prompt_rate, generated_rate = self.rates()
        return EngineStats(
            waiting=waiting,
            running=running,
            kv_used_tokens=kv_used_tokens,
            kv_capacity_tokens=kv_capacity_tokens,
            steps=self.steps,
            preemptions=preemptions,
            prefix_query_tokens=prefix_query_tokens,
            prefix_hit_tokens=prefix_hit_tokens,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            prompt_tokens_per_s=prompt_rate,
            generated_tokens_per_s=generated_rate,
            finished=dict(self.finished),
            ttft_s=replace(self.ttft_s, buckets=dict(self.ttft_s.buckets)),
            tpot_s=replace(self.tpot_s, buckets=dict(self.tpot_s.buckets)),
            step_s=self.step_s,
            attention_s=self.attention_s,
            communication_s=self.communication_s,
        )

    def _since_mark(self, now: float) -> tuple[float, float]:
        start, prompt, generated = self._mark
        seconds = max(now - start, 1e-9)
        return (self.prompt_tokens - prompt) / seconds, (self.generated_tokens - generated) / seconds


def log_line(stats: EngineStats) -> None:
    """One line through ``logging.getLogger("megatron_dcp")``."""
    _log.info("%s", stats)
