"""What the engine works on and what comes back. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron_dcp.engine.params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What one sample of one prompt became.

    Attributes:
        index: Place of the prompt in the call.
        prompt_token_ids: The prompt as the model read it.
        token_ids: Generated tokens, the one that ended the sequence included.
        text: What they say after the prompt, without special tokens, ending before a stop string; ``None`` without a
            tokenizer.
        finish_reason: ``stop`` after an end-of-text token, a stop token or a stop string; ``length`` at ``max_tokens``
            or the context's end; ``abort`` where it was cancelled.
        logprobs: Log-probability of each generated token under the model's distribution (before penalties, temperature,
            top-k, top-p and min-p), natural log; ``None`` unless asked for.
        sample: Which of the prompt's ``n`` samples this is.
        prompt_logprobs: Log-probability of each prompt token given those before it, ``None`` for the first; ``None``
            unless asked for.
        num_cached_tokens: Prompt tokens that were found in the prefix cache rather than computed.
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    logprobs: list[float] | None
    sample: int = 0
    prompt_logprobs: list[float | None] | None = None
    num_cached_tokens: int = field(default=0, compare=False)  # says how it was computed, not what it is


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way through the engine.

    The cache holds the keys of its first ``num_computed`` tokens. A step computes ``count`` more of ``tokens`` and
    decides the next one if and only if that reaches ``num_tokens``. So decoding is a count of 1, and a prompt and the
    recomputation of a preempted sequence are the same thing.

    Attributes:
        index: Names the sequence; unique among those in the engine.
        place: Place of its prompt in the call.
        prompt: Prompt tokens, at least one.
        max_tokens: Most tokens to generate, already cut to the model's context.
        stop_ids: Every token that ends it.
        sample: Which of ``params.n`` samples of the prompt this is, from 0.
        leader: Sample 0 of the same prompt, for the others: they wait until its prompt is computed, and share its
            blocks through the prefix cache.
        token_ids: Generated so far.
        logprobs: Of the generated tokens.
        prompt_logprobs: Of the prompt's second token and those after it, so far.
        num_computed: Tokens of prompt and output whose keys are in the cache.
        finish_reason: ``None`` while it waits or runs.
        num_cached_tokens: Tokens found in the prefix cache when it was first admitted.
        admitted: Whether it has been admitted yet.
        arrival: Order of arrival, given by the scheduler.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    place: int = 0
    sample: int = 0
    leader: Request | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    admitted: bool = False
    arrival: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output (a copy)."""
        return self.prompt + self.token_ids

    @property
    def cached_tokens(self) -> int:
        """Most tokens of it that the cache ever holds: the last generated one is never fed to the model."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be collected."""
        return self.params.prompt_logprobs and len(self.prompt_logprobs) < len(self.prompt) - 1

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """``tokens[start:stop]``, without joining prompt and output."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop]
        if start >= split:
            return self.token_ids[start - split : stop - split]
        return self.prompt[start:] + self.token_ids[: stop - split]

    def append(self, token: int, logprob: float) -> None:
        """Take a generated token and see whether it is the last one. The first ``min_tokens`` never stop."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids and len(self.token_ids) > self.params.min_tokens:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"
