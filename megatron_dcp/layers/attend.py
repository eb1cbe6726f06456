"""From rotated queries to the layer's output: what grouped-query and latent attention have in common.

Shapes: ``T`` tokens of the step on this rank, ``N`` query heads of this rank, ``h`` hidden size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_dcp.comm.exchange import Exchanged
from megatron_dcp.layers.context import DCPContext
from megatron_dcp.layers.output import own_share, project_output
from megatron_dcp.layers.prefill import StripedAttention, attend_striped
from megatron_dcp.layers.sink import count_sinks


class DCPAttention(StripedAttention, Protocol):
    """What the two kinds of attention bring themselves."""

    layer_number: int
    linear_proj: Any

    def finish(self, merged: Exchanged, ctx: DCPContext) -> Exchanged:
        """From merged attention to what the output projection takes."""


def attend(attention: DCPAttention, q_TNH: Tensor, ctx: DCPContext) -> tuple[Tensor, Tensor | None]:
    """Attention of the step's tokens over their whole sequences, projected: ``[T, 1, h]``, and the bias to add to it.

    Of replicated tokens every rank attends to its own shard, and the exchange merges; striped ones merge as keys or
    queries come by. Their keys are in the pool already.
    """
    assert ctx.plan is not None
    plan, replicated = ctx.plan_of(attention.layer_number), ctx.plan.replicated
    parts: list[tuple[Tensor, Tensor | None]] = []
    if plan.attention is not None:
        q = q_TNH[:replicated]
        partial = attention.partial(q, ctx.shard(attention.layer_number), plan.attention, ctx)
        count_sinks(attention, *partial, ctx, alone=False)
        merged = ctx.merge(*partial)
        merged = attention.finish(own_share(merged, q.shape[1], ctx), ctx)
        parts.append(project_output(attention.linear_proj, merged, ctx))
    if plan.striped is not None:
        out = attend_striped(attention, attention.layer_number, q_TNH[replicated:], plan.striped, ctx)
        merged = attention.finish(Exchanged(out, 0, out.shape[1], summed=True), ctx)
        parts.append(project_output(attention.linear_proj, merged, ctx))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), parts[0][1]
