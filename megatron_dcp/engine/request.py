"""What is asked of the engine and what comes back. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_dcp.config import check_at_least

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends. The defaults decode greedily.

    Attributes:
        max_tokens: Most tokens to generate. A sequence also ends where the model's context ends.
        temperature: Logits are divided by it; 0 is greedy (of equal logits the lowest token id wins).
        top_k: Only the ``top_k`` most likely tokens can be drawn (of equals the lowest ids); 0 for no limit.
        top_p: Only the smallest set of most likely tokens whose probability reaches ``top_p`` can be drawn; applied
            after ``top_k``, on the distribution that it leaves.
        seed: Seed of this request's own random numbers: with it, a request draws the same tokens alone or in any
            batch. ``None`` draws a new seed each time. Means nothing to greedy decoding.
        stop_token_ids: Tokens that end the sequence, besides the model's end-of-text tokens.
        ignore_eos: Do not end at the model's end-of-text tokens.
        logprobs: Also return the log-probability of every generated token.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        check_at_least("max_tokens", self.max_tokens, 1)
        check_at_least("top_k", self.top_k, 0)
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature!r} must be a finite number >= 0; 0 is greedy")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} must be a number in (0, 1]; 1 keeps all tokens")
        if self.seed is not None:
            check_at_least("seed", self.seed, 0)
            if self.seed >= 2**63:
                raise ValueError(f"seed={self.seed} must be below 2**63")
        if isinstance(self.stop_token_ids, int | str):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r} must be a list of token ids")
        for token in self.stop_token_ids:
            check_at_least("a stop token id", token, 0)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without chance."""
        return self.temperature == 0


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What one prompt became.

    Attributes:
        index: Place of the prompt in the call.
        prompt_token_ids: The prompt as the model read it.
        token_ids: Generated tokens, the one that ended the sequence included.
        text: What they say after the prompt, without special tokens; ``None`` without a tokenizer.
        finish_reason: ``stop`` after an end-of-text or stop token; ``length`` at ``max_tokens`` or the context's end.
        logprobs: Log-probability of each generated token under the model's distribution (before temperature, top-k
            and top-p), natural log; ``None`` unless asked for.
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    logprobs: list[float] | None


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way through the engine.

    Attributes:
        index: Place of the prompt in the call; names the sequence in the block pool.
        prompt: Prompt tokens, at least one.
        max_tokens: Most tokens to generate, already cut to the model's context.
        stop_ids: Every token that ends it.
        token_ids: Generated so far.
        logprobs: Of the generated tokens.
        num_computed: Tokens of prompt and output whose keys are in the cache.
        finish_reason: ``None`` while it runs.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: FinishReason | None = None

    @property
    def cached_tokens(self) -> int:
        """Most tokens of it that the cache ever holds: the last generated one is never fed to the model."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def in_prefill(self) -> bool:
        """Whether some of its prompt is not computed yet."""
        return self.num_computed < len(self.prompt)

    def append(self, token: int, logprob: float) -> None:
        """Take a generated token and see whether it is the last one."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
