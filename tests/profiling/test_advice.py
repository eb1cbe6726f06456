"""Every rule speaks just above its threshold, is silent at it, and names options that the run has."""

from dataclasses import replace

import pytest

from megatron_dcp.profiling import advice
from megatron_dcp.profiling.advice import Facts, advise

QUIET = Facts(
    tp=1,
    dcp=4,
    layout="orthogonal",
    exchange="a2a",
    prefill="auto",
    on_gpu=False,
    kv_dtype="bfloat16",
    pool_sized=True,
    batch=8,
    context=1000,
    decode_communication=0.0,
    prefill_communication=0.0,
    decode_attention=0.0,
    decode_rest=0.0,
    decode_engine=0.0,
    decode_gpu_wait=None,
    decode_imbalance=0.0,
    slowest_rank=3,
    pool_use=0.0,
    preemptions=0,
    shareable_prefix=0.0,
    prefix_hits=0.0,
    prefix_caching=True,
    logical_block=256,
)


def said(**changes):
    return {each.rule: each.text for each in advise(replace(QUIET, **changes))}


def test_a_quiet_run_gets_one_sentence():
    assert list(said()) == ["none"]


@pytest.mark.parametrize(
    ("rule", "field", "threshold"),
    [
        ("communication", "decode_communication", advice.COMMUNICATION_SHARE),
        ("prefill communication", "prefill_communication", advice.COMMUNICATION_SHARE),
        ("attention", "decode_attention", advice.ATTENTION_SHARE),
        ("pool", "pool_use", advice.POOL_USE),
        ("balance", "decode_imbalance", advice.IMBALANCE),
        ("overhead", "decode_rest", advice.REST_SHARE),
        ("engine", "decode_engine", advice.ENGINE_SHARE),
        ("prefixes", "shareable_prefix", advice.SHAREABLE_PREFIX),
    ],
)
def test_a_rule_speaks_above_its_threshold_and_names_it(rule, field, threshold):
    assert list(said(**{field: threshold})) == ["none"]
    found = said(**{field: threshold + 0.01})
    assert list(found) == [rule]
    assert f"threshold {threshold:.0%}" in found[rule] and found[rule].endswith(".")


def test_communication_names_what_the_run_can_change():
    text = said(decode_communication=0.4)["communication"]
    assert "takes 40% of decode" in text and "dcp below 4" in text and "--exchange fold instead of a2a" in text
    assert "batch above 8" in text and "symmetric" not in text and "graphs" not in text
    text = said(decode_communication=0.4, exchange="fold", on_gpu=True, decode_gpu_wait=1.0)["communication"]
    assert "--exchange fold" not in text and "symmetric memory" in text and "--cuda-graphs" in text
    assert "--exchange fold" not in said(decode_communication=0.4, layout="within_tp")["communication"]
    text = said(decode_communication=0.4, dcp=1, tp=2)["communication"]
    assert "tp below 2" in text and "dcp" not in text


def test_a_pool_that_is_short_holds_no_larger_shard_and_no_larger_batch():
    text = said(decode_communication=0.4, pool_use=0.95)["communication"]
    assert "dcp below" not in text and "batch above" not in text and "a larger KV pool" in text


def test_prefill_names_the_way_that_it_does_not_choose_itself():
    assert "--prefill auto" not in said(prefill_communication=0.4)["prefill communication"]
    text = said(prefill_communication=0.4, prefill="pass_q")["prefill communication"]
    assert "--prefill auto instead of pass_q" in text and "--prefill-chunk-size" in text


def test_attention_wants_more_ranks_or_fewer_bytes():
    text = said(decode_attention=0.7, context=131072)["attention"]
    assert "dcp above 4" in text and "131,072 tokens" in text and "8-bit" in text
    assert "8-bit" not in said(decode_attention=0.7, kv_dtype="int8")["attention"]
    assert "--dcp-layout orthogonal" in said(decode_attention=0.7, layout="within_tp")["attention"]


def test_a_pool_that_was_made_to_measure_may_be_full():
    assert list(said(pool_use=1.0, pool_sized=False)) == ["none"]
    text = said(pool_use=0.5, preemptions=2, pool_sized=True)["pool"]
    assert "(preemptions: 2)" in text and "8-bit" in text and "dcp above 4" in text
    assert "8-bit" not in said(preemptions=1, kv_dtype="float8_e4m3fn")["pool"]


def test_the_slowest_rank_is_named():
    assert said(decode_imbalance=0.3)["balance"].startswith("Rank 3 computes 30% longer")


def test_a_gpu_that_waits_for_python():
    threshold = advice.GPU_WAIT_SHARE
    assert list(said(on_gpu=True, decode_gpu_wait=threshold, decode_rest=0.9)) == ["none"]
    text = said(on_gpu=True, decode_gpu_wait=threshold - 0.01)["overhead"]
    assert "--cuda-graphs" in text and f"threshold {threshold:.0%}" in text


def test_prefixes_that_are_not_found():
    assert list(said(shareable_prefix=0.6, prefix_hits=0.3)) == ["none"]
    assert "of 256 tokens" in said(shareable_prefix=0.6, prefix_hits=0.29)["prefixes"]
    assert "--no-prefix-caching" in said(shareable_prefix=0.6, prefix_caching=False)["prefixes"]
