"""``transformer_engine.pytorch.cpp_extensions.fused_attn`` of TransformerEngine 2.20."""

from __future__ import annotations

from enum import IntEnum

import torch

from standins import paged

RAGGED_STATS = True  # of ragged queries, as from cuDNN 9.6 on


class FusedAttnBackend(IntEnum):
    No_Backend = -1
    F16_arbitrary_seqlen = 1
    FP8 = 2


def fused_attn_fwd(
    is_training,
    max_seqlen_q,
    max_seqlen_kv,
    cu_seqlens_q,
    cu_seqlens_kv,
    q,
    k,
    v,
    fake_dtype,
    fused_attention_backend,
    attn_bias=None,
    cu_seqlens_q_padded=None,
    cu_seqlens_kv_padded=None,
    page_table_k=None,
    page_table_v=None,
    s_quantizer=None,
    o_quantizer=None,
    attn_scale=None,
    dropout=0.0,
    fast_zero_fill=True,
    qkv_layout="sbh3d",
    o_format="sbhd",
    qkv_scale_inv_format=None,
    attn_bias_type="no_bias",
    attn_mask_type="padding",
    softmax_type="vanilla",
    window_size=(-1, -1),
    bottom_right_diagonal=None,
    rng_gen=None,
    softmax_offset=None,
    return_max_logit=False,
    cuda_graph=False,
):
    assert not is_training and dropout == 0.0 and softmax_type == "vanilla" and attn_bias_type == "no_bias"
    assert fused_attention_backend == FusedAttnBackend.F16_arbitrary_seqlen and not return_max_logit
    assert q.dtype == k.dtype == v.dtype == fake_dtype and fake_dtype in (torch.bfloat16, torch.float16)
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous(), "strides follow from the layout's name"
    assert page_table_k is page_table_v and page_table_k.is_contiguous()
    assert max_seqlen_kv <= page_table_k.shape[1] * k.shape[1]
    assert cu_seqlens_q_padded is not None and cu_seqlens_kv_padded is not None
    causal = attn_mask_type == "padding_causal_bottom_right"
    assert causal or attn_mask_type == "padding", "pages want a padding mask"
    assert window_size == ((-1, 0) if causal else (-1, -1))
    assert not causal or max_seqlen_q <= max_seqlen_kv
    q_lens, kv_lens = cu_seqlens_q.diff(), cu_seqlens_kv.diff()
    assert int(q_lens.max()) <= max_seqlen_q and int(kv_lens.max()) <= max_seqlen_kv
    dense = qkv_layout == "paged_kv_bshd_bshd_bshd"
    assert dense or qkv_layout == "paged_kv_thd_bshd_bshd"
    assert o_format == ("bshd" if dense else "thd")
    if dense:
        assert q.shape[:2] == (len(q_lens), max_seqlen_q) and (q_lens == max_seqlen_q).all()
    out, lse = paged.attention(
        q.flatten(0, 1) if dense else q,
        k,
        v,
        cu_q_lens=cu_seqlens_q,
        kv_lens=kv_lens,
        tables=page_table_k,
        causal=causal,
        scale=attn_scale,
    )
    if RAGGED_STATS and not dense:
        stats = lse.unsqueeze(-1)
    else:
        stats = torch.full((len(q_lens), q.shape[-2], max_seqlen_q, 1), torch.nan)
        for index, (first, q_len) in enumerate(zip(cu_seqlens_q.tolist(), q_lens.tolist(), strict=False)):
            stats[index, :, :q_len, 0] = lse[first : first + q_len].t()
    rng_state = torch.zeros(2, dtype=torch.int64)
    return (out.unflatten(0, q.shape[:2]) if dense else out), [stats, rng_state]
