"""What one step computes: plain Python, no torch. The scheduler makes it, the runner reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SeqStep:
    """The tokens of one sequence in a step: a piece of its prompt, or the one token it decoded last.

    Attributes:
        token_ids: Tokens that the step computes, at least one.
        start: Global position of the first of them; all positions before it are in the cache already.
        block_table: Physical blocks of the sequence, enough to hold every token up to the last of this step.
        sample: Whether the logits after the last token are wanted.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: bool


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step of a replica. The order of ``seqs`` is the order of tokens and of logits rows."""

    seqs: Sequence[SeqStep]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(seq.token_ids) for seq in self.seqs)

    @property
    def num_sampled(self) -> int:
        """Rows of logits that the step returns."""
        return sum(seq.sample for seq in self.seqs)
