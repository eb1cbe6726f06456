"""Attention by TransformerEngine's fused kernel (cuDNN) over the pool's pages, in place.

Shapes: ``t`` query tokens of a set, ``s`` virtual sequences, ``N`` query heads, ``K`` KV heads, ``H`` head dim.

cuDNN returns its softmax statistics with the output whether it is for training or not: the natural-log LSE, fp32,
``[t, N, 1]`` for ragged queries from cuDNN 9.6 on, else ``[s, N, most queries, 1]``. What is refused here follows
``nvte_get_fused_attn_backend`` (common/fused_attn/fused_attn.cpp) and the filters for caches in
``get_attention_backend`` (pytorch/attention/dot_product_attention/utils.py) of TransformerEngine 2.20.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.attention import libraries
from megatron_dcp.attention.base import AttentionSpec
from megatron_dcp.attention.libraries import Library, LibraryBackend, Pages
from megatron_dcp.attention.rows import RowLists, Rows

REMEDY = 'pip install "megatron-dcp[te]"'
MAX_HEAD_DIM = 256


def library() -> Library:
    """TransformerEngine's fused attention, or why not."""

    def importer() -> Any:
        from transformer_engine.pytorch.cpp_extensions import fused_attn

        return fused_attn

    found = libraries.load("transformer_engine", importer, REMEDY)
    if found.module is not None and "o_format" not in inspect.signature(found.module.fused_attn_fwd).parameters:
        return Library(None, f"transformer_engine is older than 2.15; {REMEDY}")
    return found


class TEBackend(LibraryBackend):
    """``fused_attn_fwd`` with page tables: decode tokens as ``bshd``, other tokens ragged as ``thd``."""

    name = "te"

    def supports(self, spec: AttentionSpec) -> str | None:
        return libraries.refuse_pool(spec) or self._refuse_dims(spec) or self._refuse_machine(spec)

    @staticmethod
    def _refuse_dims(spec: AttentionSpec) -> str | None:
        dim = spec.head_dim
        if dim > MAX_HEAD_DIM:
            others = "flash, flashinfer, flash_mla, triton and sdpa" if spec.v_in_k else "triton and sdpa"
            return f"head dim {dim} > {MAX_HEAD_DIM} ({others} serve it)"
        if spec.v_in_k:
            return "values inside of keys, a latent, are not served (triton and sdpa serve them)"
        if dim % 8:
            return f"head dim {dim} is no multiple of 8 (triton and sdpa serve it)"
        if spec.v_dim != dim:
            return f"head dims {dim} and {spec.v_dim} of keys and values differ (flash, flashinfer and sdpa may)"
        return None

    @staticmethod
    def _refuse_machine(spec: AttentionSpec) -> str | None:
        capability = libraries.capability(spec.device)
        if capability is None:
            return f"it runs on GPUs, not on {spec.device} (sdpa does)"
        if not (9, 0) <= capability < (12, 0):
            return (
                f"compute capability {capability[0]}.{capability[1]} is not 9.x to 11.x (flash and flashinfer serve it)"
            )
        cudnn = libraries.cudnn_version()
        if cudnn < 90700 or cudnn in (91000, 91001):
            return f"cuDNN {cudnn} is older than 9.7, or 9.10.0 or 9.10.1 with a known bug (flashinfer needs none)"
        if spec.head_dim > 128 and capability >= (10, 0) and cudnn < 91002:
            return f"head dim {spec.head_dim} > 128 needs cuDNN 9.10.2 on this GPU, not {cudnn} (flashinfer serves it)"
        return library().missing

    def _prepare(self, lists: RowLists, rows: Rows, spec: AttentionSpec, *, refreshed: bool) -> Any:
        """The library."""
        return library().module

    def _call(
        self, q_tNH: Tensor, pages: Pages, rows: Rows, state: Any, spec: AttentionSpec, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert pages.k.is_contiguous(), "cuDNN is told no strides of pages"
        decode = rows.max_q == 1
        cu_q_lens, cu_kv_lens, _, tables, _ = rows.tensors
        out, aux = state.fused_attn_fwd(
            False,
            rows.max_q,
            rows.max_kv,
            cu_q_lens,
            cu_kv_lens,
            q_tNH.unsqueeze(1) if decode else q_tNH,
            pages.k,
            pages.v.contiguous(),  # they are, but for the slices of an expanded latent
            spec.dtype,
            state.FusedAttnBackend["F16_arbitrary_seqlen"],
            cu_seqlens_q_padded=cu_q_lens,
            cu_seqlens_kv_padded=cu_kv_lens,
            page_table_k=tables,
            page_table_v=tables,
            attn_scale=scale,
            qkv_layout="paged_kv_bshd_bshd_bshd" if decode else "paged_kv_thd_bshd_bshd",
            o_format="bshd" if decode else "thd",
            attn_mask_type="padding_causal_bottom_right" if rows.causal else "padding",
            window_size=(-1, 0) if rows.causal else (-1, -1),
        )
        return (out.squeeze(1) if decode else out), lse_of(aux[0], cu_q_lens, len(q_tNH))


def lse_of(stats: Tensor, cu_q_lens: Tensor, tokens: int) -> Tensor:
    """The LSE ``[t, N]`` in softmax statistics ``[t, N, 1]``, or ``[s, N, most queries, 1]`` padded behind each
    sequence's own."""
    if stats.dim() == 3:
        return stats[:tokens, :, 0]
    if stats.shape[2] == 1:
        return stats[..., 0, 0]
    token = torch.arange(tokens, device=stats.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_q_lens, token, right=True) - 1
    return stats[sequence, :, token - cu_q_lens[sequence], 0]
