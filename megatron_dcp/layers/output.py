"""From what the exchange left on a rank to the layer's output.

Shapes: ``T`` tokens, ``n`` heads that the exchange left here, ``V`` head dim of the values, ``h`` hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_dcp.comm.exchange import Exchanged, all_reduce_sum
from megatron_dcp.layers.context import DCPContext
from megatron_dcp.layers.linear import product


def own_share(merged: Exchanged, own_heads: int, ctx: DCPContext) -> Exchanged:
    """``merged`` without the heads of other TP ranks, which ``within_tp`` gathered for attention."""
    if ctx.groups.dcp_layout == "orthogonal" or merged.scattered:
        return merged
    mine = ctx.groups.dcp.rank() * own_heads
    out_TnV = merged.out_TnH[:, mine : mine + own_heads]
    return replace(merged, out_TnH=out_TnV, first_head=mine, num_heads=own_heads)


def project_output(linear_proj: Any, merged: Exchanged, ctx: DCPContext) -> tuple[Tensor, Tensor | None]:
    """Output projection, summed over the ranks that share the layer: ``[T, 1, h]``, and the bias to add to it.

    Args:
        linear_proj: Megatron's row-parallel output projection.
        merged: From :func:`own_share`.
    """
    out_Ti = merged.out_TnH.to(linear_proj.weight.dtype).flatten(1)
    if ctx.groups.dcp_layout == "within_tp" or (merged.summed and not merged.scattered):
        return linear_proj(out_Ti.unsqueeze(1))
    # What is here is a share of the sum over tp x dcp: all heads weighted (fold), or a slice of the heads.
    v_dim = merged.out_TnH.shape[2]
    first, count = merged.first_head, merged.num_heads
    share = product(out_Ti, linear_proj.weight[:, first * v_dim : (first + count) * v_dim])
    share = all_reduce_sum(share, ctx.groups.tp_dcp, metrics=ctx.metrics)
    norm = getattr(linear_proj, "post_layernorm", None)
    return share.unsqueeze(1) if norm is None else norm(share.unsqueeze(1)), linear_proj.bias
