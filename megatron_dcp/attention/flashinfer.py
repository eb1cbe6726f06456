"""Attention by FlashInfer's wrappers over the pool's pages, in place.

Shapes: ``t`` query tokens of a set, ``s`` virtual sequences, ``N`` query heads, ``K`` KV heads, ``H`` head dim.

The LSE comes as ``[t, N]``, fp32, to the base 2. Which pages a sequence has is said in compressed rows: all page
numbers one after the other (``indices``), where each sequence's start (``indptr``), and keys in its last page.

A wrapper is planned on the CPU, once per step, with the scale of the scores among its arguments; a contract's plan
does not know that yet, so the first layer's call plans. Wrappers hold 8 MiB on the GPU and as much in pinned memory, so
there are few: one that no plan needs any more serves the next step, and where too many plans are alive (a prefill's
slabs) the wrappers are planned for each in turn.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_dcp.attention import libraries
from megatron_dcp.attention.base import AttentionSpec
from megatron_dcp.attention.libraries import HALF, Library, LibraryBackend, Pages
from megatron_dcp.attention.rows import RowLists, Rows
from megatron_dcp.shard import is_quantised

REMEDY = 'pip install "megatron-dcp[flashinfer]"'
WORKSPACE_BYTES = 128 << 20  # partials of keys that are split over the GPU; the size that FlashInfer recommends
MAX_WRAPPERS = 8  # of a kind, on a device
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))  # of keys and values, that it compiles kernels for
LATENT_DIMS = (576, 512)
LATENT_ROWS = 128  # of a tile (tokens x heads): it loses keys at a causal tile's end where heads do not divide it


def library() -> Library:
    """FlashInfer, or why not."""

    def importer() -> Any:
        import flashinfer
        import flashinfer.mla

        return flashinfer

    found = libraries.load("flashinfer", importer, REMEDY)
    if found.module is not None and not hasattr(found.module.mla, "MLAPlanMetadata"):
        return Library(None, f"flashinfer is older than 0.7.4; {REMEDY}")
    return found


class Csr(NamedTuple):
    """A set in compressed rows, int32 on the CPU, where FlashInfer plans."""

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    kv_lens: Tensor

    @staticmethod
    def of(lists: RowLists, block_size: int) -> Csr:
        numbers = (
            [0, *accumulate(lists.q_lens)],
            [0, *accumulate(map(len, lists.tables))],
            [block for table in lists.tables for block in table],
            [(keys - 1) % block_size + 1 for keys in lists.kv_lens],
            lists.kv_lens,
        )
        return Csr(*(torch.tensor(x, dtype=torch.int32) for x in numbers))


@dataclass(eq=False)
class Wrapper:
    """One of FlashInfer's wrappers.

    Attributes:
        user: The set that it is planned for, with which scale and dtype of the queries.
        copied: When the GPU has what was planned last: until then the pinned memory must stay as it is.
    """

    made: Any
    user: weakref.ref[Planning] | None = None
    scale: float = 0.0
    q_dtype: torch.dtype | None = None
    copied: torch.cuda.Event | None = None


@dataclass(eq=False)
class Planning:
    """A set, and the wrapper that it had last.

    Attributes:
        kind: Of the wrapper: ``decode``, ``prefill`` or ``latent``.
    """

    kind: str
    csr: Csr
    wrapper: Wrapper | None = None


class FlashInferBackend(LibraryBackend):
    """Paged decode for sets of single tokens, paged prefill for others, the MLA wrapper for latents.

    e4m3 pools with a scale per token and head are read as they are, except latents.
    """

    name = "flashinfer"

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, Tensor] = {}
        self._wrappers: dict[tuple[str, torch.device], list[Wrapper]] = {}  # the one planned last at the end

    def supports(self, spec: AttentionSpec) -> str | None:
        dtypes = HALF if spec.v_in_k else (*HALF, torch.float8_e4m3fn)
        refusal = libraries.refuse_pool(spec, dtypes=dtypes)
        if refusal is not None:
            return refusal
        dims = (spec.head_dim, spec.v_dim)
        if spec.v_in_k and (dims != LATENT_DIMS or spec.kv_heads != 1):
            return f"a latent of head dims {dims[0]} and {dims[1]} is not served, only 576 and 512 (triton and sdpa do)"
        if spec.v_in_k and LATENT_ROWS % spec.heads:
            return f"a latent with {spec.heads} heads, no divisor of {LATENT_ROWS}, is not served (triton and sdpa do)"
        if not spec.v_in_k and dims not in HEAD_DIMS:
            return f"head dims {dims[0]} and {dims[1]} are none that it compiles for (triton and sdpa serve them)"
        capability = libraries.capability(spec.device)
        if capability is None:
            return f"it runs on GPUs, not on {spec.device} (sdpa does)"
        if capability < (8, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0 (sdpa serves it)"
        return library().missing

    def _prepare(self, lists: RowLists, rows: Rows, spec: AttentionSpec, *, refreshed: bool) -> Planning:
        single = rows.max_q == 1 and spec.head_dim == spec.v_dim
        kind = "latent" if spec.v_in_k else "decode" if single else "prefill"
        state = Planning(kind, Csr.of(lists, spec.block_size))
        if refreshed:
            pages = len(lists.tables) * (rows.max_kv // spec.block_size)
            state.wrapper = Wrapper(self._make(kind, spec.device, state.csr, pages), weakref.ref(state))
        return state

    def _prepare_again(self, lists: RowLists, state: Planning, spec: AttentionSpec) -> None:
        state.csr = Csr.of(lists, spec.block_size)
        wrapper = state.wrapper
        if wrapper is not None and wrapper.q_dtype is not None:  # a graph's replay makes no call that could plan
            self._plan_wrapper(wrapper, state, spec, wrapper.scale, wrapper.q_dtype, causal=False)

    def _wrapper_for(self, state: Planning, device: torch.device) -> Wrapper:
        """The set's own wrapper, or one that it can have."""
        if state.wrapper is not None and state.wrapper.user is not None and state.wrapper.user() is state:
            return state.wrapper
        wrappers = self._wrappers.setdefault((state.kind, device), [])
        idle = (one for one in wrappers if one.user is None or one.user() is None)
        wrapper = next(idle, wrappers[0] if len(wrappers) >= MAX_WRAPPERS else None)
        if wrapper is None:
            wrapper = Wrapper(self._make(state.kind, device))
        else:
            wrappers.remove(wrapper)
        wrappers.append(wrapper)
        wrapper.user, wrapper.q_dtype = weakref.ref(state), None
        state.wrapper = wrapper
        return wrapper

    def _make(self, kind: str, device: torch.device, csr: Csr | None = None, pages: int = 0) -> Any:
        """A new wrapper.

        Args:
            csr, pages: For a CUDA graph: a set of as many sequences, and the most pages that they will have. The
                wrapper then works on tensors that keep their addresses.
        """
        flashinfer = library().module
        workspace = self._workspaces.get(device)
        if workspace is None:
            with torch.inference_mode(False):  # else unusable outside of inference_mode
                workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._workspaces[device] = workspace
        if csr is None:
            if kind == "latent":
                return flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace)
            if kind == "decode":
                return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        qo_indptr, indptr, _, last_page_len, kv_lens = (torch.empty_like(x, device=device) for x in csr)
        indices = torch.empty(pages, dtype=torch.int32, device=device)
        if kind == "latent":
            return flashinfer.mla.BatchMLAPagedAttentionWrapper(
                workspace,
                use_cuda_graph=True,
                qo_indptr=qo_indptr,
                kv_indptr=indptr,
                kv_indices=indices,
                kv_len_arr=kv_lens,
                # what auto picks on newer GPUs cannot be planned again
                backend="auto" if libraries.capability(device) == (9, 0) else "fa2",
            )
        if kind == "decode":
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last_page_len,
            )
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=qo_indptr,
            paged_kv_indptr_buf=indptr,
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=last_page_len,
        )

    def _plan_wrapper(
        self,
        wrapper: Wrapper,
        state: Planning,
        spec: AttentionSpec,
        scale: float,
        q_dtype: torch.dtype,
        *,
        causal: bool,
    ) -> None:
        csr, made = state.csr, wrapper.made
        if wrapper.copied is not None:
            wrapper.copied.synchronize()
        dtypes: dict[str, Any] = {"q_data_type": q_dtype, "kv_data_type": spec.dtype, "sm_scale": scale}
        if state.kind == "latent":
            made.plan(
                metadata=library().module.mla.MLAPlanMetadata.csr(csr.qo_indptr, csr.indptr, csr.indices, csr.kv_lens),
                num_heads=spec.heads,
                head_dim_ckv=spec.v_dim,
                head_dim_kpe=spec.head_dim - spec.v_dim,
                page_size=spec.block_size,
                causal=causal,
                lse_mode="base2",
                **dtypes,
            )
        else:
            pages: tuple[Any, ...] = (
                csr.indptr,
                csr.indices,
                csr.last_page_len,
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
            )
            scaled: dict[str, Any] = {"use_token_head_sf": True} if is_quantised(spec.dtype) else {}
            if state.kind == "decode":
                made.plan(*pages, spec.block_size, **dtypes, **scaled)
            else:
                made.plan(
                    csr.qo_indptr,
                    *pages,
                    spec.block_size,
                    head_dim_vo=spec.v_dim,
                    causal=causal,
                    **dtypes,
                    **scaled,
                )
        wrapper.scale, wrapper.q_dtype = scale, q_dtype
        if spec.device.type == "cuda":
            wrapper.copied = torch.cuda.Event()
            wrapper.copied.record()

    def _call(
        self, q_tNH: Tensor, pages: Pages, rows: Rows, state: Planning, spec: AttentionSpec, scale: float
    ) -> tuple[Tensor, Tensor]:
        wrapper = self._wrapper_for(state, spec.device)
        if (wrapper.scale, wrapper.q_dtype) != (scale, q_tNH.dtype):
            self._plan_wrapper(wrapper, state, spec, scale, q_tNH.dtype, causal=rows.causal)
        if state.kind == "latent":
            out_tNV, lse_tN = wrapper.made.run(query=q_tNH, kv_cache=pages.k.squeeze(2), return_lse=True)
        else:
            scales: dict[str, Any] = {} if pages.k_scale is None else {"kv_cache_sf": (pages.k_scale, pages.v_scale)}
            out_tNV, lse_tN = wrapper.made.run(q_tNH, (pages.k, pages.v), return_lse=True, **scales)
        return out_tNV, lse_tN * math.log(2)
