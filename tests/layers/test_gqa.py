"""The GQA layer in a whole model: a sharded cache gives the logits of Megatron's own training forward."""

from __future__ import annotations

import random

import pytest
import torch
from megatron_models import (
    forced_logits,
    make_runner,
    random_state,
    sharded_model,
    tiny_config,
    training_logits,
    whole_model,
)

from megatron_dcp import parallel_state
from megatron_dcp.config import CacheConfig, EngineConfig
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line

BLOCK = 4


def texts_for(dcp: int, decode: int, vocab: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 token, around dcp, around every kind of block edge, and one long."""
    rng = random.Random(dcp)
    edges = {1, dcp - 1, dcp, dcp + 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK * dcp - 1, BLOCK * dcp, BLOCK * dcp + 1, 41}
    lens = sorted(edge for edge in edges if edge > 0)
    return [[rng.randrange(vocab) for _ in range(n + decode)] for n in lens], lens


def largest_error(runner, oracle, texts, lens, chunk=10**9):
    """Largest logit difference, as a share of the oracle's logit range, over all texts and steps."""
    worst = 0.0
    for got, text, n in zip(forced_logits(runner, texts, lens, chunk), texts, lens, strict=True):
        want = training_logits(oracle, text)[n - 1 :, : got.shape[1]]
        assert got.shape == want.shape
        worst = max(worst, float((got - want).abs().max() / (want.max() - want.min())))
    return worst


def case(rank, world, tp, dcp, layout, changes, settings):
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, decode_context_parallel_size=dcp, dcp_layout=layout
    )
    config = tiny_config(**changes)
    state = random_state(config)
    oracle = whole_model(config, state)
    model = sharded_model(config, state)
    texts, lens = texts_for(dcp, 6, config.vocab_size)
    errors = {}
    for interleave, exchange, chunk in settings:
        cache = CacheConfig(block_size=BLOCK, kv_interleave_size=interleave, num_blocks=300)
        runner = make_runner(model, config, cache=cache, engine=EngineConfig(exchange=exchange))
        for k_SKH, v_SKH in map(runner.pool.layer, range(config.num_layers)):
            k_SKH.fill_(torch.nan), v_SKH.fill_(torch.nan)
        errors[interleave, exchange, chunk] = largest_error(runner, oracle, texts, lens, chunk)
    return errors


ALL = [(i, None, 10**9) for i in (1, 2, BLOCK)] + [(1, None, 5)]
ORTHOGONAL = ALL + [(1, e, 7) for e in ("all_reduce", "ag_rs", "a2a")]
WITHIN_TP = ALL + [(1, e, 7) for e in ("all_reduce", "ag_rs")]


@pytest.mark.parametrize("tp,dcp", [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 1), (2, 2), (2, 3), (2, 4), (4, 2)])
def test_orthogonal(tp, dcp):
    for errors in run_on_ranks(tp * dcp, case, tp, dcp, "orthogonal", {}, ORTHOGONAL):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("tp,dcp,kv_heads", [(2, 1, 2), (2, 2, 1), (4, 4, 1), (4, 2, 1), (4, 2, 2)])
def test_within_tp(tp, dcp, kv_heads):
    for errors in run_on_ranks(tp, case, tp, dcp, "within_tp", {"num_query_groups": kv_heads}, WITHIN_TP):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(
    "changes",
    [
        {"add_qkv_bias": True},
        {"qk_layernorm": True},
        {"add_bias_linear": True, "normalization": "LayerNorm", "swiglu": False},
        {"untie_embeddings_and_output_weights": False},
        {"rotary_percent": 0.5},
        {"num_query_groups": 1},
        {"num_attention_heads": 6, "num_query_groups": 6, "hidden_size": 60, "kv_channels": 10},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=lambda changes: ",".join(changes),
)
def test_shapes_of_models(changes):
    settings = [(1, "fold", 7), (2, "a2a", 1)]
    for errors in run_on_ranks(4, case, 2, 2, "orthogonal", changes, settings):
        assert max(errors.values()) < 1e-5, errors
