"""What the driver of a replica tells its followers, as numbers. numpy, no torch.

A message is one array of fp64, which holds token ids, block numbers and fp32 log-probabilities exactly: first
everything that is whole, then the log-probabilities::

    length, whole numbers, kind, blocks, flags, gone.., outcomes.., sequences.., text.. | log-probabilities..

A plan says what is new. Followers keep the block table of every sequence that they have seen (`Tables`), the driver how
much of each they have (`Known`); so a sequence that decodes costs seven numbers a step.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.engine.request import FinishReason

_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "abort")


class Kind(IntEnum):
    """What a message asks of a follower."""

    STEP = 0  # compute it
    POOL = 1  # make a pool, and the runner with it
    END = 2  # no more comes of this run
    ERROR = 3  # no more comes, the driver has failed
    IDLE = 4  # nothing; the driver is alive


class Outcome(NamedTuple):
    """What a step brought a request.

    Attributes:
        request: Its index.
        tokens: That it keeps, and their log-probabilities (NaN where not asked for).
        logprobs: See ``tokens``.
        prompt_logprobs: Further log-probabilities of its prompt.
        finish_reason: If it has ended.
        num_cached_tokens: As in `Request`.
    """

    request: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    prompt_logprobs: Sequence[float]
    finish_reason: FinishReason | None
    num_cached_tokens: int


class SeqPlan(NamedTuple):
    """A `SeqStep` for somebody who knows the sequence's block table of the step before.

    Attributes:
        request: Its index.
        start: As in `SeqStep`.
        num_logits: As in `SeqStep`.
        kept: Entries of the known table that still hold.
        blocks: Entries after them.
        in_window: As many entries of the other table, if the model has layers with a sliding window.
        tokens: ``SeqStep.token_ids``.
    """

    request: int
    start: int
    num_logits: int
    kept: int
    blocks: Sequence[int]
    in_window: Sequence[int]
    tokens: Sequence[int]


class Message(NamedTuple):
    """One message. Outcomes, which are those of the step before, come with any kind.

    Attributes:
        kind: What else there is to it.
        outcomes: By request, in the order in which the driver hands them out.
        seqs: Of a step.
        gone: Of a step: requests whose tables can be forgotten.
        num_blocks: Of a pool; 0 where the configuration gives the size.
        text: Of an error.
        is_value_error: Of an error: whether a user can do something about it.
    """

    kind: Kind
    outcomes: Sequence[Outcome] = ()
    seqs: Sequence[SeqPlan] = ()
    gone: Sequence[int] = ()
    num_blocks: int = 0
    text: str = ""
    is_value_error: bool = False


def encode(message: Message) -> np.ndarray:
    """The message as fp64; the first number is how many there are."""
    windows = any(len(seq.in_window) for seq in message.seqs)
    whole: list[Any] = [0, 0, message.kind, message.num_blocks, message.is_value_error, windows, len(message.gone)]
    whole += message.gone
    fractions: list[float] = []
    whole.append(len(message.outcomes))
    for index, tokens, logprobs, prompt_logprobs, reason, cached in message.outcomes:
        whole += (index, _REASONS.index(reason), cached, len(prompt_logprobs), len(tokens))
        whole += tokens
        fractions += logprobs
        fractions += prompt_logprobs
    whole.append(len(message.seqs))
    for index, start, num_logits, kept, blocks, in_window, tokens in message.seqs:
        assert len(in_window) == (len(blocks) if windows else 0)
        whole += (index, start, num_logits, kept, len(blocks), len(tokens))
        whole += blocks
        whole += in_window
        whole += tokens
    whole += map(ord, message.text)
    whole[:2] = len(whole) + len(fractions), len(whole)
    return np.array(whole + fractions, dtype=np.float64)


def decode(numbers: np.ndarray) -> Message:
    """The inverse of `encode`; what follows the message in the array is not looked at."""
    length, split = int(numbers[0]), int(numbers[1])
    whole: list[int] = numbers[:split].astype(np.int64).tolist()
    fractions: list[float] = numbers[split:length].tolist()
    windows, at, at_fraction = whole[5], 7 + whole[6], 0
    gone = whole[7:at]
    outcomes = []
    for _ in range(whole[at]):
        index, reason, cached, num_prompt, num_tokens = whole[at + 1 : at + 6]
        tokens = whole[at + 6 : at + 6 + num_tokens]
        middle = at_fraction + num_tokens
        scores = fractions[at_fraction:middle], fractions[middle : middle + num_prompt]
        outcomes.append(Outcome(index, tokens, *scores, _REASONS[reason], cached))
        at, at_fraction = at + 5 + num_tokens, middle + num_prompt
    at += 1
    seqs = []
    for _ in range(whole[at]):
        index, start, num_logits, kept, num_blocks, num_tokens = whole[at + 1 : at + 7]
        at += 7
        lists = []
        for count in (num_blocks, num_blocks * windows, num_tokens):
            lists.append(whole[at : at + count])
            at += count
        at -= 1
        seqs.append(SeqPlan(index, start, num_logits, kept, *lists))
    text = "".join(map(chr, whole[at + 1 :]))
    return Message(Kind(whole[2]), outcomes, seqs, gone, whole[3], text, bool(whole[4]))


class Known:
    """The driver's side of the block tables: how many entries of each the followers have."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}

    def plan(
        self, indices: Sequence[int], seqs: Sequence[SeqStep], running: Set[int]
    ) -> tuple[list[SeqPlan], list[int]]:
        """What followers have to hear of a step, and the requests that they can forget.

        Args:
            indices: Request of each of ``seqs``.
            seqs: The step.
            running: Requests that hold blocks, those of the step among them. Whoever lost its blocks since the last
                call is not in the step: it may come back with others only in a later one.
        """
        lengths = self._lengths
        gone = [index for index in lengths if index not in running]
        for index in gone:
            del lengths[index]
        plans = []
        for index, (tokens, start, table, num_logits, in_window) in zip(indices, seqs, strict=True):
            length = len(table)
            kept = min(lengths.get(index, 0), length)
            lengths[index] = length
            new = (table[kept:], in_window[kept:]) if kept < length else ((), ())
            plans.append(SeqPlan(index, start, num_logits, kept, *new, tokens))
        return plans, gone

    def clear(self) -> None:
        """Begin anew, as the followers do."""
        self._lengths.clear()


class Tables:
    """A follower's side: the block tables themselves."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[list[int], list[int]]] = {}

    def batch(self, message: Message) -> StepBatch:
        """The step of a message. Its tables are those kept here, which the next step changes."""
        for index in message.gone:
            del self._tables[index]
        seqs = []
        for index, start, num_logits, kept, blocks, window_blocks, tokens in message.seqs:
            table, in_window = self._tables.setdefault(index, ([], []))
            del table[kept:], in_window[kept:]
            table += blocks
            in_window += window_blocks
            seqs.append(SeqStep(tokens, start, table, num_logits, in_window))
        return StepBatch(seqs)
