"""``flash_attn_interface`` of FlashAttention 3."""

from __future__ import annotations

from standins import paged


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    assert k is None and v is None and q.dtype == k_cache.dtype == v_cache.dtype
    assert q.dtype in paged.HALF
    dim, v_dim = q.shape[-1], v_cache.shape[-1]
    assert dim == k_cache.shape[-1] <= 256 and dim % 8 == v_dim % 8 == 0
    assert dim == v_dim or (128 < dim <= 192 and 96 < v_dim <= 128) or (dim <= 64 and v_dim <= 512)
    assert qv is None or (dim <= 64 and v_dim >= 256 and qv.dtype == q.dtype and qv.shape[-1] == v_dim)
    assert return_softmax_lse and window_size == (-1, -1)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    out, lse = paged.attention(
        q,
        k_cache,
        v_cache,
        cu_q_lens=cu_seqlens_q,
        kv_lens=cache_seqlens,
        tables=page_table,
        causal=causal,
        scale=softmax_scale,
        qv_tNV=qv,
    )
    return out, lse.t().contiguous(), None, None
