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
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_dcp.shard import Shard, is_quantised

PlanT = TypeVar("PlanT")
PoolOrder = Literal["slots_first", "heads_first"]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a back end has to serve: the same for all layers of a kind, and for all steps.

    Attributes:
        heads: Query heads on this rank, a multiple of ``kv_heads``.
        kv_heads: KV heads on this rank.
        head_dim: Dim of queries and keys.
        v_dim: Dim of the values.
        v_in_k: The values are the first ``v_dim`` dims of the keys, in the same memory (MLA's latent): they need not be
            read a second time.
        dtype: Of the pool.
        query_dtype: Of the queries; ``None``: as the pool, and with a quantised one (`megatron_dcp.shard`) fp32.
        device: Of the pool.
        block_size: Slots of a physical block.
        windows: Whether query tokens may have hidden keys (``AttentionBatch.hidden``).
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    v_in_k: bool = False
    dtype: torch.dtype
    query_dtype: torch.dtype | None = None
    device: torch.device
    block_size: int
    windows: bool = False

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, (self.heads, self.kv_heads)

    @property
    def queries(self) -> torch.dtype:
        """``query_dtype`` with its default filled in."""
        return self.query_dtype or (torch.float32 if is_quantised(self.dtype) else self.dtype)

    @property
    def group(self) -> int:
        """Query heads per KV head, ``G``."""
        return self.heads // self.kv_heads


class BatchTensors(NamedTuple):
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
    _on_device: dict[tuple[torch.device, int], BatchTensors] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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

    def tensors(self, device: torch.device, blocks: int = 0) -> BatchTensors:
        """The batch as tensors on ``device``, copied there once.

        Args:
            blocks: Columns of the block tables at least.
        """
        if (device, blocks) not in self._on_device:
            on_host = self._on_host(blocks)
            self._on_device[device, blocks] = BatchTensors(*(None if x is None else x.to(device) for x in on_host))  # type: ignore[arg-type]
        return self._on_device[device, blocks]

    def copy_to(self, tensors: BatchTensors) -> None:
        """Write the batch over the tensors of another one with as many query tokens, in place.

        Args:
            tensors: Of ``AttentionBatch.tensors``, with enough columns in its block tables.
        """
        for old, new in zip(tensors, self._on_host(tensors.block_tables.shape[1]), strict=True):
            if old is not None and new is not None:
                old.copy_(new, non_blocking=True)

    def _on_host(self, blocks: int) -> BatchTensors:
        starts = np.concatenate(([0], np.cumsum(self.q_lens, dtype=np.int64)))
        visible = np.array(self.visible, dtype=np.int32)
        kv_lens = visible[starts[1:] - 1]
        needed = [self.blocks_needed(int(n)) for n in kv_lens]
        # a kernel may prefetch what it masks later, so entries that no query needs are real blocks too
        tables = np.zeros((len(needed), max(1, blocks, *needed, 1)), dtype=np.int32)
        for row, table, count in zip(tables, self.block_tables, needed, strict=True):
            row[:count] = table[:count]
        arrays = starts, visible, kv_lens, np.maximum(tables, 0), self.hidden or None
        return BatchTensors(
            *(None if x is None else torch.from_numpy(np.asarray(x, dtype=np.int32)) for x in arrays)  # type: ignore[arg-type]
        )


class AttentionBackend(ABC, Generic[PlanT]):
    """One way to compute attention over a rank's own shard.

    An instance may keep work space between calls, so it serves one thread at a time.

    Attributes:
        name: What ``EngineConfig.backend`` calls it.
        pool_order: Physical order of the KV pool that it reads fastest, or the only one that it reads.
        refreshable: Whether its plans can be refreshed, which CUDA graphs need.
    """

    name: ClassVar[str]
    pool_order: ClassVar[PoolOrder]
    refreshable: ClassVar[bool] = False

    @abstractmethod
    def supports(self, spec: AttentionSpec) -> str | None:
        """``None``, or the reason why this back end cannot serve such a pool here."""

    @abstractmethod
    def plan(self, batch: AttentionBatch, spec: AttentionSpec, *, blocks: int = 0) -> PlanT:
        """Everything about a step that all layers share, worked out once.

        Args:
            blocks: Most blocks of a sequence that a batch will have for which the plan is refreshed; 0: it will not be.
        """

    def refresh(self, plan: PlanT, batch: AttentionBatch) -> None:
        """Let a plan of decode tokens serve another batch of as many, in place.

        All that kernels read of the plan keeps its address and its size, so a CUDA graph that was captured with it
        computes the new batch. Both batches have one query token per sequence.
        """
        raise NotImplementedError(f"plans of {self.name} cannot be refreshed")

    @abstractmethod
    def attend(self, q_TNH: Tensor, shard: Shard, plan: PlanT, *, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of every query token over the keys that it may see in this rank's pool. Inference only.

        Args:
            q_TNH: Queries of the batch in flat order.
            shard: Keys and values of one layer's pool. Slots that no query may see can hold anything, NaN included.
            plan: From :meth:`plan`, of the same batch and shapes.
            scale: What scores are multiplied with before the softmax, usually ``head_dim ** -0.5``.

        Returns:
            ``(out_TNV, lse_TN)``, fp32: softmax-weighted values and the natural-log sum of exp of the scaled scores;
            ``0, -inf`` for a token that sees no key here.
        """


@dataclass(frozen=True)
class Planned:
    """A step's plan and the back end that made it."""

    backend: AttentionBackend[Any]
    plan: Any

    def attend(self, q_TNH: Tensor, shard: Shard, *, scale: float) -> tuple[Tensor, Tensor]:
        """See :meth:`AttentionBackend.attend`."""
        return self.backend.attend(q_TNH, shard, self.plan, scale=scale)

    def refresh(self, batch: AttentionBatch) -> None:
        """See :meth:`AttentionBackend.refresh`."""
        self.backend.refresh(self.plan, batch)


@dataclass(frozen=True)
class Attention:
    """The back end that serves one kind of layer.

    Attributes:
        reason: Why it was picked, one line.
    """

    backend: AttentionBackend[Any]
    spec: AttentionSpec
    reason: str

    def plan(self, batch: AttentionBatch, *, blocks: int = 0) -> Planned:
        """Plan a step; see :meth:`AttentionBackend.plan`."""
        return Planned(self.backend, self.backend.plan(batch, self.spec, blocks=blocks))
