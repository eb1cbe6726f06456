"""Where the token at a global position lives: DCP rank, local index, block, slot. Closed form, no torch.

``D`` DCP ranks take turns; each holds ``I`` consecutive tokens before the next takes over. A physical block is
``block_size`` local tokens of one rank; a logical block is the ``block_size * D`` global positions that one physical
block id stands for on all ranks. For ``D = 2``, ``I = 2``, ``block_size = 4``::

    global   | 0  1| 2  3| 4  5| 6  7| 8  9|10 11|12 13|14 15|16 ...
    rank 0   [ 0  1]     [ 4  5]     [ 8  9]     [12 13]     [16 ...
    rank 1         [ 2  3]     [ 6  7]     [10 11]     [14 15]
    local    | 0  1| 0  1| 2  3| 2  3| 4  5| 4  5| 6  7| 6  7| 8 ...
    block    |<----- table[0] ------>|<----- table[1] ------>|<- table[2]

The local index grows with the global position. So the tokens that a rank owns of a range of positions are a range of
local indices, and the keys that a query may see on a rank are the first ``visible`` ones of that rank's shard.

The formulas use ``//``, ``%`` and ``==`` only: what is typed ``IntOrTensor`` takes an int or, elementwise, an integer
tensor. Positions are not negative.

Of a layer with a sliding window a query sees a suffix of those keys, ``[hidden, visible)``, since they are in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from megatron_dcp.config import check_at_least, check_interleave

if TYPE_CHECKING:
    from torch import Tensor

IntOrTensor = TypeVar("IntOrTensor", int, "Tensor")


@dataclass(frozen=True)
class KVLayout:
    """How positions are dealt out over the DCP ranks.

    Attributes:
        dcp_size: ``D``, ranks that share the KV of one sequence.
        interleave: ``I``, consecutive tokens on one rank; divides ``block_size``.
        block_size: Tokens of one physical block on one rank.

    Raises:
        ValueError: A size is below 1, or ``interleave`` does not divide ``block_size``.
    """

    dcp_size: int
    interleave: int
    block_size: int

    def __post_init__(self) -> None:
        check_at_least("dcp_size", self.dcp_size, 1)
        check_interleave("interleave", self.interleave, self.block_size)

    @property
    def logical_block_tokens(self) -> int:
        """Tokens of a sequence that one entry of its block table stands for, over all ranks."""
        return self.block_size * self.dcp_size

    def owner(self, position: IntOrTensor) -> IntOrTensor:
        """DCP rank that holds the token at this global position."""
        return position // self.interleave % self.dcp_size

    def local_index(self, position: IntOrTensor) -> IntOrTensor:
        """Index of the token in its owner's shard of the sequence."""
        return position // (self.interleave * self.dcp_size) * self.interleave + position % self.interleave

    def global_position(self, local: IntOrTensor, rank: int) -> IntOrTensor:
        """Global position of the token at a local index of ``rank``: the inverse of ``owner``, ``local_index``."""
        self._check_rank(rank)
        return (local // self.interleave * self.dcp_size + rank) * self.interleave + local % self.interleave

    def local_length(self, length: IntOrTensor, rank: int) -> IntOrTensor:
        """Tokens that ``rank`` holds of a sequence of ``length`` tokens (of the positions below ``length``)."""
        self._check_rank(rank)
        # Whole turns of I tokens, then the unfinished turn where it is this rank's.
        turns = length // self.interleave
        whole = (turns + (self.dcp_size - 1 - rank)) // self.dcp_size * self.interleave
        return whole + (turns % self.dcp_size == rank) * (length % self.interleave)

    def visible(self, position: IntOrTensor, rank: int) -> IntOrTensor:
        """Keys on ``rank`` that a causal query at this position sees: so many from the start of the local shard."""
        return self.local_length(position + 1, rank)

    def hidden(self, position: IntOrTensor, window: int, rank: int) -> IntOrTensor:
        """Keys on ``rank`` that lie before the sliding window of a query at this position, which sees ``window`` keys.

        They are the first ones of the local shard: the query sees local keys ``[hidden, visible)``.
        """
        return self.local_length(window_start(position, window), rank)

    def first_block(self, position: int, window: int) -> int:
        """Entry of the block table with the first key that a query at this position sees through a sliding window."""
        return window_start(position, window) // self.logical_block_tokens

    def window_blocks(self, window: int, num_queries: int) -> int:
        """Most entries of the block table that ``num_queries`` consecutive queries see through a sliding window."""
        return (window + num_queries - 3) // self.logical_block_tokens + 2

    def local_range(self, start: int, stop: int, rank: int) -> range:
        """Local indices on ``rank`` of the tokens that it owns of the global positions ``[start, stop)``.

        The tokens themselves, counted from ``start``, are ``global_position(local, rank) - start``; with tensors::

            local_t = torch.arange(mine.start, mine.stop)  # mine = layout.local_range(start, start + n, rank)
            token_t = layout.global_position(local_t, rank) - start
        """
        return range(self.local_length(start, rank), self.local_length(stop, rank))

    def blocks_for(self, length: IntOrTensor) -> IntOrTensor:
        """Entries of the block table that a sequence of ``length`` tokens needs; the same on every rank."""
        return (length + (self.logical_block_tokens - 1)) // self.logical_block_tokens

    def slot(self, block: IntOrTensor, local: IntOrTensor) -> IntOrTensor:
        """Slot in the pool of a local index whose physical block is ``block = table[local // block_size]``."""
        return block * self.block_size + local % self.block_size

    def _check_rank(self, rank: int) -> None:
        assert 0 <= rank < self.dcp_size, f"dcp rank {rank} of {self.dcp_size}"


def window_start(position: IntOrTensor, window: int) -> IntOrTensor:
    """First position that a query at this one sees through a sliding window of so many keys."""
    start = position + 1 - window
    return start * (start > 0)
