"""The arguments that Megatron-LM saves, read as a shape; and the shape, written as such arguments."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_dcp.checkpoint.arguments import args_from_config, config_from_args
from megatron_dcp.model_config import ModelConfig

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=12,
    vocab_size=100,
    padded_vocab_size=128,
    max_position_embeddings=512,
)
# What a training on the command line of Megatron-LM leaves in its arguments, where it matters.
TRAINED: dict[str, Any] = dict(
    num_layers=4, hidden_size=64, num_attention_heads=8, num_query_groups=1, group_query_attention=False,
    ffn_hidden_size=None, kv_channels=8, padded_vocab_size=1024, vocab_size=None, max_position_embeddings=2048,
    position_embedding_type="rope", normalization="RMSNorm", norm_epsilon=1e-6, swiglu=True, add_bias_linear=False,
    num_experts=None, window_size=None, use_rope_scaling=False, rotary_base=500000,
    rotary_seq_len_interpolation_factor=None, untie_embeddings_and_output_weights=True, multi_latent_attention=False,
)  # fmt: skip


def read(**changes: Any) -> ModelConfig:
    return config_from_args(Namespace(**{**TRAINED, **changes}), "common.pt")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_query_groups": 4},
        {"add_qkv_bias": True, "untie_embeddings_and_output_weights": True, "eos_token_ids": (5, 7)},
        {"qk_layernorm": True, "rotary_base": 12345.5, "norm_epsilon": 1e-6},
        {"normalization": "LayerNorm", "add_bias_linear": True, "swiglu": False, "rotary_percent": 0.5},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
)  # fmt: skip
def test_round_trip(changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    args = args_from_config(config, dtype=torch.bfloat16, iteration=7)
    assert config_from_args(args, "common.pt") == config
    assert (args.params_dtype, args.bf16, args.iteration) == (torch.bfloat16, True, 7)


def test_megatrons_own_arguments() -> None:
    config = read()
    assert config.num_query_groups == 8  # the default of 1 does not count without --group-query-attention
    assert config.ffn_hidden_size == 128  # 8/3 of the hidden size, in steps of 64
    assert config.vocab_size == config.padded_vocab_size == 1024
    assert (config.rotary_base, config.rope_scaling, config.norm_epsilon) == (500000.0, None, 1e-6)
    assert read(group_query_attention=True, num_query_groups=2).num_query_groups == 2
    assert read(swiglu=False).ffn_hidden_size == 256
    assert read(vocab_size=1000).vocab_size == 1000
    assert read(vocab_size=1000, tokenizer_type="NullTokenizer").vocab_size == 1001


def test_rope_scaling_of_megatron() -> None:
    scaling = read(use_rope_scaling=True, rope_scaling_factor=32.0).rope_scaling
    assert scaling == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert read(rotary_seq_len_interpolation_factor=2).rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "num_experts=8"),
        ({"multi_latent_attention": True}, "multi_latent_attention=True"),
        ({"window_size": (128, 0)}, "window_size="),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type='learned_absolute'"),
        ({"rotary_interleaved": True}, "rotary_interleaved=True"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p=True"),
        ({"squared_relu": True, "swiglu": False}, "squared_relu=True"),
        ({"padded_vocab_size": None}, "lack padded_vocab_size"),
        ({"num_layers": None, "hidden_size": None}, "lack num_layers, hidden_size"),
        ({"num_layers": "4"}, "args in common.pt describe no model.*num_layers='4'"),
        ({"num_attention_heads": "8", "kv_channels": None}, "args in common.pt describe no model"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)


def test_no_arguments() -> None:
    with pytest.raises(ValueError, match="has no 'args'"):
        config_from_args(None, "common.pt")
