"""The stepping engine under ``LLM``: schedule, run, sample, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_dcp.cache import KVLayout
from megatron_dcp.comm.consensus import agree
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.engine.batch import StepBatch
from megatron_dcp.engine.request import Request
from megatron_dcp.engine.sampler import Sampler
from megatron_dcp.engine.scheduler import Scheduler


class Runner(Protocol):
    """What computes a step; `megatron_dcp.engine.runner.ModelRunner` is the real one."""

    @property
    def num_blocks(self) -> int:
        """Physical blocks of the pool on every rank."""

    def step(self, batch: StepBatch) -> Tensor:
        """Logits ``[batch.num_sampled, vocab]`` fp32."""


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
        config: Batch and chunk sizes.
        sampler: Chooses tokens for the replica.
    """

    def __init__(
        self,
        make_runner: Callable[[int | None], Runner],
        layout: KVLayout,
        cache: CacheConfig,
        config: EngineConfig,
        sampler: Sampler,
    ) -> None:
        self._make_runner = make_runner
        self._sized = cache.num_blocks is not None or cache.bytes_per_rank is not None
        self.layout = layout
        self.config = config
        self.sampler = sampler
        self.runner: Runner | None = None
        self.scheduler: Scheduler | None = None

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

    def step(self) -> list[Sampled]:
        """Compute one step; the tokens that it sampled, in the order of the batch."""
        assert self.scheduler is not None and self.runner is not None
        step = self.scheduler.schedule()
        logits_BV = self.runner.step(step.batch)
        tokens, logprobs = self.sampler.sample(logits_BV, step.sampled)
        for request in self.scheduler.commit(step, tokens, logprobs):
            self.sampler.forget(request)
        return [Sampled(request, token) for request, token in zip(step.sampled, tokens, strict=True)]

    def clear(self) -> None:
        """Drop whatever still waits or runs, and make sure that every block is free again."""
        if self.scheduler is None:
            return
        for request in self.scheduler.running:
            self.sampler.forget(request)
        self.scheduler.clear()
        self.scheduler.check_integrity()

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
        agree(error, self.sampler.group)
        assert runner is not None
        self.runner = runner
        self.scheduler = Scheduler(
            self.layout,
            runner.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            prefill_chunk_size=self.config.prefill_chunk_size,
        )
