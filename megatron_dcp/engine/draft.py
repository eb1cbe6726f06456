"""Guesses at the next tokens from what the sequence itself holds. No torch."""

from __future__ import annotations

from megatron_dcp.config import check_at_least
from megatron_dcp.engine.request import Request


class NgramDrafter:
    """Prompt lookup (Saxena 2023): what followed the last tokens when they stood in the sequence before.

    The longest n-gram at the sequence's end that occurs earlier decides, and of its earlier occurrences the latest.
    What follows that one is copied; where it reaches the sequence's end the copy goes on with what it has copied, so a
    sequence that repeats itself is continued at full length. An index per request makes a call cost as much as the
    tokens that are new since the last one; with n-grams of 1 to 3 it takes some 300 bytes and 0.7 us per token.

    Args:
        max_tokens: Tokens to propose.
        max_ngram: Longest n-gram to look for.
        min_ngram: Shortest one.

    Raises:
        ValueError: A size is no whole number of at least 1, or ``min_ngram`` exceeds ``max_ngram``.
    """

    def __init__(self, max_tokens: int, max_ngram: int = 3, min_ngram: int = 1) -> None:
        check_at_least("max_tokens", max_tokens, 1)
        check_at_least("min_ngram", min_ngram, 1)
        check_at_least("max_ngram", max_ngram, 1)
        if min_ngram > max_ngram:
            raise ValueError(f"min_ngram={min_ngram} exceeds max_ngram={max_ngram}; lower the one or raise the other")
        self.max_tokens = max_tokens
        self.lengths = range(max_ngram, min_ngram - 1, -1)
        self._indexes: dict[Request, _Index] = {}

    def __call__(self, request: Request) -> list[int]:
        """``max_tokens`` tokens that may follow, none where the sequence's end is new to it."""
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = _Index(request.prompt, self.lengths)
        index.extend(request.token_ids[len(index.tokens) - len(request.prompt) :])
        return index.propose(self.max_tokens)

    def forget(self, request: Request) -> None:
        """Drop the index of a request that has ended."""
        self._indexes.pop(request, None)


class _Index:
    """Where every n-gram of a sequence last occurred, but for those at its very end."""

    def __init__(self, prompt: list[int], lengths: range) -> None:
        self.tokens = list(prompt)
        self.follows: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in lengths}  # n-gram: place after its last
        self._indexed = 0  # n-grams that end before this place are in the index

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens
        end = len(self.tokens) - 1
        for n, follows in self.follows.items():
            first = max(self._indexed, n - 1)
            if first < end:
                columns = (self.tokens[first - i : end - i] for i in range(n - 1, -1, -1))
                follows.update(zip(zip(*columns, strict=True), range(first + 1, end + 1), strict=True))
        self._indexed = end

    def propose(self, count: int) -> list[int]:
        for n, follows in self.follows.items():
            start = follows.get(tuple(self.tokens[-n:])) if len(self.tokens) > n else None
            if start is not None:
                source = self.tokens[start : start + count]
                return [source[i % len(source)] for i in range(count)]
        return []
