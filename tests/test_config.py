"""Sizes that do not fit are refused when the configuration is made, with the bound and the sizes that fit."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_dcp.config import CacheConfig, EngineConfig, ParallelConfig, check_within_tp_bound
from megatron_dcp.model_config import ModelConfig

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=48,
    ffn_hidden_size=96,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=100,
    padded_vocab_size=120,
    max_position_embeddings=64,
)


@pytest.mark.parametrize("tp,fits", [(1, True), (2, True), (3, False), (4, False), (6, False), (12, False)])
def test_tensor_parallel_sizes_share_heads_kv_heads_and_ffn(tp, fits):
    if fits:
        MODEL.check_tensor_parallel(tp)
    else:
        with pytest.raises(ValueError, match=rf"tensor_model_parallel_size={tp} .* use one of 1, 2$"):
            MODEL.check_tensor_parallel(tp)


def test_the_error_names_what_does_not_fit_and_nothing_else():
    """At tp 4: 6 heads and 80 rows of QKV, the latter of which fit; 96 and 120 fit as well."""
    with pytest.raises(ValueError, match=r"=4 does not fit num_attention_heads=6; use one of 1, 2$"):
        MODEL.check_tensor_parallel(4)
    with pytest.raises(
        ValueError, match=r"=3 does not fit rows of linear_qkv=80, num_query_groups=2; use one of 1, 2$"
    ):
        MODEL.check_tensor_parallel(3)


def test_experts_that_do_not_fill_the_ranks_may_be_split_less():
    """Megatron splits every expert over tp ranks unless it is told not to."""
    parallel = ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=8)
    with pytest.raises(
        ValueError, match="multiple of 16 ranks, or use smaller sizes, or expert_tensor_parallel_size=1$"
    ):
        parallel.check_world_size(4)
    alone = dataclasses.replace(parallel, expert_tensor_parallel_size=1)
    with pytest.raises(ValueError, match="multiple of 8 ranks, or use smaller sizes$"):
        alone.check_world_size(4)


def test_rows_of_one_kv_group_must_split_evenly():
    """6 query heads, 1 KV head of 8: 64 rows of QKV, which 3 ranks cannot share."""
    model = dataclasses.replace(MODEL, num_query_groups=1)
    with pytest.raises(ValueError, match="tensor_model_parallel_size=3"):
        model.check_tensor_parallel(3)
    model.check_tensor_parallel(2)


@pytest.mark.parametrize("tp,kv_heads,legal", [(8, 1, [1, 2, 4, 8]), (8, 4, [1, 2]), (8, 8, [1]), (6, 2, [1, 3])])
def test_within_tp_shards_copies_only(tp, kv_heads, legal):
    for dcp in (d for d in range(1, tp + 1) if tp % d == 0):
        parallel = ParallelConfig(
            tensor_model_parallel_size=tp, decode_context_parallel_size=dcp, dcp_layout="within_tp"
        )
        if dcp in legal:
            check_within_tp_bound(parallel, kv_heads)
        else:
            with pytest.raises(ValueError, match=f"use one of {', '.join(map(str, legal))}, or dcp_layout"):
                check_within_tp_bound(parallel, kv_heads)


def test_orthogonal_knows_no_bound():
    for dcp in (1, 3, 5, 64):
        check_within_tp_bound(ParallelConfig(decode_context_parallel_size=dcp), 1)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: ParallelConfig(tensor_model_parallel_size=0), "must be a whole number >= 1"),
        (lambda: ParallelConfig(decode_context_parallel_size=True), "must be a whole number >= 1"),
        (
            lambda: ParallelConfig(
                tensor_model_parallel_size=8, decode_context_parallel_size=3, dcp_layout="within_tp"
            ),
            "use one of 1, 2, 4, 8, or dcp_layout='orthogonal'",
        ),
        (lambda: ParallelConfig(dcp_layout="inside"), "use one of orthogonal, within_tp"),
        (lambda: CacheConfig(block_size=12, kv_interleave_size=5), "use one of 1, 2, 3, 4, 6, 12"),
        (lambda: CacheConfig(num_blocks=1, bytes_per_rank=1), "give one of them"),
        (lambda: EngineConfig(prefix_caching="no"), "prefix_caching='no' must be True or False"),
        (lambda: EngineConfig(prefix_caching=1), "prefix_caching=1 must be True or False"),
        (lambda: EngineConfig(exchange="p2p"), "use one of fold, all_reduce, ag_rs, a2a"),
        (lambda: EngineConfig(exchange="fold").exchange_for("within_tp"), "use exchange='a2a'"),
        (lambda: dataclasses.replace(MODEL, num_query_groups=4), "does not divide num_attention_heads=6"),
        (lambda: dataclasses.replace(MODEL, padded_vocab_size=99), "is below vocab_size=100"),
    ],
)
def test_errors_name_value_bound_and_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_defaults_of_the_exchange_follow_the_layout():
    assert EngineConfig().exchange_for("orthogonal") == "fold"
    assert EngineConfig().exchange_for("within_tp") == "a2a"
    assert EngineConfig(exchange="ag_rs").exchange_for("orthogonal") == "ag_rs"
