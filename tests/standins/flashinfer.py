"""``flashinfer`` 0.7's planned wrappers. LSEs are to the base 2.

Without CUDA graphs a wrapper takes its tensors over as they are; with them it copies into those that it was made with.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch
from torch import Tensor

from standins import paged


class _Planned:
    """What the three have in common: a set in compressed rows, and the run."""

    graph: bool
    held: dict[str, Tensor | None]

    def _start(self, workspace: Tensor, graph: bool, **buffers: Tensor | None) -> None:
        assert workspace.dtype == torch.uint8 and workspace.numel() == 128 << 20
        self.graph, self.held = graph, buffers
        assert not graph or all(x is not None for x in buffers.values())
        self.planned: dict[str, Any] = {}

    def _take(self, **tensors: Tensor) -> None:
        for name, new in tensors.items():
            assert new.dtype == torch.int32 and new.is_contiguous()
            old = self.held[name] if self.graph else None
            if old is None:
                self.held[name] = new
            elif name.endswith("indices"):
                assert len(new) <= len(old), "The size of indices should be less than or equal to the allocated buffer"
                old[: len(new)].copy_(new)
            else:
                assert old.shape == new.shape, "The batch size should be fixed in cudagraph mode"
                old.copy_(new)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, names: dict[str, str]) -> tuple[Tensor, Tensor]:
        parts = {name: self.held[held] for name, held in names.items()}
        indptr, indices, kv_lens = parts["indptr"], parts["indices"], parts.get("kv_lens")
        assert indptr is not None and indices is not None
        if kv_lens is None:
            last = parts["last"]
            assert last is not None and ((last >= 1) & (last <= k.shape[1])).all()
            kv_lens = ((indptr.diff() - 1) * k.shape[1] + last).to(torch.int32)
        rows = indptr.tolist()
        tables = [indices[a:b].tolist() for a, b in zip(rows, rows[1:], strict=False)]
        assert [len(table) for table in tables] == [-(-n // k.shape[1]) for n in kv_lens.tolist()]
        cu_q_lens = parts.get("qo")
        if cu_q_lens is None:
            cu_q_lens = torch.arange(len(kv_lens) + 1, dtype=torch.int32)
        out, lse = paged.attention(
            q,
            k,
            v,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens,
            tables=tables,
            causal=self.planned["causal"],
            scale=self.planned["sm_scale"],
        )
        return out, lse / math.log(2)

    def _scaled(self, q: Tensor, pages: Tensor, scale: Tensor | None) -> Tensor:
        assert q.dtype == self.planned["q_data_type"] and q.dtype in (torch.bfloat16, torch.float16)
        assert pages.dtype == (self.planned["kv_data_type"] or q.dtype)
        assert (scale is not None) == self.planned["use_token_head_sf"] == (pages.dtype == torch.float8_e4m3fn)
        if scale is None:
            return pages
        assert scale.dtype == torch.float32 and scale.shape == pages.shape[:-1]
        return pages.float() * scale.unsqueeze(-1)


class BatchDecodeWithPagedKVCacheWrapper(_Planned):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        assert kv_layout == "NHD" and use_tensor_cores, "groups of any size, and scales"
        self._start(
            float_workspace_buffer,
            use_cuda_graph,
            indptr=paged_kv_indptr_buffer,
            indices=paged_kv_indices_buffer,
            last=paged_kv_last_page_len_buffer,
        )

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *deprecated_positional_args,
        **kwargs,
    ):
        assert not deprecated_positional_args
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
        is_causal=None,
        use_token_head_sf=False,
    ):
        self._take(indptr=indptr, indices=indices, last=last_page_len)
        self.planned = {**locals(), "causal": False}

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        assert return_lse
        k, v = (self._scaled(q, x, s) for x, s in zip(paged_kv_cache, kv_cache_sf or (None, None), strict=True))
        assert k.shape[1:] == tuple(self.planned[n] for n in ("page_size", "num_kv_heads", "head_dim"))
        assert v.shape == k.shape and q.shape[1:] == (self.planned["num_qo_heads"], k.shape[-1])
        return self._attend(q, k, v, {"indptr": "indptr", "indices": "indices", "last": "last"})


class BatchPrefillWithPagedKVCacheWrapper(_Planned):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
        max_total_num_rows=None,
    ):
        assert kv_layout == "NHD"
        self._start(
            float_workspace_buffer,
            use_cuda_graph,
            qo=qo_indptr_buf,
            indptr=paged_kv_indptr_buf,
            indices=paged_kv_indices_buf,
            last=paged_kv_last_page_len_buf,
        )

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
        use_token_head_sf=False,
    ):
        self._take(qo=qo_indptr, indptr=paged_kv_indptr, indices=paged_kv_indices, last=paged_kv_last_page_len)
        self.planned = locals()

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        assert return_lse and lse_base == "log2" and lse_layout == "NH"
        k, v = (self._scaled(q, x, s) for x, s in zip(paged_kv_cache, kv_cache_sf or (None, None), strict=True))
        assert k.shape[1:] == tuple(self.planned[n] for n in ("page_size", "num_kv_heads", "head_dim_qk"))
        assert v.shape == (*k.shape[:-1], self.planned["head_dim_vo"])
        return self._attend(q, k, v, {"qo": "qo", "indptr": "indptr", "indices": "indices", "last": "last"})


class MLAPlanMetadata(types.SimpleNamespace):
    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return cls(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)


class BatchMLAPagedAttentionWrapper(_Planned):
    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        self._start(
            float_workspace_buffer,
            use_cuda_graph,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_len_arr=kv_len_arr,
        )

    def plan(
        self,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        num_heads=None,
        head_dim_ckv=None,
        head_dim_kpe=None,
        page_size=None,
        causal=None,
        sm_scale=None,
        q_data_type=None,
        kv_data_type=None,
        use_profiler=False,
        *,
        metadata=None,
        cum_seq_lens_q=None,
        block_tables=None,
        seq_lens=None,
        max_q_len=None,
        query_layout=None,
        kv_cache_layout=None,
        lse_mode="none",
        output_dtype=None,
        output_scale="none",
        scale_mode="default",
        skip_softmax=False,
        enable_pdl=None,
        use_sinks=False,
    ):
        assert isinstance(metadata, MLAPlanMetadata) and lse_mode == "base2"
        self._take(**vars(metadata))
        self.planned = {**locals(), "use_token_head_sf": False}

    def run(
        self,
        q_nope=None,
        q_pe=None,
        ckv_cache=None,
        kpe_cache=None,
        out=None,
        lse=None,
        return_lse=False,
        profiler_buffer=None,
        kv_len=None,
        page_table=None,
        return_lse_base_on_e=False,
        o_scale=None,
        *,
        query=None,
        kv_cache=None,
        ckv_scale=None,
        ckv_scale_arr=None,
        kpe_scale=None,
        sinks=None,
        skip_softmax_threshold_scale_factor=None,
        bmm1_scale=None,
        bmm2_scale=None,
    ):
        assert return_lse and not return_lse_base_on_e
        ckv, kpe = self.planned["head_dim_ckv"], self.planned["head_dim_kpe"]
        assert query.shape[1:] == (self.planned["num_heads"], ckv + kpe) and kv_cache.dim() == 3
        k = self._scaled(query, kv_cache, None).unsqueeze(2)
        names = {"qo": "qo_indptr", "indptr": "kv_indptr", "indices": "kv_indices", "kv_lens": "kv_len_arr"}
        return self._attend(query, k, k[..., :ckv], names)


mla = types.ModuleType("flashinfer.mla")
mla.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper  # type: ignore[attr-defined]
mla.MLAPlanMetadata = MLAPlanMetadata  # type: ignore[attr-defined]
