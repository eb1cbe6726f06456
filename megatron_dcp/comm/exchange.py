"""From partial attention on every rank to exact attention: four algorithms, one signature.

Shapes: ``P`` ranks of the group, ``T`` tokens, ``N`` query heads, ``n`` those of them that a rank ends with, ``H`` head
dim of V. Each rank comes with its partial ``out_TNH`` over its own keys and ``lse_TN``, for the same tokens and heads.

============ ==================================================== ============== ======================
name         collectives                                          a rank ends    bytes sent per rank,
                                                                  with           fp32 numbers
============ ==================================================== ============== ======================
fold         all-gather of LSEs; the output projection's          its share of   (P-1) T N
             all-reduce does the sum                              all heads
all_reduce   max of LSEs, then one sum of [weighted, weight]      all heads      2 (P-1)/P T N (H+2)
ag_rs        all-gather of LSEs, reduce-scatter over heads        its heads      (P-1) T (N + c H)
a2a          one all-to-all of packed [partial, LSE]              its heads      T (N - n) (H+1)
============ ==================================================== ============== ======================

The heads of rank ``r`` are ``[r c, (r + 1) c)``, cut at ``N``, with ``c = ceil(N / P)``; the last ranks may have none.
All of it is fp32. A partial without keys (``lse = -inf``) counts for nothing, even where it holds NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron_dcp.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter_sum
from megatron_dcp.kernels.choice import merge_partials, pack, share_by_rank, share_of
from megatron_dcp.merge import weigh
from megatron_dcp.metrics import Metrics
from megatron_dcp.traffic import head_slice


@dataclass(frozen=True)
class Exchanged:
    """Attention of heads ``[first_head, first_head + num_heads)`` on this rank.

    Attributes:
        out_TnH: fp32 ``[T, num_heads, H]``.
        summed: Whether ``out_TnH`` is the attention itself. Where it is not, it is this rank's weighted share, and the
            sum over the group is the attention.
        scattered: Whether the group's ranks hold different heads.
    """

    out_TnH: Tensor
    first_head: int
    num_heads: int
    summed: bool
    scattered: bool = False


class Exchange(Protocol):
    """What :func:`get_exchange` returns."""

    def __call__(
        self, out_TNH: Tensor, lse_TN: Tensor, group: ProcessGroup, *, metrics: Metrics | None = None
    ) -> Exchanged:
        """Merge the partials of the group's ranks; a collective call.

        Args:
            out_TNH: This rank's partial, ``[T, N, H]``, any strides.
            lse_TN: Its natural-log LSE, ``[T, N]``, ``-inf`` where it saw no key.

        Raises:
            CollectiveError: A rank of the group is lost.
        """
        ...


def fold(out_TNH: Tensor, lse_TN: Tensor, group: ProcessGroup, *, metrics: Metrics | None = None) -> Exchanged:
    """Own weighted share of all heads; whoever sums over the group next (the output projection) completes the merge."""
    if group.size() == 1:
        return _alone(out_TNH, lse_TN)
    lse_PTN = all_gather(lse_TN.float(), group, metrics)
    return Exchanged(share_of(out_TNH, lse_PTN, group.rank()), 0, out_TNH.shape[1], summed=False)


def all_reduced(out_TNH: Tensor, lse_TN: Tensor, group: ProcessGroup, *, metrics: Metrics | None = None) -> Exchanged:
    """All heads on all ranks: the largest LSE first, then one sum of the packed ``[weight * out, weight]``."""
    if group.size() == 1:
        return _alone(out_TNH, lse_TN)
    peak_TN = all_reduce(lse_TN.float().clone(memory_format=torch.contiguous_format), group, metrics, op=ReduceOp.MAX)
    weight_TN = torch.exp(lse_TN.float() - peak_TN.masked_fill(peak_TN == -torch.inf, 0.0))
    packed_TNH1 = torch.cat([weigh(out_TNH.float(), weight_TN), weight_TN.unsqueeze(-1)], dim=-1)
    packed_TNH1 = all_reduce(packed_TNH1, group, metrics)
    total_TN1 = packed_TNH1[..., -1:]
    out_TNH = packed_TNH1[..., :-1] / total_TN1.masked_fill(total_TN1 == 0, 1.0)
    return Exchanged(out_TNH, 0, out_TNH.shape[1], summed=True)


def ag_rs(out_TNH: Tensor, lse_TN: Tensor, group: ProcessGroup, *, metrics: Metrics | None = None) -> Exchanged:
    """Own heads: gather the LSEs, weigh the own partial, reduce-scatter over heads (padded to a multiple of ``P``)."""
    if group.size() == 1:
        return _alone(out_TNH, lse_TN)
    first, count = head_slice(out_TNH.shape[1], group.size(), group.rank())
    parts_PnTH = share_by_rank(out_TNH, all_gather(lse_TN.float(), group, metrics), group.rank())
    own_nTH = reduce_scatter_sum(parts_PnTH, group, metrics)[:count]
    return Exchanged(own_nTH.transpose(0, 1).contiguous(), first, count, summed=True, scattered=True)


def a2a(out_TNH: Tensor, lse_TN: Tensor, group: ProcessGroup, *, metrics: Metrics | None = None) -> Exchanged:
    """Own heads: every rank sends each other one its ``[partial, LSE]`` of that rank's heads; merged in rank order."""
    if group.size() == 1:
        return _alone(out_TNH, lse_TN)
    slices = [head_slice(out_TNH.shape[1], group.size(), rank) for rank in range(group.size())]
    first, count = slices[group.rank()]
    packed_PnTH1 = all_to_all(pack(out_TNH, lse_TN), [num for _, num in slices], group, metrics)
    packed_PTnH1 = packed_PnTH1.transpose(1, 2)
    own_TnH, _ = merge_partials(packed_PTnH1[..., :-1], packed_PTnH1[..., -1])
    return Exchanged(own_TnH.contiguous(), first, count, summed=True, scattered=True)


def _alone(out_TNH: Tensor, lse_TN: Tensor) -> Exchanged:
    """A group of one: only what an empty shard left in its output is cleared."""
    out_TNH = out_TNH.float().masked_fill((lse_TN == -torch.inf).unsqueeze(-1), 0.0)
    return Exchanged(out_TNH, 0, out_TNH.shape[1], summed=True)


_EXCHANGES: dict[str, Exchange] = {"fold": fold, "all_reduce": all_reduced, "ag_rs": ag_rs, "a2a": a2a}


def get_exchange(name: str) -> Exchange:
    """The exchange of that name; ``ValueError`` where there is none."""
    if name not in _EXCHANGES:
        raise ValueError(f"exchange={name!r} is not known; use one of {', '.join(_EXCHANGES)}")
    return _EXCHANGES[name]


def gather_heads(x_TnH: Tensor, group: ProcessGroup, *, metrics: Metrics | None = None) -> Tensor:
    """Every rank's heads side by side, in rank order: ``[T, n, H]`` → ``[T, P n, H]``, in its own dtype.

    All ranks must come with the same shape.
    """
    if group.size() == 1:
        return x_TnH
    return all_gather(x_TnH, group, metrics).transpose(0, 1).flatten(1, 2)


def all_reduce_sum(x: Tensor, group: ProcessGroup, *, metrics: Metrics | None = None) -> Tensor:
    """Sum over the group; every rank gets the same bits. May be done in place: use what is returned."""
    return all_reduce(x, group, metrics)
