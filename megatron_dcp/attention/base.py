"""The attention contract: what a back end gets and what it returns. A back end knows no ranks.

Shapes: ``T`` flat query tokens of all sequences, ``S`` slots of the local KV pool, ``N`` query heads, ``K`` KV heads
(``N = K * G``, query head ``n`` reads KV head ``n // G``), ``H`` head dim, ``V`` head dim of the values.

The local index of a key is monotone in its global position, so the keys that a query at global position ``p`` may see
on a rank are a *prefix* of that rank's shard: its first ``visible = local_length(p + 1, rank)`` keys. Causal masking
over any number of ranks therefore needs one integer per query token. Prefill is decode with more tokens: the chunk's
own keys are written to the pool first, then its queries attend to the pool. A layer with a sliding window needs one
integer more, ``hidden``: the first keys of that prefix that lie before the window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

PlanT = TypeVar("PlanT")
PoolOrder = Literal["slots_first", "heads_first"]


@dataclass(frozen=True)
class BatchTensors:
    """An :class:`AttentionBatch` on a device, int32, for back ends whose kernels read it there.

    Attributes:
        cu_q_lens: ``[B + 1]``, where each sequence's query tokens start.
        visible_T: ``[T]``, local keys that each query token may see.
        kv_lens: ``[B]``, local keys that the last query token of each sequence may see.
        block_tables: ``[B, most blocks]``; entries that no query needs are 0.
        hidden_T: ``[T]``, local keys at the start that each query token does not see; ``None``: none anywhere.
    """

    cu_q_lens: Tensor
    visible_T: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    hidden_T: Tensor | None


@dataclass(frozen=True)
class AttentionBatch:
    """One step's queries and where their keys lie, in Python integers (a CPU back end needs no sync to read them).

    Attributes:
        q_lens: Query tokens of each sequence (>= 1), in flat order.
        visible: Local keys that each flat query token may see, length ``T``; never decreases inside a sequence;
            0: none. They are the sequence's first local keys.
        block_tables: Physical blocks of each sequence. Entries of keys that no query sees are never read.
        block_size: Tokens of a physical block. Local key ``l`` lies in slot
            ``table[l // block_size] * block_size + l % block_size``.
        hidden: With a sliding window: how many of its ``visible`` keys each query token does not see, at their start;
            at most all, and like ``visible`` it never decreases inside a sequence. Empty: none.
    """

    q_lens: tuple[int, ...]
    visible: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    block_size: int
    hidden: tuple[int, ...] = ()
    _on_device: dict[torch.device, BatchTensors] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.q_lens) == len(self.block_tables), (len(self.q_lens), len(self.block_tables))
        assert all(n >= 1 for n in self.q_lens), self.q_lens
        assert sum(self.q_lens) == len(self.visible), (sum(self.q_lens), len(self.visible))
        assert self.block_size >= 1, self.block_size
        assert not self.hidden or len(self.hidden) == len(self.visible), (len(self.hidden), len(self.visible))

    @property
    def num_tokens(self) -> int:
        return len(self.visible)

    def blocks_needed(self, num_keys: int) -> int:
        """Blocks that hold a sequence's first ``num_keys`` local keys."""
        return -(-num_keys // self.block_size)

    def tensors(self, device: torch.device) -> BatchTensors:
        """The batch as tensors on ``device``, copied there once."""
        if device not in self._on_device:
            starts = [0]
            for q_len in self.q_lens:
                starts.append(starts[-1] + q_len)
            kv_lens = [self.visible[end - 1] for end in starts[1:]]
            used = [
                [max(0, block) for block in table[: self.blocks_needed(n)]]
                for table, n in zip(self.block_tables, kv_lens, strict=True)
            ]  # a kernel may prefetch what it masks later, so unneeded entries must be real blocks
            width = max(1, *map(len, used)) if used else 1
            tables = [table + [0] * (width - len(table)) for table in used]
            starts_B1, visible_T, kv_lens_B, tables_BC, hidden_T = (
                torch.tensor(x, dtype=torch.int32).to(device)
                for x in (starts, self.visible, kv_lens, tables, self.hidden)
            )
            self._on_device[device] = BatchTensors(
                starts_B1, visible_T, kv_lens_B, tables_BC, hidden_T if self.hidden else None
            )
        return self._on_device[device]


class AttentionBackend(ABC, Generic[PlanT]):
    """One way to compute attention over a rank's own shard.

    An instance may keep work space between calls, so it serves one thread at a time.

    Attributes:
        name: What ``EngineConfig.backend`` calls it.
        pool_order: Physical order of the KV pool that it reads fastest. It takes either.
    """

    name: ClassVar[str]
    pool_order: ClassVar[PoolOrder]

    @abstractmethod
    def supports(self, *, head_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """``None``, or the reason why this back end cannot serve such a pool."""

    @abstractmethod
    def plan(
        self,
        batch: AttentionBatch,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        v_dim: int | None = None,
        v_in_k: bool = False,
    ) -> PlanT:
        """Everything about a step that all layers share, worked out once.

        Args:
            batch: The step's queries and block tables.
            heads: Query heads on this rank, a multiple of ``kv_heads``.
            kv_heads: KV heads on this rank.
            head_dim: Dim of queries and keys.
            dtype: Of the pool.
            device: Of the pool.
            v_dim: Dim of the values; ``None``: ``head_dim``.
            v_in_k: The values are the first ``v_dim`` dims of the keys, in the same memory (MLA's latent): they need
                not be read a second time.
        """

    @abstractmethod
    def attend(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKV: Tensor, plan: PlanT, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of every query token over the keys that it may see in this rank's pool. Inference only.

        Args:
            q_TNH: Queries of the batch in flat order.
            k_SKH: Keys of one layer's pool, any strides. Slots that no query may see can hold anything, NaN included.
            v_SKV: Values of the same pool.
            plan: From :meth:`plan`, of the same batch and shapes.
            scale: What scores are multiplied with before the softmax, usually ``head_dim ** -0.5``.

        Returns:
            ``(out_TNV, lse_TN)``, fp32: softmax-weighted values and the natural-log sum of exp of the scaled scores;
            ``0, -inf`` for a token that sees no key here.
        """
