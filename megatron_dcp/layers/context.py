"""What one step hands to every attention layer: the tokens' places in the cache, and who computes and merges.

Shapes: ``T`` tokens of the step, flat over sequences; ``t`` those whose keys this rank keeps; ``N`` query heads,
``K`` KV heads, ``H`` head dim, ``S`` slots of the pool, ``n`` heads after an exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from megatron_dcp.attention.base import AttentionBackend
from megatron_dcp.cache.pool import KVPool
from megatron_dcp.comm.exchange import Exchange, Exchanged
from megatron_dcp.metrics import Metrics
from megatron_dcp.rope import rotate


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The tokens of one step on one rank; made once and read by every layer.

    Attributes:
        cos_T1R, sin_T1R: RoPE at the tokens' global positions; ``None`` for a model without RoPE.
        owned_t: Indices into ``T`` of the tokens whose keys this rank keeps, int64; ``None``: all of them.
        slots_t: Their slots in the pool, int64.
        attention: How the step attends: the back end's plan, or with MLA a `LatentPlan` over it.
    """

    cos_T1R: Tensor | None
    sin_T1R: Tensor | None
    owned_t: Tensor | None
    slots_t: Tensor
    attention: Any


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
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(max_batch_size, max_sequence_length)
        self.pool = pool
        self.cache_index = cache_index
        self.groups = groups
        self.backend = backend
        self.exchange = exchange
        self.rotary_interleaved = rotary_interleaved
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

    def partial(self, layer_number: int, q_TNH: Tensor, attention: Any, *, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over this rank's shard: ``(out_TNV, lse_TN)``, fp32, by the back end's plan ``attention``."""
        k_SKH, v_SKV = self.pool.layer(self.cache_index[layer_number])
        return self.backend.attend(q_TNH, k_SKH, v_SKV, attention, scale=scale)

    def merge(self, out_TNH: Tensor, lse_TN: Tensor) -> Exchanged:
        """Attention over the whole sequence from the partials of the DCP group: the exchange."""
        return self.exchange(out_TNH, lse_TN, self.groups.dcp, metrics=self.metrics)
