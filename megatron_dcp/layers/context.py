"""What one step hands to every attention layer: the tokens' places in the cache, and who computes and merges.

Shapes: ``T`` tokens of the step on this rank, flat over sequences; ``t`` those whose keys it keeps; ``N`` query heads,
``K`` KV heads, ``H`` head dim, ``S`` slots of the pool, ``n`` heads after an exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from megatron_dcp.attention.base import Planned
from megatron_dcp.cache.pool import KVPool
from megatron_dcp.comm.exchange import Exchange, Exchanged
from megatron_dcp.metrics import Metrics, timed
from megatron_dcp.rope import rotate
from megatron_dcp.shard import Shard


@dataclass(frozen=True, kw_only=True)
class KindPlan:
    """What one step means to the layers of one kind: those that see everything, or those with a sliding window.

    Attributes:
        cos_T1R, sin_T1R: RoPE at the tokens' global positions; ``None`` for a model without RoPE.
        slots_t: Slots in the kind's pool of the tokens whose keys this rank keeps, int64.
        attention: How the replicated tokens attend over this rank's shard: the back end's plan, or with MLA a
            `LatentPlan` over it; ``None``: there are none.
        striped: The `StripedPlan` of the others; ``None``: there are none.
    """

    cos_T1R: Tensor | None
    sin_T1R: Tensor | None
    slots_t: Tensor
    attention: Any
    striped: Any


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The tokens of one step on one rank; made once and read by every layer.

    First come the *replicated* tokens, which all ranks of the DCP group compute, then the *striped* ones, which this
    rank alone computes (`megatron_dcp.layers.prefill`).

    Attributes:
        owned_t: Indices into ``T`` of the tokens whose keys this rank keeps, int64; ``None``: all of them.
        replicated: Number of replicated tokens.
        striped_counts: Number of striped tokens of every rank; empty: there are none.
        kinds: By kind of layer.
    """

    owned_t: Tensor | None
    replicated: int
    striped_counts: tuple[int, ...]
    kinds: tuple[KindPlan, ...]


class DCPContext(StaticInferenceContext):
    """Megatron inference context of a step over a sharded KV cache.

    Passing it as ``inference_context`` sends :class:`~megatron_dcp.layers.gqa.DCPSelfAttention` down the decode
    path; any other context, or none, leaves Megatron's own forward in charge.

    Args:
        pools: This rank's shard of the cache, a pool for each kind of layer.
        cache_index: Megatron's ``layer_number`` → kind, and layer of that kind's pool.
        groups: Process groups with ``.tp``, ``.dcp``, ``.tp_dcp`` and ``.dcp_layout``.
        exchange: Merges partials over ``groups.dcp``; knows no kernels.
        rotary_interleaved: RoPE pairs neighbouring dims.
        values_first: With MLA: the value up-projection comes before the exchange (`LatentShape.values_first`).
        experts_over_dcp: Whether ranks of several DCP ranks share experts.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_sequence_length: int,
        pools: tuple[KVPool, ...],
        cache_index: dict[int, tuple[int, int]],
        groups: Any,
        exchange: Exchange,
        rotary_interleaved: bool = False,
        values_first: bool = False,
        experts_over_dcp: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(max_batch_size, max_sequence_length)
        self.pools = pools
        self.cache_index = cache_index
        self.groups = groups
        self.exchange = exchange
        self.rotary_interleaved = rotary_interleaved
        self.values_first = values_first
        self.experts_over_dcp = experts_over_dcp
        self.metrics = metrics
        self.plan: StepPlan | None = None

    def plan_of(self, layer_number: int) -> KindPlan:
        """The layer's part of the step's plan."""
        assert self.plan is not None
        return self.plan.kinds[self.cache_index[layer_number][0]]

    def rotate(self, layer_number: int, x_TNH: Tensor) -> Tensor:
        """Rotate a layer's queries or keys by the global positions of the step's tokens."""
        plan = self.plan_of(layer_number)
        if plan.cos_T1R is None or plan.sin_T1R is None:
            return x_TNH
        return rotate(x_TNH, plan.cos_T1R, plan.sin_T1R, interleaved=self.rotary_interleaved)

    def write(self, layer_number: int, k_TKH: Tensor, v_TKH: Tensor | None = None) -> None:
        """Keep the keys and values of the tokens that this rank owns; the other ranks keep theirs.

        A latent cache has keys only.
        """
        assert self.plan is not None
        if self.plan.owned_t is not None:
            k_TKH, v_TKH = k_TKH[self.plan.owned_t], None if v_TKH is None else v_TKH[self.plan.owned_t]
        pool, index = self.pool_of(layer_number)
        pool.write(index, self.plan_of(layer_number).slots_t, k_TKH, v_TKH)

    def pool_of(self, layer_number: int) -> tuple[KVPool, int]:
        """The pool that has the layer's keys and values, and which of its layers it is."""
        kind, index = self.cache_index[layer_number]
        return self.pools[kind], index

    def shard(self, layer_number: int) -> Shard:
        """This rank's keys and values of the layer."""
        pool, index = self.pool_of(layer_number)
        return pool.layer(index)

    def attend(self, q_TNH: Tensor, shard: Shard, plan: Planned, *, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over one shard: ``(out_TNV, lse_TN)``, fp32."""
        with timed(self.metrics, "attention"):
            return plan.attend(q_TNH, shard, scale=scale)

    def merge(self, out_TNH: Tensor, lse_TN: Tensor) -> Exchanged:
        """Attention over the whole sequence from the partials of the DCP group: the exchange."""
        return self.exchange(out_TNH, lse_TN, self.groups.dcp, metrics=self.metrics)
