"""Which tokens of which sequences the next step computes. No torch.

A step computes one token of every sequence that decodes (and what is drafted after it), and chunks of prompts, together
at most ``prefill_chunk_size`` tokens. A sequence takes blocks as it needs them. When none is left, cached blocks are
evicted, and then the newest running sequence is preempted: it loses its blocks, waits in the place that its arrival
gives it, and is computed again, helped by what the prefix cache still has of it.

Everything goes by arrival. Sequences are admitted in this order: one that does not fit holds back those behind it. One
whose prefix a running sequence is about to compute waits for that, and lets others pass. Of several prompts in prefill
the oldest gets at least half of the budget, and the others share what it leaves, the shortest first; so a long prompt
advances, and a short one behind it does not wait for its end.

No livelock: the oldest running sequence is never preempted and computes at least a token in every step (alone it fits,
since ``add`` checked that), so it ends, and so on for those after it. The oldest waiting one is tried first, and
unconditionally once nothing runs; so after finitely many ends it runs. A sequence that is waited for runs itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dcp.cache import BlockPool, KVLayout, PrefixCache, WindowPool
from megatron_dcp.config import check_at_least
from megatron_dcp.engine.batch import Entry, Result, SeqStep, StepBatch, Window
from megatron_dcp.engine.request import FinishReason, Request

Drafter = Callable[[Request], Sequence[int]]

MAX_PREFILLS = 8  # prompts in prefill at the same time, unless more can end in the same step


@dataclass(frozen=True, slots=True)
class Step:
    """A planned step: the batch for the runner, and what is behind it.

    Attributes:
        entries: What the sampler has to do, one for each of ``batch.seqs`` with logits, in the order of the rows.
        requests: Request of each of ``batch.seqs``.
    """

    batch: StepBatch
    entries: list[Entry]
    requests: list[Request]


class Scheduler:
    """Waiting and running sequences over the KV pool of one DCP group.

    Args:
        layout: How positions are dealt out over the group.
        num_blocks: Logical blocks of the group's pool: the physical blocks of each of its ranks.
        max_num_seqs: Sequences in the pool at the same time.
        prefill_chunk_size: Most prompt tokens of one step.
        prefix_caching: Reuse blocks of known prefixes.
        drafter: Proposes tokens for a decoding request. They are cut to what ``max_tokens`` and the pool allow; nobody
            is preempted for them.
        window: Of a model that has layers with a sliding window. A sequence takes as many blocks of their pool as of
            the other, and gives them back as it moves on.

    Attributes:
        prefix_query_tokens: Prompt tokens of the requests admitted so far, counted once each.
        prefix_hit_tokens: Those of them that the prefix cache had.
        num_preemptions: So far.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        max_num_seqs: int,
        prefill_chunk_size: int,
        prefix_caching: bool = True,
        drafter: Drafter | None = None,
        window: Window | None = None,
    ) -> None:
        check_at_least("max_num_seqs", max_num_seqs, 1)
        check_at_least("prefill_chunk_size", prefill_chunk_size, 1)
        self.layout = layout
        self.block_tokens = layout.logical_block_tokens
        self.pool = BlockPool(num_blocks, tokens_per_block=self.block_tokens)
        self._window = window
        self.window = None if window is None else WindowPool(window.num_blocks, window.tokens, self.block_tokens)
        self.cache = PrefixCache(self.pool, self.block_tokens, enabled=prefix_caching, window=self.window)
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk_size = prefill_chunk_size
        self.drafter = drafter
        self.waiting: list[Request] = []  # both in the order of arrival
        self.running: list[Request] = []
        self.prefix_query_tokens = self.prefix_hit_tokens = self.num_preemptions = 0
        self._requests: dict[int, Request] = {}
        self._arrivals = 0
        # Blocks to leave free at an admission, so that it does not at once lead to a preemption.
        self._watermark = 1 + (num_blocks if window is None else min(num_blocks, window.num_blocks)) // 100
        self._refused: tuple[Request, int] | None = None

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the group's pool holds."""
        return self.pool.num_blocks * self.block_tokens

    @property
    def used_tokens(self) -> int:
        """Tokens of the blocks that running sequences hold, a shared block counted once."""
        return self.cache.num_held * self.block_tokens

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, preempted ones among them."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have blocks."""
        return len(self.running)

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits or runs."""
        return bool(self._requests)

    def check_fits(self, request: Request) -> None:
        """Raise ``ValueError`` if the request would not even fit into the empty pool."""
        if self.layout.blocks_for(request.cached_tokens) > self.pool.num_blocks:
            ranks = f"{self.layout.dcp_size} rank{'s' if self.layout.dcp_size > 1 else ''}"
            raise ValueError(
                f"prompt {request.place} needs {request.cached_tokens} tokens of KV cache (prompt "
                f"{len(request.prompt)} + max_tokens {request.max_tokens} - 1), but the pool of the DCP group holds "
                f"{self.capacity_tokens} ({self.pool.num_blocks} blocks x {self.block_tokens} tokens, "
                f"over {ranks}); lower max_tokens, or raise num_blocks, bytes_per_rank or decode_context_parallel_size"
            )
        if self.window is None or self._window is None:
            return
        needed = min(self.layout.blocks_for(request.cached_tokens), self.layout.window_blocks(self._window.tokens, 1))
        if needed > self._window.num_blocks:
            raise ValueError(
                f"prompt {request.place} needs {needed} blocks x {self.block_tokens} tokens of KV cache in the layers "
                f"with a sliding window of {self._window.tokens}, but their pool has {self._window.num_blocks}; raise "
                "bytes_per_rank or decode_context_parallel_size"
            )

    def add(self, request: Request) -> None:
        """Queue a request. ``ValueError`` if it can never run."""
        self.check_fits(request)
        assert request.index not in self._requests, f"there is a request {request.index} already"
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.index] = request
        self.waiting.append(request)

    def abort(self, index: int, reason: FinishReason = "abort") -> Request | None:
        """End a request now, in whatever state; ``None`` if there is none of that index (any more).

        Reason ``stop`` is for one whose text has come to a stop string. Between ``schedule`` and ``commit`` too: what
        the step computes of it is then dropped.
        """
        request = self._requests.get(index)
        if request is not None:
            request.finish_reason = reason
            self._leave(request)
        return request

    def schedule(self) -> Step:
        """Plan the next step, and admit waiting sequences into it. Not empty while there is work."""
        assert self.has_work, "nothing to schedule"
        counts: dict[Request, int] = {}
        preempted = self.num_preemptions
        self._take_decode(counts)
        decoding = list(counts)
        if preempted == self.num_preemptions:
            self._admit_waiting([request for request in self.running if request not in counts])
        self._take_prefill(counts)
        drafts = {request: self._draft(request) for request in decoding if request in counts} if self.drafter else {}
        return self._plan(counts, drafts)

    def commit(self, step: Step, results: Sequence[Result]) -> list[Request]:
        """Note that a step has been computed and give its requests their tokens.

        Args:
            results: One for each of ``step.entries``.

        Returns:
            The requests that this step finished; their blocks are free or cached.
        """
        for request, seq in zip(step.requests, step.batch.seqs, strict=True):
            request.num_computed += len(seq.token_ids)
        finished: list[Request] = []
        for entry, result in zip(step.entries, results, strict=True):
            request = entry.request
            if request.finish_reason is not None:  # aborted in the meantime
                continue
            assert len(result.prompt_logprobs) == len(entry.prompt_targets)
            request.prompt_logprobs += result.prompt_logprobs
            if not entry.sample:
                continue
            assert 1 <= len(result.tokens) <= len(entry.draft) + 1, (result, entry)
            for token, logprob in zip(result.tokens, result.logprobs, strict=True):
                request.append(token, logprob)
                if request.finish_reason is not None:
                    finished.append(request)
                    break
            request.num_computed = request.num_tokens - 1  # drafts that were rejected are overwritten
        for request in step.requests:
            if self._requests.get(request.index) is request:
                salt = request.params.cache_salt
                self.cache.extend(request.index, request.tokens_between, request.num_computed, salt)
        for request in finished:
            self._leave(request)
        return finished

    def clear(self) -> None:
        """Forget every sequence, finished or not. What is cached of them, and is computed, stays."""
        for request in self.running:
            self.cache.free(request.index)
        self.running.clear()
        self.waiting.clear()
        self._requests.clear()
        self._refused = None

    def weights_changed(self) -> None:
        """Reuse nothing that was computed before. Only while there is no work."""
        assert not self.has_work, "the weights may change only while no sequence waits or runs"
        self.cache.clear()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if blocks were lost, or are held by nobody's or by the wrong sequence."""
        self.cache.check_integrity()
        held = sorted(request.index for request in self.running)
        if sorted(self.pool.sequences) != held:  # type: ignore[type-var]
            raise AssertionError(f"running sequences {held}, but blocks are held by {sorted(self.pool.sequences)}")  # type: ignore[type-var]
        for queue in (self.waiting, self.running):
            if any(a.arrival >= b.arrival for a, b in zip(queue, queue[1:], strict=False)):
                raise AssertionError(f"not in order of arrival: {[request.index for request in queue]}")
        if sorted([*held, *(request.index for request in self.waiting)]) != sorted(self._requests):
            raise AssertionError(f"requests {sorted(self._requests)} neither wait nor run, or do both")

    def _take_decode(self, counts: dict[Request, int]) -> None:
        """A token for every decoding sequence, oldest first: who is preempted is newer, and not in ``counts`` yet."""
        for request in self.running.copy():
            if not request.token_ids or request.num_computed < request.num_tokens - 1:
                continue
            needed = request.num_computed // self.block_tokens + 1
            if len(self.pool.table(request.index)) < needed:
                while not self.cache.num_available and self.running[-1] is not request:
                    self._preempt(self.running[-1])
                if not self.cache.num_available:
                    self._preempt(request)
                    break
                self.cache.reserve(request.index, needed)
            counts[request] = 1

    def _admit_waiting(self, prefilling: list[Request]) -> None:
        """Admit sequences in the order of arrival while they fit and the step has work for them."""
        computing = list(prefilling)
        pending = sum(request.num_tokens - request.num_computed for request in computing)
        passed = 0
        while len(self.running) < self.max_num_seqs and len(self.waiting) > passed < self.max_num_seqs:
            if pending >= self.prefill_chunk_size and len(computing) >= MAX_PREFILLS:
                return
            request = self.waiting[passed]
            if self._waits_for_prefix(request, computing):
                passed += 1
                continue
            if not self._admit(request):
                return
            del self.waiting[passed]
            pending += request.num_tokens - request.num_computed
            computing.append(request)

    def _waits_for_prefix(self, request: Request, computing: Sequence[Request]) -> bool:
        """Whether its leader, or one of the sequences in prefill, is to compute the next block of it that is needed."""
        leader = request.leader
        if leader is not None and not leader.token_ids and leader.finish_reason is None:
            return True
        if not self.cache.enabled or request.wants_prompt_logprobs:
            return False
        limit = request.num_tokens - 1  # at least the last token is computed for its logits
        size = self.block_tokens
        first = request.tokens_between(0, min(size, limit))
        salt = request.params.cache_salt
        for other in computing:
            if len(first) < size or other.tokens_between(0, size) != first or other.params.cache_salt != salt:
                continue
            known = len(self.cache.match(request.tokens_between, limit, salt)) * size
            end = known + size
            to_come = other.num_computed < end <= min(limit, other.num_tokens)
            if to_come and other.tokens_between(0, end) == request.tokens_between(0, end):
                return True
        return False

    def _admit(self, request: Request) -> bool:
        """Let the sequence run, on the cached prefix of it, if its next chunk fits. Always, if nothing else runs."""
        available = self.cache.num_available
        if self.running and self._refused and self._refused[0] is request and available <= self._refused[1]:
            return False
        leader = request.leader
        if leader is not None and request.wants_prompt_logprobs and not leader.wants_prompt_logprobs:
            request.prompt_logprobs = leader.prompt_logprobs.copy()
        # Tokens whose logits are wanted have to be computed.
        limit = len(request.prompt_logprobs) if request.wants_prompt_logprobs else request.num_tokens - 1
        blocks = self.cache.match(request.tokens_between, limit, request.params.cache_salt)
        hit = len(blocks) * self.block_tokens
        until = min(request.num_tokens, hit + self.prefill_chunk_size)
        left = self.cache.left_after(blocks, self.layout.blocks_for(until) - len(blocks))
        if self.running and left < self._watermark:
            self._refused = request, available
            return False
        self.cache.start(request.index, blocks)
        insort(self.running, request, key=_arrival)
        request.num_computed = hit
        if not request.admitted:
            request.admitted, request.num_cached_tokens = True, hit
            if self.cache.enabled:
                self.prefix_hit_tokens += hit
                self.prefix_query_tokens += len(request.prompt)
        return True

    def _take_prefill(self, counts: dict[Request, int]) -> None:
        """Chunks of the prompts in prefill, cut to what fits; newer sequences are preempted only if nothing does."""
        prefilling = [request for request in self.running if request not in counts]
        for request, share in zip(prefilling, self._shares(prefilling), strict=True):
            if not share or request.index not in self.pool.live:
                continue
            held = len(self.pool.table(request.index)) * self.block_tokens - request.num_computed
            while not held and not self.cache.num_available and self.running[-1] is not request:
                counts.pop(self.running[-1], None)
                self._preempt(self.running[-1])
            count = min(share, held + self.cache.num_available * self.block_tokens)
            if count:
                self.cache.reserve(request.index, self.layout.blocks_for(request.num_computed + count))
                counts[request] = count

    def _shares(self, prefilling: list[Request]) -> list[int]:
        """Tokens of the budget for each prompt, in the order of arrival."""
        needs = [request.num_tokens - request.num_computed for request in prefilling]
        left = self.prefill_chunk_size
        shares = [0] * len(needs)
        for i in sorted(range(len(needs)), key=lambda i: (i > 0, needs[i])):
            most = left if i else left - min(left // 2, sum(needs[1:]))
            shares[i] = min(needs[i], most)
            left -= shares[i]
        return shares

    def _draft(self, request: Request) -> tuple[int, ...]:
        """Drafted tokens after the one that the sequence decodes, and blocks for them."""
        assert self.drafter is not None
        most = request.max_tokens - len(request.token_ids) - 1
        if most <= 0:
            return ()
        spare = max(0, self.cache.num_available - self._watermark)
        room = (len(self.pool.table(request.index)) + spare) * self.block_tokens - request.num_tokens
        draft = tuple(self.drafter(request)[: min(most, room)])
        self.cache.reserve(request.index, self.layout.blocks_for(request.num_tokens + len(draft)))
        return draft

    def _plan(self, counts: dict[Request, int], drafts: dict[Request, tuple[int, ...]]) -> Step:
        """The step that computes the next ``counts`` tokens of the running sequences, and the drafts after them."""
        seqs: list[SeqStep] = []
        entries: list[Entry] = []
        requests: list[Request] = []
        for request in self.running:
            count = counts.get(request)
            if count is None:
                continue
            start, stop = request.num_computed, request.num_computed + count
            draft = drafts.get(request, ())
            targets = _prompt_targets(request, start, stop) if request.wants_prompt_logprobs else ()
            sample = stop == request.num_tokens
            num_logits = len(targets) + (1 + len(draft) if sample else 0)
            table = self.pool.table(request.index)
            blocks = (stop + len(draft) - 1) // self.block_tokens + 1
            tokens = request.tokens_between(start, stop)
            in_window = () if self.window is None else self.window.pool.table(request.index)
            seqs.append(
                SeqStep(
                    [*tokens, *draft] if draft else tokens,
                    start,
                    table if len(table) == blocks else table[:blocks],
                    num_logits,
                    in_window if len(in_window) <= blocks else in_window[:blocks],
                )
            )
            requests.append(request)
            if num_logits:
                entries.append(Entry(request, targets, draft, sample))
        assert seqs, "a step without a token"
        return Step(StepBatch(seqs), entries, requests)

    def _preempt(self, request: Request) -> None:
        """Take a running sequence's blocks; what it has computed of them stays cached until they are needed."""
        self.num_preemptions += 1
        self.cache.free(request.index)
        _remove(self.running, request)
        request.num_computed = 0
        insort(self.waiting, request, key=_arrival)

    def _leave(self, request: Request) -> None:
        """Take a request out of whatever queue it is in."""
        del self._requests[request.index]
        if request.index in self.pool.live:
            self.cache.free(request.index)
            _remove(self.running, request)
        else:
            _remove(self.waiting, request)
        if not self._requests:
            self._refused = None


def _arrival(request: Request) -> int:
    return request.arrival


def _remove(queue: list[Request], request: Request) -> None:
    at = bisect_left(queue, request.arrival, key=_arrival)
    assert queue[at] is request
    del queue[at]


def _prompt_targets(request: Request, start: int, stop: int) -> tuple[int, ...]:
    """Prompt tokens whose log-probability the logits after ``tokens[start:stop]`` give and that has not been collected.

    A prompt whose log-probabilities are not complete has no output yet, so the rows are the last ones of the chunk.
    """
    return tuple(request.prompt[max(start, len(request.prompt_logprobs)) + 1 : stop + 1])
