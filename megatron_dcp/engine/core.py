"""The stepping engine under ``LLM``: schedule, run, sample, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron_dcp.cache import KVLayout
from megatron_dcp.comm.consensus import agree
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.engine.batch import StepBatch
from megatron_dcp.engine.draft import NgramDrafter
from megatron_dcp.engine.request import Request
from megatron_dcp.engine.results import Decider
from megatron_dcp.engine.scheduler import Scheduler
from megatron_dcp.engine.stops import StopStrings


class Runner(Protocol):
    """What computes a step; `megatron_dcp.engine.runner.ModelRunner` is the real one."""

    @property
    def num_blocks(self) -> int:
        """Physical blocks of the pool on every rank."""

    def step(self, batch: StepBatch) -> Tensor:
        """Logits ``[batch.num_logits, vocab]`` fp32."""


class Sampled(NamedTuple):
    """A token that a step gave to a request."""

    request: Request
    token: int


class Engine:
    """Runs requests to their end, a step at a time. Every rank of the replica makes the same calls.

    Args:
        make_runner: Makes the runner, and with it the KV pool, from a number of blocks; ``None`` where ``cache`` gives
            the size.
        layout: How positions are dealt out over the DCP group.
        cache: Without a size, the pool is made, and made anew, as large as the largest batch so far needs.
        config: Batch and chunk sizes, prefix cache, drafts.
        decider: Chooses tokens for the replica.
        tokenizer: Needed for stop strings.
    """

    def __init__(
        self,
        make_runner: Callable[[int | None], Runner],
        layout: KVLayout,
        cache: CacheConfig,
        config: EngineConfig,
        decider: Decider,
        tokenizer: Any = None,
    ) -> None:
        self._make_runner = make_runner
        self._sized = cache.num_blocks is not None or cache.bytes_per_rank is not None
        self.layout = layout
        self.config = config
        self.decider = decider
        self.tokenizer = tokenizer
        self.drafter = NgramDrafter(config.num_draft_tokens) if config.num_draft_tokens else None
        self.runner: Runner | None = None
        self.scheduler: Scheduler | None = None
        self._stops: dict[Request, StopStrings] = {}

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self.scheduler is not None and self.scheduler.has_work

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none of them, on an idle engine; makes or grows the pool if need be.

        Raises:
            ValueError: On every rank: a request can never fit the pool, or the pool not the memory of some rank.
        """
        assert not self.has_work, "the engine is busy"
        if not requests:
            return
        for request in requests:
            self.decider.sampler.check(request.params)
        if (
            self.runner is None
            or self.scheduler is None
            or (not self._sized and self._needed(requests) > self.runner.num_blocks)
        ):
            self._make_pool(None if self._sized else self._needed(requests))
        assert self.scheduler is not None
        for request in requests:
            self.scheduler.check_fits(request)
        for request in requests:
            self.scheduler.add(request)
            if request.params.stop:
                params = request.params
                self._stops[request] = StopStrings(
                    self.tokenizer, request.prompt, params.stop, min_tokens=params.min_tokens
                )

    def step(self) -> list[Sampled]:
        """Compute one step; the tokens that it gave, in the order of the batch."""
        assert self.scheduler is not None and self.runner is not None
        step = self.scheduler.schedule()
        results = self.decider.decide(self.runner.step(step.batch), step.entries)
        before = {entry.request: len(entry.request.token_ids) for entry in step.entries}
        finished = self.scheduler.commit(step, results)
        finished += [request for request in before if self._meets_stop_string(request, before[request])]
        for request in finished:
            self._forget(request)
        return [Sampled(request, token) for request, old in before.items() for token in request.token_ids[old:]]

    def weights_changed(self) -> None:
        """Reuse nothing of what was computed before. Only while there is no work."""
        if self.scheduler is not None:
            self.scheduler.weights_changed()

    def clear(self) -> None:
        """Drop whatever still waits or runs, and make sure that every block is free again."""
        if self.scheduler is None:
            return
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self._forget(request)
        self.scheduler.clear()
        self.scheduler.check_integrity()

    def _meets_stop_string(self, request: Request, old: int) -> bool:
        """Look for a stop string in the tokens after the first ``old``; end the request there. True if that is news."""
        stops = self._stops.get(request)
        if stops is None:
            return False
        for end, token in enumerate(request.token_ids[old:], old + 1):
            if stops.push([token])[1]:
                del request.token_ids[end:], request.logprobs[end:]
                news = request.finish_reason is None
                if news:
                    assert self.scheduler is not None
                    self.scheduler.abort(request.index, "stop")
                request.finish_reason = "stop"
                return news
        return False

    def _forget(self, request: Request) -> None:
        self.decider.sampler.forget(request)
        if self.drafter is not None:
            self.drafter.forget(request)
        self._stops.pop(request, None)

    def _needed(self, requests: Sequence[Request]) -> int:
        """Blocks that the largest ``max_num_seqs`` of the requests need together."""
        blocks = sorted((self.layout.blocks_for(request.cached_tokens) for request in requests), reverse=True)
        return max(1, sum(blocks[: self.config.max_num_seqs]))

    def _make_pool(self, num_blocks: int | None) -> None:
        self.runner = self.scheduler = None  # frees the old pool before the new one is made
        runner, error = None, None
        try:
            runner = self._make_runner(num_blocks)
        except Exception as caught:  # whatever it is: the other ranks must not wait for this one
            error = caught
        agree(error, self.decider.group)
        assert runner is not None
        self.runner = runner
        self.scheduler = Scheduler(
            self.layout,
            runner.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            prefill_chunk_size=self.config.prefill_chunk_size,
            prefix_caching=self.config.prefix_caching,
            drafter=self.drafter,
        )
