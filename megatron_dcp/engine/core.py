"""The stepping engine under ``LLM`` and ``AsyncLLM``: schedule, tell the followers, run, sample, commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_dcp.cache import KVLayout
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.engine.announcer import Announcer
from megatron_dcp.engine.batch import Result
from megatron_dcp.engine.draft import NgramDrafter
from megatron_dcp.engine.follower import MakeRunner, Runner, make_together
from megatron_dcp.engine.link import Link
from megatron_dcp.engine.request import Request
from megatron_dcp.engine.sampler import Sampler
from megatron_dcp.engine.scheduler import Scheduler, Step
from megatron_dcp.engine.stats import EngineStats, Recorder, log_line
from megatron_dcp.engine.stops import StopStrings
from megatron_dcp.metrics import Metrics


class Sampled(NamedTuple):
    """A token that a step gave to a request.

    Attributes:
        request: Whose it is.
        token: The token.
        logprob: NaN where not asked for.
        last: Whether the request ends with it.
    """

    request: Request
    token: int
    logprob: float
    last: bool


class Engine:
    """Holds the requests of a replica and runs them, a step at a time. Only the driver has one; one thread at a time.

    A pool of a configured size never changes, and a request that it cannot hold is refused. Otherwise the pool is made
    as large as the requests need that are there at its first step. It is made anew, larger, whenever nothing runs and
    what waits needs more. A request that would not fit beside those that run waits for that moment.

    Args:
        make_runner: See `MakeRunner`.
        layout: How positions are dealt out over the DCP group.
        cache: Size of the pool, if it has one.
        config: Batch and chunk sizes, prefix cache, drafts.
        sampler: Chooses the tokens.
        link: To the followers.
        tokenizer: Needed for stop strings.
        metrics: Its timers tell `stats` where the time of a step goes.
        tell_outcomes: Whether the followers hear what became of the requests. Then these belong to one call, and an
            error of one is an error of all; otherwise it ends that request alone, see `take_failures`.
    """

    def __init__(
        self,
        make_runner: MakeRunner,
        layout: KVLayout,
        cache: CacheConfig,
        config: EngineConfig,
        sampler: Sampler,
        link: Link,
        *,
        tokenizer: Any = None,
        metrics: Metrics | None = None,
        tell_outcomes: bool = True,
    ) -> None:
        self._make_runner = make_runner
        self._sized = cache.num_blocks is not None or cache.bytes_per_rank is not None
        self.layout = layout
        self.config = config
        self.sampler = sampler
        self.announcer = Announcer(link, tell_outcomes=tell_outcomes)
        self._isolates = not tell_outcomes
        self._failures: list[tuple[Request, Exception]] = []
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.drafter = NgramDrafter(config.num_draft_tokens) if config.num_draft_tokens else None
        self.recorder = Recorder(config.log_interval_s)
        self.runner: Runner | None = None
        self.scheduler: Scheduler | None = None
        self._held: list[Request] = []  # wait for a larger pool
        self._stops: dict[Request, StopStrings] = {}
        self._past = [0, 0, 0]  # preemptions, prefix tokens queried and hit of earlier schedulers
        self._planned: Step | None = None
        self._plan_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._held) or (self.scheduler is not None and self.scheduler.has_work)

    def add_request(self, request: Request) -> None:
        """As `add`, for one."""
        self.add([request])

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests at any time but between `plan` and `compute`, all or none of them.

        Raises:
            ValueError: A request can never fit the pool, or the pool not the memory of some rank.
        """
        for request in requests:
            self.sampler.check(request.params)
        if not requests:
            return
        stops = {
            request: StopStrings(
                self.tokenizer, request.prompt, request.params.stop, min_tokens=request.params.min_tokens
            )
            for request in requests
            if request.params.stop
        }
        if self.scheduler is None and self._sized:
            self._make_pool(None)
        if self._sized:
            self._queue(requests)
        elif self._held or (self.scheduler and self.scheduler.running and not self._fits(requests)):
            self._held += requests
        else:
            self._queue_in_large_pool(requests)
        self._stops |= stops
        for request in requests:
            self.recorder.arrived(request)

    def abort(self, index: int) -> Request | None:
        """End a request now, in whatever state; ``None`` if there is none of that index (any more)."""
        request = self.scheduler.abort(index) if self.scheduler is not None else None
        if request is None:
            request = next((held for held in self._held if held.index == index), None)
            if request is None:
                return None
            self._held.remove(request)
            request.finish_reason = "abort"
        self.announcer.outcome(request, 0)
        self._forget(request)
        self.recorder.ended(request)
        return request

    def take_failures(self) -> list[tuple[Request, Exception]]:
        """The requests that have failed alone since the last call, and why. They have ended as if aborted."""
        failures, self._failures = self._failures, []
        return failures

    def step(self) -> list[Sampled]:
        """Compute one step; the tokens that it gave, in the order of the batch."""
        self.plan()
        return self.compute()

    def plan(self) -> None:
        """The first half of a step: schedule it, and tell the followers together with the tokens of the last one."""
        start = time.perf_counter()
        try:
            if self._held and not (self.scheduler and self.scheduler.running):
                self._queue_held()
            assert self._planned is None
            if self.scheduler is None or not self.scheduler.has_work:
                return  # whatever was held has failed
            step = self.scheduler.schedule()
            self.announcer.step(step, self.scheduler.running)
        except Exception as error:
            self.fail(error)
            raise
        self._planned = step
        self._plan_s = time.perf_counter() - start

    def compute(self) -> list[Sampled]:
        """The second half: run the model, sample, commit."""
        start = time.perf_counter()
        step = self._planned
        if step is None:
            return []
        prompt_tokens = sum(
            min(len(request.prompt) - seq.start, len(seq.token_ids))
            for request, seq in zip(step.requests, step.batch.seqs, strict=True)
            if seq.start < len(request.prompt)
        )
        logits = self._run(step)
        try:
            sampled = self._commit(step, self.sampler.sample(logits, step.entries))
        except Exception as error:
            self.fail(error)
            raise
        timers = self.metrics.end_step() if self.metrics is not None else {}
        self.recorder.stepped(self._plan_s + time.perf_counter() - start, prompt_tokens, timers)
        if self.recorder.roll():
            log_line(self.stats())
        return sampled

    def idle(self) -> None:
        """Tell the followers that the driver is alive."""
        self.announcer.idle()
        self.recorder.roll()

    def end(self) -> None:
        """Tell the followers that the run is over. A step that they were told of is still computed, for nothing."""
        if self._planned is not None and not self.announcer.over:
            self._run(self._planned)
        self.announcer.end()

    def fail(self, error: BaseException) -> None:
        """End the run on the followers with this error, unless they know, or cannot be told."""
        self.announcer.fail(error)

    def weights_changed(self) -> None:
        """Reuse nothing of what was computed before. Only while there is no work."""
        if self.scheduler is not None:
            self.scheduler.weights_changed()

    def clear(self) -> None:
        """Drop whatever still waits or runs, make sure that every block is free again, and be ready for a new run."""
        self._planned = None
        self.announcer.clear()
        live = self._held
        self._held = []
        if self.scheduler is not None:
            live = live + self.scheduler.running + self.scheduler.waiting
            self.scheduler.clear()
            self.scheduler.check_integrity()
        for request in live:
            self._forget(request)
            self.recorder.forgot(request)

    def stats(self) -> EngineStats:
        """What the engine has done, and does now."""
        scheduler = self.scheduler
        preemptions, queried, hit = self._counts()
        return self.recorder.snapshot(
            waiting=len(self._held) + (scheduler.num_waiting if scheduler else 0),
            running=scheduler.num_running if scheduler else 0,
            kv_used_tokens=scheduler.used_tokens if scheduler else 0,
            kv_capacity_tokens=scheduler.capacity_tokens if scheduler else 0,
            preemptions=preemptions,
            prefix_query_tokens=queried,
            prefix_hit_tokens=hit,
        )

    def _run(self, step: Step) -> Any:
        assert self.runner is not None
        try:
            return self.runner.step(step.batch)
        except BaseException:
            self.announcer.over = True  # the followers are in the middle of the step, or have failed as well
            raise
        finally:
            self._planned = None

    def _commit(self, step: Step, results: Sequence[Result]) -> list[Sampled]:
        assert self.scheduler is not None
        for entry, result in zip(step.entries, results, strict=True):
            if result.error is not None and entry.request.finish_reason is None:
                self._fail_alone(entry.request, result.error)
        before = [(entry.request, len(entry.request.token_ids)) for entry in step.entries]
        self.scheduler.commit(step, results)
        sampled: list[Sampled] = []
        with_tokens = []
        for request, old in before:
            if request in self._stops:
                try:
                    self._look_for_stop_string(request, old)
                except Exception as error:  # whatever its tokenizer raises
                    self._fail_alone(request, error)
            new = len(request.token_ids) - old
            ended = request.finish_reason is not None
            if new:
                with_tokens.append(request)
                tokens, logprobs = request.token_ids, request.logprobs
                sampled += [
                    Sampled(request, tokens[i], logprobs[i], ended and i == old + new - 1)
                    for i in range(old, old + new)
                ]
            if request.finish_reason != "abort":
                self.announcer.outcome(request, new)
            if ended:
                self._forget(request)
        self.recorder.generated(with_tokens, len(sampled))
        for request, _ in before:
            if request.finish_reason is not None:
                self.recorder.ended(request)
        return sampled

    def _look_for_stop_string(self, request: Request, old: int) -> None:
        """Look for a stop string in the tokens after the first ``old``, and end the request there."""
        for end, token in enumerate(request.token_ids[old:], old + 1):
            if self._stops[request].push([token])[1]:
                del request.token_ids[end:], request.logprobs[end:]
                if request.finish_reason is None:
                    assert self.scheduler is not None
                    self.scheduler.abort(request.index, "stop")
                request.finish_reason = "stop"
                return

    def _fail_alone(self, request: Request, error: Exception) -> None:
        """End a request that cannot go on, and leave the others alone; raise the error where they belong together."""
        if not self._isolates:
            raise error
        if request.finish_reason is None:
            self.abort(request.index)
        self._failures.append((request, error))

    def _queue_held(self) -> None:
        """Queue what waits for a larger pool; where it cannot be made as large, without the largest of them."""
        held, self._held = self._held, []
        while held:
            try:
                return self._queue_in_large_pool(held)
            except ValueError as error:
                largest = max(held, key=lambda request: request.cached_tokens)
                held.remove(largest)
                self._held = [largest]  # where abort finds it
                self._fail_alone(largest, error)

    def _forget(self, request: Request) -> None:
        self.sampler.forget(request)
        if self.drafter is not None:
            self.drafter.forget(request)
        self._stops.pop(request, None)
        self.announcer.forget(request)

    def _queue(self, requests: Sequence[Request]) -> None:
        assert self.scheduler is not None
        for request in requests:
            self.scheduler.check_fits(request)
        for request in requests:
            self.scheduler.add(request)

    def _fits(self, requests: Sequence[Request]) -> bool:
        """Whether the pool has room for the requests beside all others, as many as run at the same time."""
        if self.runner is None or self.scheduler is None:
            return False
        return self._needed([*self.scheduler.running, *self.scheduler.waiting, *requests]) <= self.runner.num_blocks

    def _needed(self, requests: Sequence[Request]) -> int:
        """Blocks that the largest ``max_num_seqs`` of the requests need together."""
        blocks = sorted((self.layout.blocks_for(request.cached_tokens) for request in requests), reverse=True)
        return max(1, sum(blocks[: self.config.max_num_seqs]))

    def _queue_in_large_pool(self, requests: Sequence[Request]) -> None:
        """Queue requests; where nothing runs and they do not fit beside what waits, in a new pool that is as large."""
        if not self._fits(requests):
            waiting = self.scheduler.waiting if self.scheduler is not None else []
            old = self.runner.num_blocks if self.runner is not None else None
            try:
                self._make_pool(self._needed([*waiting, *requests]))
            except Exception:
                if waiting:  # they had a pool, and are to have it again
                    self._make_pool(old)
                    self._queue(waiting)
                raise
            self._queue(waiting)
        self._queue(requests)

    def _counts(self) -> tuple[int, int, int]:
        now = self.scheduler
        own = (now.num_preemptions, now.prefix_query_tokens, now.prefix_hit_tokens) if now else (0, 0, 0)
        preemptions, queried, hit = (past + new for past, new in zip(self._past, own, strict=True))
        return preemptions, queried, hit

    def _make_pool(self, num_blocks: int | None) -> None:
        self._past = list(self._counts())
        self.runner = self.scheduler = None  # frees the old pool before the new one is made
        self.announcer.pool(num_blocks)
        self.runner = make_together(self._make_runner, num_blocks, self.announcer.link.group)
        self.scheduler = Scheduler(
            self.layout,
            self.runner.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            prefill_chunk_size=self.config.prefill_chunk_size,
            prefix_caching=self.config.prefix_caching,
            drafter=self.drafter,
            window=self.runner.window,
        )
