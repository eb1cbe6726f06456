"""A model of the engine's tests: its next token is a function of the whole history that it finds in a paged cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from megatron_dcp.cache import KVLayout
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.engine.batch import Entry, Result, SeqStep, StepBatch, Window
from megatron_dcp.engine.core import Engine
from megatron_dcp.engine.link import Link
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.request import Request
from megatron_dcp.engine.sampler import Sampler

VOCAB = 97


def logits_after(tokens: list[int]) -> torch.Tensor:
    """fp32 ``[VOCAB]``: random, but a pure function of the tokens."""
    digest = hashlib.sha256(repr(tokens).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(VOCAB, generator=generator) * 3


def greedy_alone(prompt: list[int], max_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """What a prompt becomes without any engine."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(logits_after(tokens).argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def request(index: int, prompt: list[int], max_tokens: int = 8, *, leader: Request | None = None, **params) -> Request:
    """A request as ``PromptReader`` makes it."""
    stop = frozenset(params.get("stop_token_ids", ()))
    own = SamplingParams(max_tokens=max_tokens, **params)
    sizes = dict(max_tokens=max_tokens, stop_ids=stop, leader=leader)
    return Request(index=index, place=index, prompt=list(prompt), params=own, **sizes)


def greedy_results(entries: Sequence[Entry], logits: torch.Tensor) -> list[Result]:
    """What a greedy sampler makes of a step's logits: drafts are accepted while they are what it would choose."""
    results, row = [], 0
    for entry in entries:
        rows = logits[row : row + entry.num_logits].log_softmax(dim=-1)
        row += entry.num_logits
        targets = len(entry.prompt_targets)
        asked = [float(rows[i, token]) for i, token in enumerate(entry.prompt_targets)]
        tokens: list[int] = []
        for choices, drafted in zip(rows[targets:], [*entry.draft, None], strict=True) if entry.sample else ():
            tokens.append(int(choices.argmax()))
            if tokens[-1] != drafted:
                break
        logprobs = [float(rows[targets + i, token]) for i, token in enumerate(tokens)]
        results.append(Result(tokens, logprobs, asked))
    assert row == len(logits)
    return results


class FakeRunner:
    """Keeps tokens in the slots of all ranks' pools, where the layout says, and reads them back from there.

    With ``window`` also in another pool, of which it reads what a query sees through a sliding window.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        prefill_chunk_size: int = 10**9,
        window: Window | None = None,
    ) -> None:
        self.window = window
        self.window_slots: dict[tuple[int, int], int] = {}
        self.layout = layout
        self.num_blocks = num_blocks
        self.prefill_chunk_size = prefill_chunk_size
        self.slots: dict[tuple[int, int], int] = {}
        self.batches: list[StepBatch] = []

    def step(self, batch: StepBatch) -> torch.Tensor:
        self.batches.append(batch)
        assert batch.seqs and all(seq.token_ids for seq in batch.seqs)
        assert all(0 <= seq.num_logits <= len(seq.token_ids) for seq in batch.seqs)
        assert sum(len(seq.token_ids) for seq in batch.seqs if not seq.num_logits) <= self.prefill_chunk_size
        for seq in batch.seqs:
            assert len(set(seq.block_table)) == len(seq.block_table)
            assert len(seq.block_table) == self.layout.blocks_for(seq.start + len(seq.token_ids))
            assert all(0 <= block < self.num_blocks for block in seq.block_table)
            for position, token in enumerate(seq.token_ids, seq.start):
                self.slots[self._slot(seq.block_table, position)] = token
            if self.window is not None:
                self._write_window(seq)
        if self.window is not None:
            for seq in batch.seqs:
                self._check_window(seq, self.window.tokens)
        rows = []
        for seq in batch.seqs:
            if seq.num_logits:
                history = self._history(seq)
                rows += [logits_after(history[: len(history) - i]) for i in reversed(range(seq.num_logits))]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _write_window(self, seq: SeqStep) -> None:
        assert len(seq.window_table) == len(seq.block_table)
        for position, token in enumerate(seq.token_ids, seq.start):
            self.window_slots[self._slot(seq.window_table, position)] = token

    def _check_window(self, seq: SeqStep, tokens: int) -> None:
        """The window of the step's first token up to its last one holds what was written there."""
        history = self._history(seq)
        for position in range(max(0, seq.start + 1 - tokens), len(history)):
            assert self.window_slots[self._slot(seq.window_table, position)] == history[position], (seq, position)

    def _history(self, seq: SeqStep) -> list[int]:
        return [self.slots[self._slot(seq.block_table, p)] for p in range(seq.start + len(seq.token_ids))]

    def _slot(self, table: Sequence[int], position: int) -> tuple[int, int]:
        local = self.layout.local_index(position)
        return self.layout.owner(position), self.layout.slot(table[local // self.layout.block_size], local)


class Alone:
    """A process group of one rank."""

    def size(self):
        return 1

    def rank(self):
        return 0


def make_engine(
    *, group=None, layout=None, num_blocks=None, runners=None, tokenizer=None, tell_outcomes=True, **config
) -> Engine:
    """An engine over fake runners, which are added to the list ``runners`` as they are made."""
    layout = layout or KVLayout(2, 1, 2)
    engine_config = EngineConfig(**config)
    cache = CacheConfig(block_size=layout.block_size, kv_interleave_size=layout.interleave, num_blocks=num_blocks)
    make_runner = runner_maker(layout, num_blocks, engine_config.prefill_chunk_size, runners)
    options = dict(tokenizer=tokenizer, tell_outcomes=tell_outcomes)
    return Engine(make_runner, layout, cache, engine_config, Sampler(VOCAB), Link(group or Alone(), 0), **options)


def runner_maker(layout: KVLayout, num_blocks: int | None, chunk: int = 10**9, runners: list | None = None):
    """``make_runner`` of an engine or a follower."""

    def make_runner(blocks):
        assert (blocks is None) == (num_blocks is not None)
        runner = FakeRunner(layout, blocks or num_blocks, chunk)
        if runners is not None:
            runners.append(runner)
        return runner

    return make_runner


def run(engine: Engine, requests: Sequence[Request] = ()) -> list[list[int]]:
    """Add requests, run the engine until it is idle; the requests' tokens."""
    engine.add(requests)
    while engine.has_work:
        engine.step()
    # One that runs for days keeps nothing of what has ended.
    assert not engine.sampler._seeds and not engine._stops and not engine.announcer._told
    engine.clear()
    return [request.token_ids for request in requests]
