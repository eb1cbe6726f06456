"""What one step computes: plain Python, no torch. The scheduler makes it, runner and sampler read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron_dcp.engine.request import Request


class SeqStep(NamedTuple):
    """The tokens of one sequence in a step: a piece of what is not computed yet, and drafted tokens after it.

    Attributes:
        token_ids: Tokens that the step computes, at least one.
        start: Global position of the first of them; all positions before it are in the cache already.
        block_table: Physical blocks of the sequence, just enough to hold every token up to the last of this step. May
            be the pool's own list, which grows at the next step.
        num_logits: The logits after the last ``num_logits`` of the tokens are wanted. 0: none; 1: ordinary sampling;
            k + 1: k drafted tokens to verify; all of them: log-probabilities of a prompt.
        window_table: As ``block_table``, for the layers with a sliding window; entries before the window of the first
            of these tokens mean nothing. Empty for a model without such layers.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int
    window_table: Sequence[int] = ()


class Window(NamedTuple):
    """The pool of the layers with a sliding window.

    Attributes:
        tokens: Keys that a query sees, its own one among them.
        num_blocks: Physical blocks on every rank.
    """

    tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step of a replica. The order of ``seqs`` is the order of tokens and of logits rows."""

    seqs: Sequence[SeqStep]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(seq.token_ids) for seq in self.seqs)

    @property
    def num_logits(self) -> int:
        """Rows of logits that the step returns."""
        return sum(seq.num_logits for seq in self.seqs)


class Entry(NamedTuple):
    """What the logits of one ``SeqStep`` are for. They are, in order, a row per prompt target, then the sampling rows.

    Attributes:
        request: Whose they are.
        prompt_targets: The log-probability of each of these prompt tokens under its row is wanted.
        draft: Tokens proposed to come next, which the step computed along.
        sample: Whether the next tokens are decided: then there are ``len(draft) + 1`` sampling rows, and row ``i``
            decides the token after the i-th drafted one.
    """

    request: Request
    prompt_targets: tuple[int, ...]
    draft: tuple[int, ...]
    sample: bool

    @property
    def num_logits(self) -> int:
        """Rows of logits that it reads."""
        return len(self.prompt_targets) + (len(self.draft) + 1 if self.sample else 0)


class Result(NamedTuple):
    """What the sampler makes of an ``Entry``.

    Attributes:
        tokens: The accepted drafts and one token more; empty unless the entry samples.
        logprobs: Of these tokens; NaN where none are asked for.
        prompt_logprobs: One per prompt target.
        error: Why there is none of these; the other entries of the step are not concerned.
    """

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    error: ValueError | None = None
