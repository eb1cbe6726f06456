"""Attention over a latent of 576 dims by FlashMLA, in place.

Shapes: ``t`` query tokens of a set, ``s`` virtual sequences, ``q`` query tokens of each, ``N`` query heads.

The dense kernel wants equally many query tokens of every sequence and returns the natural-log LSE as ``[s, N, q]``,
fp32. Its bounds are those of ``dense_attn_decode_interface`` (csrc/api/dense_decode.h).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_dcp.attention import libraries
from megatron_dcp.attention.base import AttentionSpec
from megatron_dcp.attention.libraries import Library, LibraryBackend, Pages
from megatron_dcp.attention.rows import RowLists, Rows

REMEDY = "build it from github.com/deepseek-ai/FlashMLA"
DIMS = (576, 512)
PAGE = 64


def library() -> Library:
    """FlashMLA, or why not."""

    def importer() -> Any:
        import flash_mla

        return flash_mla

    return libraries.load("flash_mla", importer, REMEDY)


class FlashMLABackend(LibraryBackend):
    """``flash_mla_with_kvcache``, dense."""

    name = "flash_mla"
    uniform = True

    def supports(self, spec: AttentionSpec) -> str | None:
        refusal = libraries.refuse_pool(spec)
        if refusal is not None:
            return refusal
        if not spec.v_in_k or (spec.head_dim, spec.v_dim) != DIMS or spec.kv_heads != 1:
            return (
                "it serves a latent of 512 + 64 dims and nothing else (flash, flashinfer, triton and sdpa serve others)"
            )
        if spec.block_size != PAGE:
            return f"block_size={spec.block_size} is not {PAGE} (flashinfer, triton and sdpa take it)"
        capability = libraries.capability(spec.device)
        if capability is None:
            return f"it runs on GPUs, not on {spec.device} (sdpa does)"
        if capability != (9, 0):
            return f"compute capability {capability[0]}.{capability[1]} is not 9.0 (flashinfer and triton serve it)"
        return library().missing

    def _prepare(self, lists: RowLists, rows: Rows, spec: AttentionSpec, *, refreshed: bool) -> Any:
        """The library, and its schedule for the set."""
        # The first call of a step fills it in on the GPU, the other layers read it. A CUDA graph must record that
        # work, else it would keep the schedule of the lengths that it was captured with.
        module = library().module
        return module, None if refreshed else module.get_mla_metadata()[0]

    def _call(
        self, q_tNH: Tensor, pages: Pages, rows: Rows, state: Any, spec: AttentionSpec, scale: float
    ) -> tuple[Tensor, Tensor]:
        module, schedule = state
        out_sqNV, lse_sNq = module.flash_mla_with_kvcache(
            q_tNH.unflatten(0, (-1, rows.max_q)),
            pages.k,
            rows.tensors.tables,
            rows.tensors.kv_lens,
            spec.v_dim,
            module.get_mla_metadata()[0] if schedule is None else schedule,
            softmax_scale=scale,
            causal=rows.causal,
        )
        return out_sqNV.flatten(0, 1), torch.movedim(lse_sNq, 1, 2).flatten(0, 1)
