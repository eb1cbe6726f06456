"""Which tokens of which sequences the next step computes. No torch.

Every rank of a replica runs its own scheduler on the same requests and the same sampled tokens, so all make the same
plan without a word between them.

A step computes one token of every sequence that decodes, plus pieces of prompts, at most ``prefill_chunk_size`` prompt
tokens in all: first of prompts that have begun, oldest first, then of waiting ones. A waiting sequence is admitted when
the pool can promise every block that it may ever need, so that a running sequence never stops for lack of space.
Sequences are admitted in the order in which they came: a large one at the head holds back smaller ones behind it, so it
cannot starve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dcp.cache import BlockPool, KVLayout
from megatron_dcp.config import check_at_least
from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.engine.request import Request


@dataclass(frozen=True, slots=True)
class Step:
    """A planned step: the batch for the runner, and the requests behind it.

    Attributes:
        requests: Request of each entry of ``batch.seqs``.
        sampled: Those whose next token the step's logits decide, in the order of the rows.
    """

    batch: StepBatch
    requests: list[Request]
    sampled: list[Request]


class Scheduler:
    """Waiting and running sequences over the KV pool of one DCP group.

    Args:
        layout: How positions are dealt out over the group.
        num_blocks: Logical blocks of the group's pool: the physical blocks of each of its ranks.
        max_num_seqs: Sequences in the pool at the same time.
        prefill_chunk_size: Most prompt tokens of one step.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, *, max_num_seqs: int, prefill_chunk_size: int) -> None:
        check_at_least("max_num_seqs", max_num_seqs, 1)
        check_at_least("prefill_chunk_size", prefill_chunk_size, 1)
        self.layout = layout
        self.blocks = BlockPool(num_blocks, tokens_per_block=layout.logical_block_tokens)
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk_size = prefill_chunk_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._tables: dict[int, list[int]] = {}

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the group's pool holds."""
        return self.blocks.num_blocks * self.layout.logical_block_tokens

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self.waiting or self.running)

    def check_fits(self, request: Request) -> None:
        """Raise ``ValueError`` if the request would not even fit into the empty pool."""
        if self.layout.blocks_for(request.cached_tokens) > self.blocks.num_blocks:
            ranks = f"{self.layout.dcp_size} rank{'s' if self.layout.dcp_size > 1 else ''}"
            raise ValueError(
                f"prompt {request.index} needs {request.cached_tokens} tokens of KV cache (prompt "
                f"{len(request.prompt)} + max_tokens {request.max_tokens} - 1), but the pool of the DCP group holds "
                f"{self.capacity_tokens} ({self.blocks.num_blocks} blocks x {self.layout.logical_block_tokens} tokens, "
                f"over {ranks}); lower max_tokens, or raise num_blocks, bytes_per_rank or decode_context_parallel_size"
            )

    def add(self, request: Request) -> None:
        """Queue a request. ``ValueError`` if it can never run."""
        self.check_fits(request)
        self.waiting.append(request)

    def schedule(self) -> Step:
        """Plan the next step, and admit waiting sequences into it. Not empty while there is work."""
        assert self.has_work, "nothing to schedule"
        budget = self.prefill_chunk_size
        counts: list[int] = []
        for request in self.running:
            count = min(budget, len(request.prompt) - request.num_computed) if request.in_prefill else 1
            budget -= count if request.in_prefill else 0
            counts.append(count)
        while budget and self.waiting and len(self.running) < self.max_num_seqs and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            counts.append(min(budget, len(request.prompt)))
            budget -= counts[-1]
        return self._plan(counts)

    def commit(self, step: Step, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Request]:
        """Note that a step has been computed and give each sampled sequence its next token.

        Returns:
            The sequences that this step finished; their blocks are free again.
        """
        for request, seq in zip(step.requests, step.batch.seqs, strict=True):
            request.num_computed += len(seq.token_ids)
        for request, token, logprob in zip(step.sampled, tokens, logprobs, strict=True):
            request.append(token, logprob)
        finished = [request for request in step.sampled if request.finish_reason is not None]
        for request in finished:
            self._release(request)
        return finished

    def clear(self) -> None:
        """Forget every sequence, finished or not, and free its blocks."""
        self.waiting.clear()
        for request in list(self.running):
            self._release(request)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if blocks were lost or are held by nobody's sequence."""
        self.blocks.check_integrity()
        held = sorted(request.index for request in self.running)
        if sorted(self._tables) != held or sorted(self.blocks.sequences) != held:  # type: ignore[type-var]
            raise AssertionError(f"running sequences {held}, but blocks are held by {sorted(self._tables)}")

    def _admit(self, request: Request) -> bool:
        """Reserve all blocks that the sequence may need, if they are free."""
        needed = self.layout.blocks_for(request.cached_tokens)
        if needed > self.blocks.num_free:
            return False
        self.blocks.reserve(request.index, needed)
        self._tables[request.index] = self.blocks.table(request.index)
        return True

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.free(request.index)
        del self._tables[request.index]

    def _plan(self, counts: list[int]) -> Step:
        """The step that computes the next ``counts`` tokens of the running sequences."""
        step = Step(StepBatch(seqs := []), requests=[], sampled=[])
        for request, count in zip(self.running, counts, strict=True):
            if not count:
                continue
            start, stop = request.num_computed, request.num_computed + count
            sample = stop >= len(request.prompt)
            tokens = request.prompt[start:stop] if request.in_prefill else request.token_ids[-1:]
            table = self._tables[request.index][: self.layout.blocks_for(stop)]
            seqs.append(SeqStep(tokens, start, table, sample))
            step.requests.append(request)
            if sample:
                step.sampled.append(request)
        return step
