"""The oracle: full attention in fp64, by global positions, written to be obviously right and not fast.

Shapes: ``T`` queries, ``S`` keys, ``N`` query heads, ``K`` KV heads (head ``n`` reads KV head ``n // (N // K)``),
``H`` head dim, ``V`` values' head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def full_attention(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKV: Tensor,
    q_positions: list[int],
    k_positions: list[int] | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of one sequence: a query sees the keys whose position is not above its own.

    Args:
        q_positions: Global position of every query.
        k_positions: Global position of every key; ``None``: ``0 .. S - 1``.
        window: So many positions a query sees, its own among them; ``None``: all before it.

    Returns:
        ``(out_TNV, lse_TN)``, fp64; ``0, -inf`` for a query that sees no key.
    """
    if k_positions is None:
        k_positions = list(range(len(k_SKH)))
    group = q_TNH.shape[1] // k_SKH.shape[1]
    k_SNH, v_SNV = (x.double().repeat_interleave(group, dim=1) for x in (k_SKH, v_SKV))
    scores_NTS = torch.einsum("tnh,snh->nts", q_TNH.double(), k_SNH) * scale
    before_TS = torch.tensor(q_positions)[:, None] - torch.tensor(k_positions)[None, :]
    unseen_TS = before_TS < 0
    if window is not None:
        unseen_TS |= before_TS >= window
    scores_NTS = scores_NTS.masked_fill(unseen_TS, -torch.inf)
    lse_NT = torch.logsumexp(scores_NTS, dim=-1)
    weights_NTS = torch.where(scores_NTS == -torch.inf, 0.0, torch.exp(scores_NTS - lse_NT[..., None]))
    return torch.einsum("nts,snv->tnv", weights_NTS, v_SNV), lse_NT.T


def shard_positions(length: int, rank: int, dcp_size: int, interleave: int) -> list[int]:
    """Global positions below ``length`` that ``rank`` keeps, in the order of their local indices."""
    return [p for p in range(length) if (p // interleave) % dcp_size == rank]


def shard_attention(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKV: Tensor,
    q_positions: list[int],
    *,
    rank: int,
    dcp_size: int,
    interleave: int,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Partial attention over the keys that ``rank`` keeps, out of the keys of a whole sequence (``0 .. S - 1``)."""
    own = shard_positions(len(k_SKH), rank, dcp_size, interleave)
    return full_attention(q_TNH, k_SKH[own], v_SKV[own], q_positions, own, scale=scale, window=window)
