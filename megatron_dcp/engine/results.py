"""One rank of a replica samples; this is how the others learn what it decided.

The message is one broadcast of fp64, which holds any token id and any fp32 exactly: whether it failed, then for every
entry the number of tokens, and room for all tokens and log-probabilities that it may have. Every rank knows the
entries, and so the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.comm.collectives import broadcast
from megatron_dcp.comm.consensus import agree
from megatron_dcp.engine.batch import Entry, Result
from megatron_dcp.engine.sampler import Sampler
from megatron_dcp.metrics import Metrics


class Decider:
    """The tokens of every sampled sequence, the same on every rank of ``group``.

    Args:
        sampler: Used on the group's first rank only.
        group: Process group of the replica.
        metrics: Counts the broadcast.
    """

    def __init__(self, sampler: Sampler, group: Any, metrics: Metrics | None = None) -> None:
        self.sampler = sampler
        self.group = group
        self.metrics = metrics

    def decide(self, logits_RV: Tensor, entries: Sequence[Entry]) -> list[Result]:
        """What the sampler makes of the entries.

        Args:
            logits_RV: fp32; only those of the group's first rank are looked at.
            entries: The same on every rank.

        Raises:
            ValueError: On every rank, what the sampler raised: logits that are not finite.
            CollectiveError: A rank of the replica died, or did not come within the time limit.
        """
        if not entries:
            return []
        if self.group.size() == 1:
            return self.sampler.sample(logits_RV, entries)
        results, error = [], None
        if self.group.rank() == 0:
            try:
                results = self.sampler.sample(logits_RV, entries)
            except ValueError as caught:
                error = caught
        message = torch.zeros(1 + sum(map(_room, entries)), dtype=torch.float64)
        if self.group.rank() == 0:
            message[:] = torch.tensor(_pack(results, entries) if error is None else [1.0] + [0.0] * (len(message) - 1))
        message = message.to(logits_RV.device)
        broadcast(message, self.group, self.metrics)
        numbers = message.tolist()
        if numbers[0]:
            agree(error, self.group)
        return results if self.group.rank() == 0 else _unpack(numbers, entries)


def _most(entry: Entry) -> int:
    """Most tokens that the entry's result can have."""
    return len(entry.draft) + 1 if entry.sample else 0


def _room(entry: Entry) -> int:
    return 1 + 2 * _most(entry) + len(entry.prompt_targets)


def _pack(results: Sequence[Result], entries: Sequence[Entry]) -> list[float]:
    numbers = [0.0]
    for result, entry in zip(results, entries, strict=True):
        unused = [math.nan] * (_most(entry) - len(result.tokens))
        numbers += [len(result.tokens), *result.tokens, *unused, *result.logprobs, *unused, *result.prompt_logprobs]
    return numbers


def _unpack(numbers: list[float], entries: Sequence[Entry]) -> list[Result]:
    results, at = [], 1
    for entry in entries:
        count, most = int(numbers[at]), _most(entry)
        tokens, logprobs = at + 1, at + 1 + most
        at += _room(entry)
        results.append(
            Result(
                [int(token) for token in numbers[tokens : tokens + count]],
                numbers[logprobs : logprobs + count],
                numbers[at - len(entry.prompt_targets) : at],
            )
        )
    return results
