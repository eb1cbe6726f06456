"""Multi-latent self-attention whose decode path reads a sharded cache of latents.

Shapes: ``T`` tokens, ``N`` query heads of this rank, ``n`` heads after the exchange, ``C`` cached tokens of a slice,
``D`` dim of queries and keys without position, ``P`` rotated dims, ``R`` latent (``kv_lora_rank``), ``L = R + P``,
``V`` head dim of the values. Hidden states are Megatron's ``[s, b, h]`` with ``s = T``, ``b = 1``.

The cache holds a token's normalised latent and its rotated key, ``L`` numbers for all heads. Two ways lead from there
to attention (DeepSeek-V2, 2024, section 2.1):

*Absorbed*: the query is carried into the latent space by the key up-projection, and attention runs over the latents as
over one KV head of ``L`` dims whose values are its first ``R``. What comes out is carried to ``V`` by the value
up-projection.
*Expanded*: the cached latents are carried to keys and values of all heads first. That pays where one reading of the
cache serves many queries, as in prefill.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_dcp.comm.exchange import Exchanged, gather_heads
from megatron_dcp.layers.attend import attend
from megatron_dcp.layers.context import DCPContext
from megatron_dcp.layers.latent_plan import ExpandedSequence, LatentPlan
from megatron_dcp.layers.linear import product
from megatron_dcp.merge import merge_into
from megatron_dcp.shard import Shard, dequantise


class DCPMLASelfAttention(MLASelfAttention):
    """Megatron's ``MLASelfAttention`` plus a decode path over a cache of latents, sharded over the DCP group.

    Same parameters, same names, same training forward: without a :class:`DCPContext` every call goes to Megatron.
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
        ctx = inference_context
        q_TNH = self._queries(hidden_states, ctx)
        ctx.write(self.layer_number, self._latents(hidden_states, ctx))
        return attend(self, q_TNH, ctx)

    def finish(self, merged: Exchanged, ctx: DCPContext) -> Exchanged:
        """From merged attention to what the output projection takes: the values, where they have not come yet."""
        if ctx.values_first:
            return merged
        first = 0 if ctx.groups.dcp_layout == "within_tp" else merged.first_head
        return replace(merged, out_TnH=self._values(merged.out_TnH, first))

    def _queries(self, hidden_T1h: Tensor, ctx: DCPContext) -> Tensor:
        """``[T, N, D + P]``, the last ``P`` dims rotated."""
        if self.config.q_lora_rank is None:
            q_T1x, _ = self.linear_q_proj(hidden_T1h)
        else:
            down = self._whole(self.linear_q_down_proj, hidden_T1h, self.config.q_lora_rank, ctx)
            q_T1x, _ = self.linear_q_up_proj(self.q_layernorm(down))
        q_TNH = q_T1x.view(len(q_T1x), -1, self.q_head_dim)
        q_TND, q_TNP = q_TNH.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat((q_TND, ctx.rotate(self.layer_number, q_TNP)), dim=-1)

    def _latents(self, hidden_T1h: Tensor, ctx: DCPContext) -> Tensor:
        """What the cache keeps of the tokens, ``[T, 1, R + P]``: the normalised latent and the rotated key."""
        rank, rotated = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        latent_T1R, k_T1P = self._whole(self.linear_kv_down_proj, hidden_T1h, rank + rotated, ctx).split(
            [rank, rotated], dim=-1
        )
        return torch.cat((self._normalised(latent_T1R), ctx.rotate(self.layer_number, k_T1P)), dim=-1)

    def _whole(self, linear: Any, hidden_T1h: Tensor, size: int, ctx: DCPContext) -> Tensor:
        """The down-projection's ``size`` outputs, which Megatron's own linear layer splits over the TP ranks."""
        down_T1r, _ = linear(hidden_T1h)
        if down_T1r.shape[-1] == size:
            return down_T1r
        return gather_heads(down_T1r.squeeze(1), self.pg_collection.tp, metrics=ctx.metrics).unsqueeze(1)

    def _normalised(self, latent_T1R: Tensor) -> Tensor:
        weight = getattr(self.linear_kv_up_proj, "layer_norm_weight", None)
        if weight is None:
            return self.kv_layernorm(latent_T1R)
        # TransformerEngine holds the norm inside the up-projection, where a cached latent would meet it too late.
        weight = weight.float() + 1.0 if self.config.layernorm_zero_centered_gamma else weight.float()
        latent = F.rms_norm(latent_T1R.float(), weight.shape, weight, self.config.layernorm_epsilon)
        return latent.to(latent_T1R.dtype)

    def partial(self, q_TNH: Tensor, shard: Shard, plan: LatentPlan, ctx: DCPContext) -> tuple[Tensor, Tensor]:
        """Partial attention of all tokens over one shard: ``V`` dims per head with the values first, else ``R``."""
        if not plan.expanded:
            return self._absorbed(q_TNH, shard, plan, ctx)
        heads, v_dim = q_TNH.shape[1], self.config.v_head_dim
        out_TNV = q_TNH.new_empty(len(q_TNH), heads, v_dim, dtype=torch.float32)
        lse_TN = q_TNH.new_empty(len(q_TNH), heads, dtype=torch.float32)
        if plan.absorbed is not None:
            assert plan.absorbed_tokens is not None
            out, lse = self._absorbed(q_TNH[plan.absorbed_tokens], shard, plan, ctx)
            out_TNV[plan.absorbed_tokens], lse_TN[plan.absorbed_tokens] = out, lse
        for sequence in plan.expanded:
            own = slice(sequence.first, sequence.stop)
            out_TNV[own], lse_TN[own] = self._expanded(q_TNH[own], shard, sequence, ctx)
        return out_TNV, lse_TN

    def _absorbed(self, q_TNH: Tensor, shard: Shard, plan: LatentPlan, ctx: DCPContext) -> tuple[Tensor, Tensor]:
        q_TND, q_TNP = q_TNH.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], dim=-1)
        q_NTR = torch.bmm(q_TND.transpose(0, 1), self._up_weights()[:, : self.config.qk_head_dim])
        q_TNL = torch.cat((q_NTR.transpose(0, 1), q_TNP), dim=-1)
        if ctx.groups.dcp_layout == "within_tp":
            q_TNL = gather_heads(q_TNL, ctx.groups.dcp, metrics=ctx.metrics)
        assert plan.absorbed is not None
        out_TNR, lse_TN = ctx.attend(q_TNL, shard, plan.absorbed, scale=self.softmax_scale)
        return (self._values(out_TNR, 0) if ctx.values_first else out_TNR), lse_TN

    def _expanded(
        self, q_QNH: Tensor, shard: Shard, sequence: ExpandedSequence, ctx: DCPContext
    ) -> tuple[Tensor, Tensor]:
        """Attention of one sequence's tokens over its own keys and values, a slice of the cached latents at a time."""
        merged: tuple[Tensor, Tensor] | None = None
        for part in sequence.slices:
            expanded = self._expand(_cached(shard, part.slots, q_QNH.dtype))
            partial = ctx.attend(q_QNH, Shard(*expanded), part.attention, scale=self.softmax_scale)
            if merged is None:
                merged = partial
            else:
                merge_into(*merged, *partial)
        assert merged is not None
        return merged

    def _expand(self, cached_CL: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[C, N, D + P]`` and values ``[C, N, V]`` of cached tokens."""
        rank, rotated = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        latent_CR, k_CP = cached_CL.split([rank, rotated], dim=-1)
        up_CNX = product(latent_CR, self.linear_kv_up_proj.weight).unflatten(
            1, (-1, self.config.qk_head_dim + self.config.v_head_dim)
        )
        k_CND, v_CNV = up_CNX.split([self.config.qk_head_dim, self.config.v_head_dim], dim=-1)
        k_CNP = k_CP.unsqueeze(1).expand(-1, k_CND.shape[1], -1)
        return torch.cat((k_CND, k_CNP), dim=-1), v_CNV

    def _values(self, out_TnR: Tensor, first_head: int) -> Tensor:
        """Value up-projection of heads ``[first_head, first_head + n)``: ``[T, n, R]`` → ``[T, n, V]``, fp32."""
        up_nVR = self._up_weights()[first_head : first_head + out_TnR.shape[1], self.config.qk_head_dim :]
        # fp32 also for half-precision weights: rounding partials before they are merged would depend on their number
        return torch.bmm(out_TnR.transpose(0, 1), up_nVR.float().transpose(1, 2)).transpose(0, 1)

    def _up_weights(self) -> Tensor:
        """``[N, D + V, R]``: a view of the up-projection."""
        per_head = self.config.qk_head_dim + self.config.v_head_dim
        return self.linear_kv_up_proj.weight.view(-1, per_head, self.config.kv_lora_rank)


def _cached(shard: Shard, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Cached latents and rotated keys ``[C, L]`` of some slots."""
    cached_CL = shard.k_SKH[slots, 0]
    if shard.k_scale_SK is None:
        return cached_CL.to(dtype)
    return dequantise(cached_CL, shard.k_scale_SK[slots, 0]).to(dtype)
