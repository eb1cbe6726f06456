"""``flash_attn`` of FlashAttention 2.8."""

from __future__ import annotations

import torch

from standins import paged


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert dropout_p == 0.0 and window_size == (-1, -1) and return_attn_probs
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    kv_lens = cu_seqlens_k.diff()
    assert int(kv_lens.max()) <= max_seqlen_k and int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    out, lse = paged.attention(
        q, k, v, cu_q_lens=cu_seqlens_q, kv_lens=kv_lens, tables=block_table, causal=causal, scale=softmax_scale
    )
    return out, lse.t().contiguous(), None
