"""``flash_mla``, its dense kernel."""

from __future__ import annotations

import dataclasses

import torch

from standins import paged


@dataclasses.dataclass
class FlashMLASchedMeta:
    have_initialized: bool = False
    lengths: list[int] | None = None


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
):
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and num_splits is None
    shapes = [*q.shape, *cache_seqlens.tolist()]
    if tile_scheduler_metadata.have_initialized:
        assert tile_scheduler_metadata.lengths == shapes, "metadata of other lengths"
    tile_scheduler_metadata.have_initialized, tile_scheduler_metadata.lengths = True, shapes
    assert q.dtype == k_cache.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert q.shape[-1] == k_cache.shape[-1] == 576 and head_dim_v == 512 and k_cache.shape[1] == 64
    s, tokens = q.shape[:2]
    out, lse = paged.attention(
        q.flatten(0, 1),
        k_cache,
        k_cache[..., :head_dim_v],
        cu_q_lens=torch.arange(0, s * tokens + 1, tokens, dtype=torch.int32),
        kv_lens=cache_seqlens,
        tables=block_table,
        causal=causal and tokens > 1,
        scale=softmax_scale,
    )
    return out.unflatten(0, (s, tokens)), lse.unflatten(0, (s, tokens)).transpose(1, 2).contiguous()
