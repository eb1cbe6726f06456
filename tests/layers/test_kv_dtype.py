"""Caches in other dtypes than the model's: what is lost is what storing keys and values loses, and dcp adds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layer_cases import BLOCK, YARN, largest_share, mla, texts_for, wanted_logits
from megatron_models import forced_logits, make_runner, random_state, sharded_model, tiny_config, whole_model
from tokenizers import Tokenizer

from megatron_dcp import load_model, parallel_state
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.engine.runner import KV_DTYPES
from megatron_dcp.layers import attention_layers
from megatron_dcp.layers.forward import cached_as, training_forward
from megatron_dcp.shard import dequantise, quantise
from reference import full_attention
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line

WAYS = [
    ("bfloat16", "pass_kv"),
    ("fp8_e4m3", "pass_kv"),
    ("fp8_e4m3", "pass_q"),
    ("int8", "pass_kv"),
    ("int8", "replicated"),
]
# A key that differs in its last bit may be stored as the next number of 8 bits. As a share of the logits' range.
TOLERANCE = 1e-3


def runner_of(model, config, dtype, prefill):
    cache = CacheConfig(block_size=BLOCK, kv_interleave_size=2, num_blocks=300, kv_cache_dtype=dtype)
    return make_runner(model, config, cache=cache, engine=EngineConfig(prefill=prefill))


def grouped(rank, world, tp, dcp, layout, changes):
    """Largest error against Megatron's forward with keys and values of the dtype, and what an exact cache would err."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, decode_context_parallel_size=dcp, dcp_layout=layout
    )
    config = tiny_config(**changes)
    state = random_state(config)
    model, oracle = sharded_model(config, state), whole_model(config, state)
    texts, lens = texts_for(dcp, 6, config.vocab_size)
    exact = wanted_logits(oracle, texts, lens)
    errors = {}
    for dtype, prefill in WAYS:
        with cached_as(oracle, KV_DTYPES[dtype]):
            wanted = wanted_logits(oracle, texts, lens)
        runner = runner_of(model, config, dtype, prefill)
        logits = forced_logits(runner, texts, lens, 23)
        errors[dtype, prefill] = largest_share(logits, wanted), largest_share(logits, exact)
    return errors


@pytest.mark.parametrize(
    ("tp", "dcp", "layout", "changes"),
    [
        (1, 2, "orthogonal", {}),
        (2, 2, "orthogonal", {}),
        (1, 3, "orthogonal", dict(num_query_groups=1)),
        (2, 2, "within_tp", dict(num_query_groups=1)),
    ],
)
def test_loses_what_the_dtype_loses(tp, dcp, layout, changes):
    ranks = tp if layout == "within_tp" else tp * dcp
    for errors in run_on_ranks(ranks, grouped, tp, dcp, layout, changes):
        for (dtype, prefill), (error, loss) in errors.items():
            assert error < TOLERANCE, (dtype, prefill, errors)
            assert loss > 2 * error, "the dtype is not what the cache has"


def latent(rank, world, tp, dcp, layout):
    """Logits of every dtype and way of prefill."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, decode_context_parallel_size=dcp, dcp_layout=layout
    )
    config = tiny_config(**mla(YARN))
    model = sharded_model(config, random_state(config))
    texts, lens = texts_for(2, 6, config.vocab_size)
    return {
        (dtype, prefill): torch.cat(forced_logits(runner_of(model, config, dtype, prefill), texts, lens, 23))
        for dtype, prefill in [("auto", "pass_kv"), *WAYS]
    }


def test_latents_lose_the_same_at_any_dcp():
    (alone,) = run_on_ranks(1, latent, 1, 1, "orthogonal")
    exact = alone["auto", "pass_kv"]
    span = float(exact.max() - exact.min())
    for sizes in [(1, 2, "orthogonal"), (2, 2, "within_tp")]:
        (shared, *_) = run_on_ranks(2, latent, *sizes)
        for key, logits in shared.items():
            loss = float((alone[key] - exact).abs().max()) / span
            error = float((logits - alone[key]).abs().max()) / span
            assert error < TOLERANCE, (sizes, key)
            assert key[0] == "auto" or loss > 2 * error, (sizes, key)


QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
# Of keys, values and what a layer's attention returns: root of the mean square, against that of the exact ones.
MEASURED = {torch.float8_e4m3fn: (0.026, 0.065), torch.int8: (0.009, 0.0125)}


def real_activations(rank, world):
    """Queries, keys and values of the quickstart model's layers on the beginning of its text, ``[T, heads, dim]``."""
    parallel_state.initialize_model_parallel()
    groups = parallel_state.get_process_group_collection()
    model = load_model(QUICKSTART / "checkpoint", groups)[0]
    tokenizer = Tokenizer.from_file(str(QUICKSTART / "checkpoint" / "tokenizer.json"))
    tokens = tokenizer.encode((QUICKSTART / "haystack.txt").read_text()).ids[:300]
    seen = []
    for layer in attention_layers(model):
        attention = layer.self_attention.core_attention
        attention.register_forward_pre_hook(lambda module, args: seen.append([x.squeeze(1) for x in args[:3]]))
    training_forward(model, tokens, groups)
    return seen


def test_errors_on_real_activations():
    (seen,) = run_on_ranks(1, real_activations)
    assert len(seen) == 3

    def share(error, of):
        return float(error.norm() / of.norm())

    for dtype, (of_stored, of_output) in MEASURED.items():
        for q_TNH, k_TKH, v_TKH in seen:
            positions, scale = list(range(len(q_TNH))), q_TNH.shape[2] ** -0.5
            k, v = (dequantise(*quantise(x, dtype)) for x in (k_TKH, v_TKH))
            assert of_stored / 3 < share(k - k_TKH, k_TKH) < of_stored
            assert of_stored / 3 < share(v - v_TKH, v_TKH) < of_stored
            exact, _ = full_attention(q_TNH, k_TKH, v_TKH, positions, scale=scale)
            stored, _ = full_attention(q_TNH, k, v, positions, scale=scale)
            assert share(stored - exact, exact) < of_output
