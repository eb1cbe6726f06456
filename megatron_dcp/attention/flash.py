"""Attention by FlashAttention: version 3 on Hopper, version 2 elsewhere, over the pool's pages, in place.

Shapes: ``t`` query tokens of a set, ``N`` query heads, ``K`` KV heads, ``H`` head dim, ``V`` values' head dim.

Both return the natural-log LSE of ragged queries as ``[N, t]``, fp32. Version 3 takes pages of any size, and a latent
as its rotated dims (keys) and its other dims (values) with queries for both (``qv``). Version 2 takes pages of
multiples of 256. Of its two entries for pages, ``flash_attn_with_kvcache`` asks the GPU for the longest context in
every call (2.8.4), which a CUDA graph cannot record; ``flash_attn_varlen_func`` does not, and splits keys over the GPU
as well where decode tokens have several query heads per KV head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_dcp.attention import libraries
from megatron_dcp.attention.base import AttentionSpec
from megatron_dcp.attention.libraries import Library, LibraryBackend, Pages
from megatron_dcp.attention.rows import RowLists, Rows

REMEDY_3 = "build it from the hopper folder of github.com/Dao-AILab/flash-attention"
REMEDY_2 = 'pip install "megatron-dcp[flash]"'
MAX_HEAD_DIM = 256
PAGE_2 = 256  # version 2 takes multiples of it


def library_3() -> Library:
    """FlashAttention 3, or why not."""

    def importer() -> Any:
        import flash_attn_interface

        return flash_attn_interface

    return libraries.load("flash_attn_interface", importer, REMEDY_3)


def library_2() -> Library:
    """FlashAttention 2, or why not."""

    def importer() -> Any:
        import flash_attn

        return flash_attn

    return libraries.load("flash_attn", importer, REMEDY_2)


class FlashBackend(LibraryBackend):
    """FlashAttention 3 where GPU and library are there, else 2."""

    name = "flash"

    def __init__(self) -> None:
        self._way: tuple[Any, Any] | None = None

    def supports(self, spec: AttentionSpec) -> str | None:
        refusal = libraries.refuse_pool(spec)
        if refusal is not None:
            return refusal
        capability = libraries.capability(spec.device)
        if capability is None:
            return f"it runs on GPUs, not on {spec.device} (sdpa does)"
        if capability < (8, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0 (sdpa serves it)"
        refusal_3, refusal_2 = _refuse_3(spec, capability), _refuse_2(spec)
        if refusal_3 is None or refusal_2 is None:
            return None
        return f"version 3: {refusal_3}, version 2: {refusal_2}"

    def _prepare(self, lists: RowLists, rows: Rows, spec: AttentionSpec, *, refreshed: bool) -> Any:
        """The library, and how it is called."""
        if self._way is None:  # looked up once: an import that fails is tried anew every time
            capability = libraries.capability(spec.device)
            newer = capability is not None and _refuse_3(spec, capability) is None
            self._way = (library_3().module, _call_3) if newer else (library_2().module, _call_2)
        return self._way

    def _call(
        self, q_tNH: Tensor, pages: Pages, rows: Rows, state: Any, spec: AttentionSpec, scale: float
    ) -> tuple[Tensor, Tensor]:
        module, call = state
        return call(module, q_tNH, pages, rows, spec, scale)


def _refuse_3(spec: AttentionSpec, capability: tuple[int, int]) -> str | None:
    """Bounds of ``mha_fwd`` in hopper/flash_api.cpp."""
    dim, v_dim = spec.head_dim, spec.v_dim
    if capability[0] != 9:
        return f"compute capability {capability[0]}.{capability[1]} is not 9.x"
    if spec.v_in_k:
        if not (0 < dim - v_dim <= 64 and 256 <= v_dim <= 512 and dim % 8 == v_dim % 8 == 0):
            return f"a latent of head dims {dim} and {v_dim} is not served (triton and sdpa do)"
    elif dim > MAX_HEAD_DIM or dim % 8 or v_dim % 8:
        return f"head dim {dim} is above {MAX_HEAD_DIM} or no multiple of 8 (triton and sdpa serve it)"
    elif v_dim != dim and not (128 < dim <= 192 and 96 < v_dim <= 128) and not (dim <= 64 and v_dim <= 512):
        return f"head dims {dim} and {v_dim} of keys and values are not served (triton and sdpa do)"
    return library_3().missing


def _refuse_2(spec: AttentionSpec) -> str | None:
    """Bounds of ``mha_varlen_fwd`` in csrc/flash_attn/flash_api.cpp."""
    dim = spec.head_dim
    if spec.v_in_k or spec.v_dim != dim:
        return f"head dims {dim} and {spec.v_dim} of keys and values differ (triton and sdpa serve them)"
    if dim > MAX_HEAD_DIM or dim % 8:
        return f"head dim {dim} is above {MAX_HEAD_DIM} or no multiple of 8 (triton and sdpa serve it)"
    if spec.block_size % PAGE_2:
        return f"block_size={spec.block_size} is no multiple of {PAGE_2} (flashinfer and sdpa take it)"
    return library_2().missing


def _call_3(
    module: Any, q_tNH: Tensor, pages: Pages, rows: Rows, spec: AttentionSpec, scale: float
) -> tuple[Tensor, Tensor]:
    k, q_tNV = pages.k, None
    if spec.v_in_k:
        q_tNV, q_tNH = q_tNH[..., : spec.v_dim], q_tNH[..., spec.v_dim :]
        k = k[..., spec.v_dim :]
    out_tNV, lse_Nt, *_ = module.flash_attn_with_kvcache(
        q_tNH,
        k,
        pages.v,
        qv=q_tNV,
        cache_seqlens=rows.tensors.kv_lens,
        page_table=rows.tensors.tables,
        cu_seqlens_q=rows.tensors.cu_q_lens,
        max_seqlen_q=rows.max_q,
        softmax_scale=scale,
        causal=rows.causal,
        return_softmax_lse=True,
    )
    return out_tNV, lse_Nt.t()


def _call_2(
    module: Any, q_tNH: Tensor, pages: Pages, rows: Rows, spec: AttentionSpec, scale: float
) -> tuple[Tensor, Tensor]:
    out_tNV, lse_Nt, _ = module.flash_attn_varlen_func(
        q_tNH,
        pages.k,
        pages.v,
        rows.tensors.cu_q_lens,
        rows.tensors.cu_kv_lens,
        rows.max_q,
        rows.max_kv,
        softmax_scale=scale,
        causal=rows.causal,
        return_attn_probs=True,
        block_table=rows.tensors.tables,
    )
    return out_tNV, lse_Nt.t()
