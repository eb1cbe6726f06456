"""The MLA layer in a whole model: a sharded cache of latents gives the logits of Megatron's own training forward."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from layer_cases import (
    BLOCK,
    WITHIN_TP,
    YARN,
    largest_error,
    mla,
    orthogonal_settings,
    sharded_errors,
    texts_for,
    wanted_logits,
)
from lines import some_with_both
from megatron.core.transformer.identity_op import IdentityOp
from megatron_models import (
    make_runner,
    random_state,
    sharded_model,
    tiny_config,
    training_logits,
    whole_model,
)

from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams, build_model, local_layer_spec, parallel_state
from megatron_dcp.checkpoint import read_config
from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.layers import DCPMLASelfAttention, LatentShape, dcp_layer_spec, latent_plan
from megatron_dcp.metrics import Metrics
from megatron_dcp.traffic import expected_traffic
from models import tiny_model
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line


SIZES = [(1, 1), (1, 2), (1, 3), (1, 5), (2, 1), (2, 2), (2, 3), (4, 2)]


@pytest.mark.parametrize("tp,dcp", some_with_both(SIZES, [(1, 1), (1, 3), (2, 2)]))
def test_orthogonal(tp, dcp):
    for errors in run_on_ranks(
        tp * dcp, sharded_errors, tp, dcp, "orthogonal", mla(YARN), orthogonal_settings(tp, dcp)
    ):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("tp,dcp", some_with_both([(2, 1), (2, 2), (4, 2), (4, 4)], [(2, 2)]))
def test_within_tp(tp, dcp):
    for errors in run_on_ranks(tp, sharded_errors, tp, dcp, "within_tp", mla(YARN), WITHIN_TP):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(
    "changes",
    [
        mla(),
        mla(q_lora_rank=None),
        mla(YARN, q_lora_rank=None),
        mla(v_head_dim=40),  # values wider than the latent: they come after the exchange
        mla(kv_lora_rank=96),
        mla(qk_pos_emb_head_dim=32, qk_head_dim=4),
    ],
    ids=["plain", "no q_lora", "no q_lora, yarn", "wide values", "wide latent", "mostly rotated"],
)
def test_shapes_of_models(changes):
    settings = [(1, "fold", 30), (2, "a2a", 1)]
    for errors in run_on_ranks(4, sharded_errors, 2, 2, "orthogonal", changes, settings):
        assert max(errors.values()) < 1e-5, errors


def in_parts_case(rank, world, dcp, monkeypatched_bytes):
    parallel_state.initialize_model_parallel(decode_context_parallel_size=dcp)
    config = tiny_config(**mla(YARN))
    state = random_state(config)
    texts, lens = texts_for(dcp, 3, config.vocab_size)
    wanted = wanted_logits(whole_model(config, state), texts, lens)
    errors = {}
    before = latent_plan.WORK_BYTES, LatentShape.prefers_expanded
    try:
        for form, prefers in {
            "absorbed": lambda self, tokens, keys: False,
            "expanded": lambda self, tokens, keys: keys > 0,
            "chosen": before[1],
        }.items():
            latent_plan.WORK_BYTES, LatentShape.prefers_expanded = monkeypatched_bytes, prefers
            runner = make_runner(
                sharded_model(config, state), config, cache=CacheConfig(block_size=BLOCK, num_blocks=300)
            )
            errors[form] = largest_error(runner, wanted, texts, lens, 20)
    finally:
        latent_plan.WORK_BYTES, LatentShape.prefers_expanded = before
    return errors


@pytest.mark.parametrize("dcp", [1, 2, 3])
def test_absorbed_and_expanded_agree(dcp):
    """Each alone, and mixed as the shapes ask for; most contexts take several work spaces of 7 cached tokens."""
    per_key = 4 * (16 + 8 + 12) * 4
    for errors in run_on_ranks(dcp, in_parts_case, dcp, 7 * per_key):
        assert set(errors) == {"absorbed", "expanded", "chosen"} and max(errors.values()) < 1e-5, errors


def latent_shape(**changes: Any) -> LatentShape:
    sizes = dict(
        heads=16, attend_heads=16, qk_head_dim=128, rotated=64, rank=512, v_head_dim=128, orthogonal=True
    )  # DeepSeek-V3 at tp 8
    return LatentShape(**{**sizes, **changes})


def test_decode_is_absorbed_and_long_chunks_are_expanded():
    shape = latent_shape()
    for keys in (100, 10_000, 1_000_000):
        assert not shape.prefers_expanded(1, keys)
        assert not shape.prefers_expanded(8, keys)
    assert shape.prefers_expanded(1024, 1024) and shape.prefers_expanded(1024, 100_000)
    assert not shape.prefers_expanded(64, 100_000)
    assert not latent_shape(orthogonal=False).prefers_expanded(1024, 1024)


def test_exchange_carries_the_smaller_form():
    assert latent_shape().values_first and latent_shape().exchanged_dim == 128
    assert not latent_shape(v_head_dim=600).values_first and latent_shape(v_head_dim=600).exchanged_dim == 512
    assert not latent_shape(orthogonal=False).values_first and latent_shape(orthogonal=False).exchanged_dim == 512


def traffic_case(rank, world, tp, dcp, layout, exchange, v_head_dim):
    parallel_state.initialize_model_parallel(tp, decode_context_parallel_size=dcp, dcp_layout=layout)
    config, metrics = tiny_config(**mla(v_head_dim=v_head_dim)), Metrics()
    runner = make_runner(
        sharded_model(config, random_state(config)),
        config,
        cache=CacheConfig(block_size=BLOCK, num_blocks=8),
        engine=EngineConfig(exchange=exchange),
        metrics=metrics,
    )
    metrics.reset()
    runner.step(StepBatch([SeqStep([7], 0, [i], 1) for i in range(3)]))
    dcp_rank = parallel_state.get_decode_context_parallel_rank()
    return dcp_rank, metrics.collectives, runner.kv_bytes, runner.num_blocks


@pytest.mark.parametrize("v_head_dim", [12, 40])
def test_bytes_of_the_exchange(v_head_dim):
    """``a2a`` is the only all-to-all: it carries ``min(V, R)`` numbers per head and an LSE."""
    for rank, counted, *_ in run_on_ranks(2, traffic_case, 1, 2, "orthogonal", "a2a", v_head_dim):
        calls, sent = expected_traffic("a2a", 3, 4, min(v_head_dim, 32), 2, rank)["all_to_all"]
        assert counted["all_to_all"] == (2 * calls, 2 * sent)
    for rank, counted, *_ in run_on_ranks(2, traffic_case, 2, 2, "within_tp", "a2a", v_head_dim):
        calls, sent = expected_traffic("a2a", 3, 4, 32, 2, rank)["all_to_all"]
        assert counted["all_to_all"] == (2 * calls, 2 * sent)


def test_cache_holds_one_latent_per_token():
    """Nothing but the latent and the rotated key, whatever the number of heads and the layout."""
    for args in ((1, 1, "orthogonal"), (2, 2, "orthogonal"), (4, 4, "within_tp")):
        world = args[0] * args[1] if args[2] == "orthogonal" else args[0]
        for _, _, num_bytes, blocks in run_on_ranks(world, traffic_case, *args, None, 12):
            assert num_bytes == 2 * blocks * BLOCK * (32 + 8) * 4


def memory_case(rank, world, path, dcp):
    llm = LLM(
        path,
        tensor_model_parallel_size=4,
        decode_context_parallel_size=dcp,
        dcp_layout="within_tp",
        cache=CacheConfig(block_size=8),
    )
    (output,) = llm.generate([list(range(97))], SamplingParams(max_tokens=128, ignore_eos=True))
    return output.token_ids, llm.runner.kv_bytes


def test_within_tp_keeps_one_copy_in_the_whole_group():
    """224 tokens at tp 4: four copies of the latent without dcp; a quarter per rank and one copy in all with dcp 4."""
    path = str(tiny_model("deepseek_v2"))
    config = read_config(path)
    one_copy = 224 * config.num_layers * config.mla.latent_dim * 4
    alone, shared = (run_on_ranks(4, memory_case, path, dcp) for dcp in (1, 4))
    assert [num_bytes for _, num_bytes in alone] == [one_copy] * 4
    assert [num_bytes for _, num_bytes in shared] == [one_copy // 4] * 4
    assert alone[0][0] == shared[0][0]


def spec_case(rank, world):
    parallel_state.initialize_model_parallel()
    config = tiny_config(**mla())
    spec = dcp_layer_spec(local_layer_spec(config))
    model = sharded_model(config, random_state(config), layer_spec=spec)
    assert {type(layer.self_attention) for layer in model.decoder.layers} == {DCPMLASelfAttention}
    texts, lens = texts_for(1, 3, config.vocab_size)
    runner = make_runner(model, config, cache=CacheConfig(block_size=BLOCK, num_blocks=300))
    wanted = wanted_logits(whole_model(config, random_state(config)), texts, lens)
    return largest_error(runner, wanted, texts, lens)


def test_built_from_a_spec():
    assert run_on_ranks(1, spec_case)[0] < 1e-5


def refused_case(rank, world, tp, dcp, changes):
    parallel_state.initialize_model_parallel(tp, decode_context_parallel_size=dcp, dcp_layout="within_tp")
    config = tiny_config(**mla())
    model = sharded_model(config, random_state(config))
    for field, value in changes.items():
        setattr(model.config, field, value)
    make_runner(model, config, cache=CacheConfig(block_size=BLOCK, num_blocks=8))


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"cache_mla_latents": True}, "cache_mla_latents=True is not supported by DCP decoding"),
        ({"normalization": "LayerNorm"}, "normalization='LayerNorm' is not supported"),
    ],
)
def test_what_the_layer_does_not_know_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        run_on_ranks(1, refused_case, 1, 1, changes)


def norms_of_nobody_case(rank, world):
    parallel_state.initialize_model_parallel()
    config = tiny_config(**mla())
    spec = local_layer_spec(config)
    spec.submodules.self_attention.submodules.q_layernorm = IdentityOp
    spec.submodules.self_attention.submodules.kv_layernorm = IdentityOp
    build_model(config, parallel_state.get_process_group_collection(), layer_spec=spec)


def test_a_spec_without_norms_is_left_to_megatron():
    """Megatron-Core 0.19 then wants a projection that holds the norm, which TransformerEngine has; 0.16 takes none."""
    errors = run_on_ranks(1, norms_of_nobody_case, expect_errors=True)
    if importlib.util.find_spec("megatron.core.transformer.mla_qk_norm_config") is None:
        assert errors == [None]
    else:
        assert "qk_layernorm requires TransformerEngine" in str(errors[0])


def half_case(rank, world, dtype):
    parallel_state.initialize_model_parallel(decode_context_parallel_size=2)
    config = tiny_config(**mla(YARN))
    state = random_state(config)
    texts, lens = texts_for(2, 3, config.vocab_size)
    cache = CacheConfig(block_size=BLOCK, num_blocks=300)
    exact, half = whole_model(config, state), whole_model(config, state, dtype)
    spread = max(
        float((a - b).abs().max() / (b.max() - b.min()))
        for text in texts
        for a, b in [(training_logits(half, text), training_logits(exact, text))]
    )
    runner = make_runner(sharded_model(config, state, dtype), config, cache=cache)
    return spread, largest_error(runner, wanted_logits(exact, texts, lens), texts, lens)


def test_bf16_stays_within_the_spread_of_bf16():
    for spread, error in run_on_ranks(2, half_case, torch.bfloat16):
        assert 1e-4 < error <= 2 * spread, (error, spread)


class NormInside(torch.nn.Module):
    """What TransformerEngine's up-projection looks like: it holds the norm that comes before it."""

    def __init__(self, linear, norm):
        super().__init__()
        self.weight, self.layer_norm_weight = linear.weight, norm.weight


def norm_inside_case(rank, world):
    parallel_state.initialize_model_parallel()
    config = tiny_config(**mla())
    state = random_state(config)
    texts, lens = texts_for(2, 3, config.vocab_size)
    oracle, model = whole_model(config, state), sharded_model(config, state)
    for layer in model.decoder.layers:
        attention = layer.self_attention
        attention.linear_kv_up_proj = NormInside(attention.linear_kv_up_proj, attention.kv_layernorm)
        attention.kv_layernorm = torch.nn.Identity()
    runner = make_runner(model, config, cache=CacheConfig(block_size=BLOCK, num_blocks=300))
    return largest_error(runner, wanted_logits(oracle, texts, lens), texts, lens)


def test_a_norm_inside_the_up_projection_is_applied_before_the_cache():
    assert run_on_ranks(1, norm_inside_case)[0] < 1e-5
