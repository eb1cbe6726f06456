"""Attention sinks: a key of every head that has a score and no value, and takes its share of the softmax.

A query meets it once, whatever the number of ranks: it goes into one of the partials that are merged for the query.

Shapes: ``T`` tokens, ``N`` query heads that are attended with, ``n`` those that this rank has the sinks of, ``V`` dim
of what is merged.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_dcp.layers.context import DCPContext
from megatron_dcp.merge import add_sink


def count_sinks(attention: Any, out_TNV: Tensor, lse_TN: Tensor, ctx: DCPContext, *, alone: bool) -> None:
    """Let the sinks take part in this rank's partial over its own shard, in place, where the model has any.

    In ``within_tp`` a rank knows the sinks of its own heads only, and counts these for its whole DCP group.

    Args:
        attention: Megatron's attention module.
        alone: These are tokens of this rank alone, which counts their sinks. Else they are the same on all ranks of
            the DCP group, and the first rank counts.
    """
    kind = getattr(attention.config, "softmax_type", "vanilla")
    within = ctx.groups.dcp_layout == "within_tp"
    if kind == "vanilla" or not (alone or within or ctx.groups.dcp.rank() == 0):
        return
    own = attention.config.num_attention_heads // ctx.groups.tp.size()
    first = ctx.groups.dcp.rank() * own if within else 0
    heads = slice(first, first + own)
    sink_n = lse_TN.new_zeros(own) if kind == "off-by-one" else attention.core_attention.softmax_offset.flatten()
    add_sink(out_TNV[:, heads], lse_TN[:, heads], sink_n)
