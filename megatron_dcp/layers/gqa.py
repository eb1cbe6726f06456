"""Grouped-query self-attention whose decode path reads a sharded KV cache.

Shapes: ``T`` tokens, ``N`` query heads and ``K`` KV heads of this rank, ``H`` head dim, ``n`` heads after the
exchange, ``D`` dcp size. Hidden states are Megatron's ``[s, b, h]`` with ``s = T``, ``b = 1``.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_dcp.comm.exchange import Exchanged, gather_heads
from megatron_dcp.layers.attend import attend
from megatron_dcp.layers.context import DCPContext
from megatron_dcp.shard import Shard


class DCPSelfAttention(SelfAttention):
    """Megatron's ``SelfAttention`` plus a decode path over a KV cache that is sharded over the DCP group.

    Same parameters, same names, same training forward: without a :class:`DCPContext` every call goes to Megatron.
    An instance of ``SelfAttention`` becomes one by a change of class (:func:`~megatron_dcp.layers.enable_dcp`).

    One decode step: project → rotate by global position → write own tokens → attend to own shard → exchange →
    output projection (`megatron_dcp.layers.attend`). In ``within_tp`` the query heads of the DCP group are gathered
    before attention, since its ranks hold different heads of the same KV head.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention output ``[T, 1, h]`` and the bias that Megatron adds after it.

        Args:
            hidden_states: ``[T, 1, h]``, flat over sequences, with a :class:`DCPContext`; else Megatron's
                ``[s, b, h]``.
        """
        if not isinstance(inference_context, DCPContext):
            return super().forward(hidden_states, attention_mask, key_value_states, inference_context, *args, **kwargs)
        return attend(self, self._queries(hidden_states, inference_context), inference_context)

    def partial(self, q_TNH: Tensor, shard: Shard, plan: Any, ctx: DCPContext) -> tuple[Tensor, Tensor]:
        """Partial attention over one shard, ``(out_TNH, lse_TN)``; in ``within_tp`` of the DCP group's heads."""
        if ctx.groups.dcp_layout == "within_tp":
            q_TNH = gather_heads(q_TNH, ctx.groups.dcp, metrics=ctx.metrics)
        scale = self.config.softmax_scale or self.hidden_size_per_attention_head**-0.5
        return ctx.attend(q_TNH, shard, plan, scale=scale)

    def finish(self, merged: Exchanged, ctx: DCPContext) -> Exchanged:
        """From merged attention to what the output projection takes: the same."""
        return merged

    def _queries(self, hidden_states: Tensor, ctx: DCPContext) -> Tensor:
        """``q_TNH``, after the keys and values have gone to the cache: nothing else of the projection stays alive."""
        q_TNH, k_TKH, v_TKH = self._project(hidden_states, ctx)
        ctx.write(self.layer_number, k_TKH, v_TKH)
        return q_TNH.contiguous()

    def _project(self, hidden_states: Tensor, ctx: DCPContext) -> tuple[Tensor, Tensor, Tensor]:
        """``q_TNH, k_TKH, v_TKH`` of this rank's heads: normalised where the model says so, rotated."""
        mixed, _ = self.linear_qkv(hidden_states)
        if self.world_size > self.config.num_query_groups:
            mixed = self._gather_kv_group(mixed, ctx)
        # Megatron's order of heads: for every KV head its G query heads, the key, the value.
        heads_TKJH = mixed.reshape(mixed.shape[0], self.num_query_groups_per_partition, -1, self.key_hidden_size)
        v_TKH = heads_TKJH[:, :, -1]
        if _is_identity(self.q_layernorm) and _is_identity(self.k_layernorm):
            # q and k in one call; that v is turned along costs less than a second call
            turned_TKJH = self._rotate(heads_TKJH.flatten(1, 2), ctx).unflatten(1, heads_TKJH.shape[1:3])
            q_TNH, k_TKH = turned_TKJH[:, :, :-2].flatten(1, 2), turned_TKJH[:, :, -2]
        else:
            q_TNH = self._rotate(self.q_layernorm(heads_TKJH[:, :, :-2].flatten(1, 2)), ctx)
            k_TKH = self._rotate(self.k_layernorm(heads_TKJH[:, :, -2]), ctx)
        if self.world_size > self.config.num_query_groups:
            q_TNH = self._own_query_heads(q_TNH)
        return q_TNH, k_TKH, v_TKH

    def _rotate(self, x_TNH: Tensor, ctx: DCPContext) -> Tensor:
        return x_TNH if _skips_rope(self) else ctx.rotate(self.layer_number, x_TNH)

    def _gather_kv_group(self, mixed: Tensor, ctx: DCPContext) -> Tensor:
        """``[q … q, k, v]`` of this rank's KV head, where tp > KV heads and Megatron splits these rows over ranks."""
        mixed = gather_heads(mixed, self.pg_collection.tp, metrics=ctx.metrics)
        per_group = mixed.reshape(mixed.shape[0], self.config.num_query_groups, -1)
        ranks_per_group = self.world_size // self.config.num_query_groups
        return per_group[:, self.pg_collection.tp.rank() // ranks_per_group]

    def _own_query_heads(self, q_TNH: Tensor) -> Tensor:
        """This rank's share of the query heads of its KV head, where tp > KV heads."""
        ranks_per_group = self.world_size // self.config.num_query_groups
        own = q_TNH.shape[1] // ranks_per_group
        first = (self.pg_collection.tp.rank() % ranks_per_group) * own
        return q_TNH[:, first : first + own]


def _is_identity(norm: Any) -> bool:
    return norm is None or isinstance(norm, IdentityOp)


def _skips_rope(attention: SelfAttention) -> bool:
    """Whether this layer has no RoPE (``no_rope_freq``, as in interleaved NoPE models)."""
    pattern = attention.config.no_rope_freq
    return bool(pattern and pattern[attention.layer_number - 1])
