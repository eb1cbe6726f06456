"""What one step hands to every attention layer: the tokens' places in the cache, and who computes and merges.

Shapes: ``T`` tokens of the step on this rank, flat over sequences; ``t`` those whose keys it keeps; ``N`` query heads,
``K`` KV heads, ``H`` head dim, ``S`` slots of the pool, ``n`` heads after an exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from megatron_dcp.attention.base import AttentionBackend
from megatron_dcp.cache.pool import KVPool, Shard
from megatron_dcp.comm.exchange import Exchange, Exchanged
from megatron_dcp.metrics import Metrics, timed
from megatron_dcp.rope import rotate


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The tokens of one step on one rank; made once and read by every layer.

    First come the *replicated* tokens, which all ranks of the DCP group compute, then the *striped* ones, which this
    rank alone computes (`megatron_dcp.layers.prefill`).

    Attributes:
        cos_T1R, sin_T1R: RoPE at the tokens' global positions; ``None`` for a model without RoPE.
        owned_t: Indices into ``T`` of the tokens whose keys this rank keeps, int64; ``None``: all of them.
        slots_t: Their slots in the pool, int64.
        replicated: Number of replicated tokens.
        attention: How they attend over this rank's shard: the back end's plan, or with MLA a `LatentPlan` over it;
            ``None``: there are none.
        striped: The `StripedPlan` of the others; ``None``: there are none.
    """

    cos_T1R: Tensor | None
    sin_T1R: Tensor | None
    owned_t: Tensor | None
    slots_t: Tensor
    replicated: int
    attention: Any
    striped: Any = None


class DCPContext(StaticInferenceContext):
    """Megatron inference context of a step over a sharded KV cache.

    Passing it as ``inference_context`` sends :class:`~megatron_dcp.layers.gqa.DCPSelfAttention` down the decode
    path; any other context, or none, leaves Megatron's own forward in charge.

    Args:
        pool: This rank's shard of the cache.
        cache_index: Megatron's ``layer_number`` → layer of the pool.
        groups: Process groups with ``.tp``, ``.dcp``, ``.tp_dcp`` and ``.dcp_layout``.
        backend: Computes partial attention; knows no ranks.
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
        pool: KVPool,
        cache_index: dict[int, int],
        groups: Any,
        backend: AttentionBackend,
        exchange: Exchange,
        rotary_interleaved: bool = False,
        values_first: bool = False,
        experts_over_dcp: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(max_batch_size, max_sequence_length)
        self.pool = pool
        self.cache_index = cache_index
        self.groups = groups
        self.backend = backend
        self.exchange = exchange
        self.rotary_interleaved = rotary_interleaved
        self.values_first = values_first
        self.experts_over_dcp = experts_over_dcp
        self.metrics = metrics
        self.plan: StepPlan | None = None

    def rotate(self, x_TNH: Tensor) -> Tensor:
        """Rotate queries or keys by the global positions of the step's tokens."""
        assert self.plan is not None
        if self.plan.cos_T1R is None or self.plan.sin_T1R is None:
            return x_TNH
        return rotate(x_TNH, self.plan.cos_T1R, self.plan.sin_T1R, interleaved=self.rotary_interleaved)

    def write(self, layer_number: int, k_TKH: Tensor, v_TKH: Tensor | None = None) -> None:
        """Keep the keys and values of the tokens that this rank owns; the other ranks keep theirs.

        A latent cache has keys only.
        """
        assert self.plan is not None
        if self.plan.owned_t is not None:
            k_TKH, v_TKH = k_TKH[self.plan.owned_t], None if v_TKH is None else v_TKH[self.plan.owned_t]
        self.pool.write(self.cache_index[layer_number], self.plan.slots_t, k_TKH, v_TKH)

    def shard(self, layer_number: int) -> Shard:
        """This rank's keys and values of the layer."""
        return self.pool.layer(self.cache_index[layer_number])

    def attend(self, q_TNH: Tensor, shard: Shard, attention: Any, *, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over one shard: ``(out_TNV, lse_TN)``, fp32, by the back end's plan ``attention``."""
        with timed(self.metrics, "attention"):
            return self.backend.attend(q_TNH, *shard, attention, scale=scale)

    def merge(self, out_TNH: Tensor, lse_TN: Tensor) -> Exchanged:
        """Attention over the whole sequence from the partials of the DCP group: the exchange."""
        return self.exchange(out_TNH, lse_TN, self.groups.dcp, metrics=self.metrics)
