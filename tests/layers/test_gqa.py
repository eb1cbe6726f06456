"""The GQA layer in a whole model: a sharded cache gives the logits of Megatron's own training forward."""

from __future__ import annotations

import pytest
from layer_cases import WITHIN_TP, orthogonal_settings, sharded_errors
from lines import some_with_both

from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line


SIZES = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 1), (2, 2), (2, 3), (2, 4), (4, 2)]
WITHIN_SIZES = [(2, 1, 2), (2, 2, 1), (4, 4, 1), (4, 2, 1), (4, 2, 2)]


@pytest.mark.parametrize("tp,dcp", some_with_both(SIZES, [(1, 1), (1, 3), (2, 2)]))
def test_orthogonal(tp, dcp):
    for errors in run_on_ranks(tp * dcp, sharded_errors, tp, dcp, "orthogonal", {}, orthogonal_settings(tp, dcp)):
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("tp,dcp,kv_heads", some_with_both(WITHIN_SIZES, [(2, 2, 1)]))
def test_within_tp(tp, dcp, kv_heads):
    for errors in run_on_ranks(tp, sharded_errors, tp, dcp, "within_tp", {"num_query_groups": kv_heads}, WITHIN_TP):
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
    for errors in run_on_ranks(4, sharded_errors, 2, 2, "orthogonal", changes, settings):
        assert max(errors.values()) < 1e-5, errors
