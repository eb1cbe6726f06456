"""Attention over pages by plain torch, for the stand-ins.

Shapes: ``t`` ragged query tokens, ``s`` sequences, ``N`` query heads, ``K`` KV heads, ``H`` head dim, ``V`` values'.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
ROUNDED = True  # outputs come in the queries' dtype, as a library returns them; else in fp32, for tight tolerances


def attention(
    q_tNH: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    cu_q_lens: Tensor,
    kv_lens: Tensor,
    tables: Tensor | list[list[int]],
    causal: bool,
    scale: float,
    qv_tNV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out_tNV, lse_tN)``, the LSE natural and in fp32. Pages are ``[blocks, block_size, K, H or V]``."""
    assert cu_q_lens.dtype == kv_lens.dtype == torch.int32
    if isinstance(tables, Tensor):
        assert tables.dtype == torch.int32 and tables.is_contiguous() and len(tables) == len(kv_lens)
    assert q_tNH.stride(-1) == k_pages.stride(-1) == v_pages.stride(-1) == 1
    assert int(cu_q_lens[-1]) == len(q_tNH) and int(cu_q_lens[0]) == 0
    block_size, kv_heads = k_pages.shape[1:3]
    out_tNV = torch.full((*q_tNH.shape[:2], v_pages.shape[-1]), torch.nan, dtype=torch.float64)
    lse_tN = torch.full(q_tNH.shape[:2], torch.nan, dtype=torch.float64)
    for index, (kv_len, first, stop) in enumerate(
        zip(kv_lens.tolist(), cu_q_lens[:-1].tolist(), cu_q_lens[1:].tolist(), strict=True)
    ):
        q_len = stop - first
        assert q_len >= 1 and kv_len >= 1 and not (causal and kv_len < q_len), "a row without a key"
        blocks = list(tables[index][: -(-kv_len // block_size)])
        assert len(blocks) * block_size >= kv_len, "the table is too short"
        assert all(0 <= int(block) < len(k_pages) for block in blocks), blocks
        k_KSH, v_KSV = (
            x[[int(b) for b in blocks]].flatten(0, 1)[:kv_len].double().transpose(0, 1) for x in (k_pages, v_pages)
        )
        group = q_tNH.shape[1] // kv_heads

        def by_head(x_qNH: Tensor, group: int = group) -> Tensor:
            return x_qNH.double().unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # K, G, q, H

        scores = by_head(q_tNH[first:stop]) @ k_KSH.unsqueeze(1).transpose(-1, -2)
        if qv_tNV is not None:
            scores += by_head(qv_tNV[first:stop]) @ v_KSV.unsqueeze(1).transpose(-1, -2)
        scores *= scale
        if causal:
            hidden = torch.arange(kv_len) > (torch.arange(q_len) + kv_len - q_len)[:, None]
            scores.masked_fill_(hidden, -torch.inf)
        lse_KGq = scores.logsumexp(-1)
        out_KGqV = (scores - lse_KGq.unsqueeze(-1)).exp() @ v_KSV.unsqueeze(1)
        out_tNV[first:stop] = out_KGqV.permute(2, 0, 1, 3).flatten(1, 2)
        lse_tN[first:stop] = lse_KGq.permute(2, 0, 1).flatten(1, 2)
    return out_tNV.to(q_tNH.dtype if ROUNDED else torch.float32), lse_tN.float()
