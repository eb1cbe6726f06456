"""Bytes of the cache against the pool that a rank makes, and what they must obey."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_dcp.cache.pool import bytes_per_block
from megatron_dcp.config import CacheConfig, DcpLayout, KVCacheDtype, ParallelConfig
from megatron_dcp.planner import MODELS, Candidate, Pins, Workload, machine, make_plan
from megatron_dcp.planner.memory import kv_bytes, kv_copies, largest

DTYPES = {
    "auto": torch.bfloat16, "float32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip


def candidate(
    tp: int = 1, dcp: int = 1, layout: DcpLayout = "orthogonal", *, pp: int = 1, dtype: KVCacheDtype = "auto"
) -> Candidate:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        decode_context_parallel_size=dcp,
        dcp_layout=layout,
    )
    cache = CacheConfig(kv_cache_dtype=dtype)
    return Candidate(parallel=parallel, dp=1, kv_cache_dtype=dtype, exchange="a2a", cache=cache)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_a_block_of_the_pool(dtype: KVCacheDtype) -> None:
    llama = bytes_per_block(num_layers=40, block_size=64, num_kv_heads=2, head_dim=128, dtype=DTYPES[dtype])
    one = candidate(4, 3, pp=2, dtype=dtype)
    assert kv_bytes(MODELS["llama-3-70b"], one, "bfloat16", context=193, batch=5) == 5 * 2 * llama
    latent = bytes_per_block(
        num_layers=61, block_size=64, num_kv_heads=1, head_dim=576, v_dim=512, v_in_k=True, dtype=DTYPES[dtype]
    )
    one = candidate(8, 4, "within_tp", dtype=dtype)
    assert kv_bytes(MODELS["deepseek-v3"], one, "bfloat16", context=256, batch=1) == latent


def test_layers_with_a_window_keep_the_window() -> None:
    gemma = MODELS["gemma-3-27b"]
    full, slides = 10, 52  # every sixth of 62 layers sees all
    per_layer = 16 * 128 * 2 * 2 * 64  # bytes of a block
    found = kv_bytes(gemma, candidate(), "bfloat16", context=131072, batch=1)
    assert found == per_layer * (full * 2048 + slides * (1024 // 64 + 1))  # it may begin inside a block
    assert kv_bytes(gemma, candidate(), "bfloat16", context=640, batch=1) == per_layer * 62 * 10
    assert kv_bytes(gemma, candidate(dcp=4), "bfloat16", context=131072, batch=1) == per_layer * (
        full * 512 + slides * (1024 // 256 + 1)
    )


def test_kv_is_split_by_head_then_copied_and_dcp_takes_the_copies_away() -> None:
    llama = MODELS["llama-3-405b"]  # 8 KV heads, 128 query heads

    def of(tp: int, dcp: int = 1, layout: DcpLayout = "orthogonal") -> tuple[float, float]:
        one = candidate(tp, dcp, layout)
        return kv_bytes(llama, one, "bfloat16", context=2**17, batch=1), kv_copies(llama, one)

    whole = of(1)[0]
    assert [of(tp) for tp in (2, 4, 8)] == [(whole / tp, 1) for tp in (2, 4, 8)]
    assert [of(tp) for tp in (16, 32)] == [(whole / 8, 2), (whole / 8, 4)]
    assert of(16, 2, "within_tp") == (whole / 16, 1) and of(32, 2, "within_tp") == (whole / 16, 2)
    assert of(8, 4) == (whole / 32, 1) and of(16, 4) == (whole / 32, 2)


def test_largest() -> None:
    for bound in range(12):
        assert largest(lambda number, bound=bound: number <= bound, 10) == min(bound, 10)


@pytest.mark.parametrize("name", ["llama-3-70b", "deepseek-v3", "gemma-3-27b"])
def test_largest_batch_and_context_fit_and_one_more_does_not(name: str) -> None:
    model, gpu = MODELS[name], machine("H200")
    work = Workload(context=40_000, batch=3, weight_dtype="fp8", memory_share=0.8)
    pins = Pins(tp=8, dcp=1, ep=8 if model.moe else None, expert_tp=1 if model.moe else None)
    (row,) = make_plan(name, model, gpu, 8, work, pins).rows
    assert 3 < row.largest_batch < 10_000

    def fits(**changes: int) -> bool:
        longer = replace(model, max_position_embeddings=10**9)
        (again,) = make_plan(name, longer, gpu, 8, replace(work, **changes), pins).rows
        return again.problem is None and again.memory.total <= 0.8 * 141e9

    assert fits(batch=row.largest_batch) and not fits(batch=row.largest_batch + 1)
    assert fits(context=row.largest_context)
    if row.largest_context < model.max_position_embeddings:
        assert not fits(context=row.largest_context + 1)


def test_the_fullest_stage_counts() -> None:
    """Two layers of Gemma on each of 31 stages: of most, both have a window."""
    per_layer = 16 * 128 * 2 * 2 * 64
    found = kv_bytes(MODELS["gemma-3-27b"], candidate(pp=31), "bfloat16", context=131072, batch=1)
    assert found == per_layer * (2048 + 17)
