"""A model of the engine's tests: its next token is a function of the whole history that it finds in a paged cache."""

from __future__ import annotations

import hashlib

import torch

from megatron_dcp.cache import KVLayout
from megatron_dcp.engine.batch import StepBatch
from megatron_dcp.engine.request import Request, SamplingParams

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


def request(index: int, prompt: list[int], max_tokens: int = 8, **params) -> Request:
    """A request as ``PromptReader`` makes it."""
    stop = frozenset(params.get("stop_token_ids", ()))
    own = SamplingParams(max_tokens=max_tokens, **params)
    return Request(index=index, prompt=list(prompt), params=own, max_tokens=max_tokens, stop_ids=stop)


class FakeRunner:
    """Keeps tokens in the slots of all ranks' pools, where the layout says, and reads them back from there."""

    def __init__(self, layout: KVLayout, num_blocks: int, prefill_chunk_size: int = 10**9) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.prefill_chunk_size = prefill_chunk_size
        self.slots: dict[tuple[int, int], int] = {}
        self.batches: list[StepBatch] = []

    def step(self, batch: StepBatch) -> torch.Tensor:
        self.batches.append(batch)
        assert batch.seqs and all(seq.token_ids for seq in batch.seqs)
        assert sum(len(seq.token_ids) for seq in batch.seqs if not seq.sample) <= self.prefill_chunk_size
        for seq in batch.seqs:
            assert len(set(seq.block_table)) == len(seq.block_table)
            assert all(0 <= block < self.num_blocks for block in seq.block_table)
            for position, token in enumerate(seq.token_ids, seq.start):
                self.slots[self._slot(seq.block_table, position)] = token
        rows = [logits_after(self._history(seq)) for seq in batch.seqs if seq.sample]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _history(self, seq) -> list[int]:
        return [self.slots[self._slot(seq.block_table, p)] for p in range(seq.start + len(seq.token_ids))]

    def _slot(self, table, position: int) -> tuple[int, int]:
        local = self.layout.local_index(position)
        return self.layout.owner(position), self.layout.slot(table[local // self.layout.block_size], local)
