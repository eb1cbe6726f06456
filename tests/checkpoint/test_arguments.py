"""The arguments that Megatron-LM saves, read as a shape; and the shape, written as such arguments."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_dcp.checkpoint.arguments import args_from_config, config_from_args
from megatron_dcp.model_config import MLAConfig, ModelConfig, MoEConfig

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
MLA = MLAConfig(q_lora_rank=24, kv_lora_rank=28, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
LATENT: dict[str, Any] = {"mla": MLA, "qk_layernorm": True, "num_query_groups": 4}
MOE = MoEConfig(
    num_experts=8,
    moe_layer_freq=(0, 1),
    moe_ffn_hidden_size=20,
    moe_router_topk=4,
    moe_router_score_function="sigmoid",
    moe_router_topk_scaling_factor=2.5,
    moe_router_enable_expert_bias=True,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_group_score_topk=1,
    moe_shared_expert_intermediate_size=40,
)
YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip
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
        LATENT,
        {**LATENT, "mla": replace(MLA, q_lora_rank=None), "rope_scaling": YARN, "moe": MOE},
        {"moe": MoEConfig(num_experts=4, moe_layer_freq=(1, 1), moe_ffn_hidden_size=20, moe_router_topk=2)},
        {"window_size": 7, "window_attn_skip_freq": (1, 0)},
        {
            "softmax_type": "learnable", "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0, "add_bias_linear": True,
        },
        {
            "window_size": 7, "window_attn_skip_freq": (0, 1), "window_rotary_base": 500.0, "softmax_scale": 0.1,
            "swiglu": False, "geglu": True, "layernorm_zero_centered_gamma": True, "sandwich_norms": True,
            "scale_embeddings": True,
        },
    ],
)  # fmt: skip
def test_round_trip(changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    args = args_from_config(config, dtype=torch.bfloat16, iteration=7)
    assert config_from_args(args, "common.pt") == config
    assert (args.params_dtype, args.bf16, args.iteration) == (torch.bfloat16, True, 7)


def test_megatrons_own_windows() -> None:
    """``--window-size`` counts the tokens before the own one, ``--window-attn-skip-freq`` may be a number."""
    assert read(window_size=(127, 0)).window_size == 128
    assert read(window_size=(127, 0)).window_attn_skip_freq == (1, 1, 1, 1)
    assert read(window_size=[127, 0], window_attn_skip_freq=2).window_attn_skip_freq == (1, 0, 1, 0)
    assert read(window_size=(127, 0), window_attn_skip_freq=[0, 0, 0, 0]).window_size is None


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


LATENT_ARGS: dict[str, Any] = dict(
    multi_latent_attention=True, qk_layernorm=True, q_lora_rank=None, kv_lora_rank=32, qk_head_dim=16,
    qk_pos_emb_head_dim=8, v_head_dim=12,
)  # fmt: skip


def test_latent_attention_of_megatron() -> None:
    config = read(**LATENT_ARGS, group_query_attention=True, num_query_groups=2)
    assert config.mla == MLAConfig(
        q_lora_rank=None, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12
    )
    assert config.num_query_groups == 8  # every head has its own keys and values
    # Without --rope-type, latent attention takes yarn, with these numbers where they are left out.
    assert config.rope_scaling == {
        "rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 0.0,
    }  # fmt: skip
    assert read(**LATENT_ARGS, rope_type="rope", rotary_scaling_factor=40).rope_scaling is None
    assert read(**LATENT_ARGS, rope_type="yarn", rotary_scaling_factor=1.0).rope_scaling is None
    scaling = read(**LATENT_ARGS, rotary_scaling_factor=4.0, mscale=0.7, mscale_all_dim=0.9).rope_scaling
    assert scaling is not None and (scaling["factor"], scaling["mscale"], scaling["mscale_all_dim"]) == (4.0, 0.7, 0.9)


def test_yarn_reaches_megatrons_arguments() -> None:
    args = args_from_config(replace(CONFIG, **LATENT, rope_scaling=YARN), dtype=torch.float32, iteration=1)
    assert (args.rope_type, args.rotary_scaling_factor, args.original_max_position_embeddings) == ("yarn", 8.0, 64)
    assert (args.beta_fast, args.beta_slow, args.mscale, args.mscale_all_dim) == (32.0, 1.0, 0.7, 0.9)
    assert args_from_config(replace(CONFIG, **LATENT), dtype=torch.float32, iteration=1).rope_type == "rope"


def test_experts_of_megatron() -> None:
    moe = read(num_experts=8).moe
    assert moe == MoEConfig(num_experts=8, moe_layer_freq=(1,) * 4, moe_ffn_hidden_size=128, moe_router_topk=2)
    moe = read(num_experts=8, moe_layer_freq=3, moe_ffn_hidden_size=20, moe_router_pre_softmax=True).moe
    assert moe is not None
    assert (moe.moe_layer_freq, moe.moe_ffn_hidden_size, moe.moe_router_pre_softmax) == ((1, 0, 0, 1), 20, True)
    moe = read(
        num_experts=8, moe_layer_freq=[0, 1, 1, 0], moe_router_score_function="sigmoid", moe_router_pre_softmax=True,
        moe_router_topk=4, moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=1.0,
        moe_shared_expert_intermediate_size=40,
    ).moe  # fmt: skip
    assert moe == MoEConfig(
        num_experts=8, moe_layer_freq=(0, 1, 1, 0), moe_ffn_hidden_size=128, moe_router_topk=4,
        moe_router_score_function="sigmoid", moe_router_num_groups=4, moe_router_group_topk=2,
        moe_router_group_score_topk=2, moe_shared_expert_intermediate_size=40,
    )  # fmt: skip
    moe = read(num_experts=8, moe_router_topk=4, moe_router_num_groups=1, moe_router_group_topk=1).moe
    assert moe is not None and moe.moe_router_num_groups is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multi_latent_attention": True}, "multi_latent_attention=True without kv_lora_rank, qk_head_dim"),
        ({**LATENT_ARGS, "qk_layernorm": False}, "qk_layernorm=False is not supported"),
        ({"num_experts": 8, "moe_shared_expert_gate": True}, "moe_shared_expert_gate=True"),
        ({"num_experts": 8, "moe_latent_size": 16}, "moe_latent_size=16"),
        ({"num_experts": 8, "moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type='sinkhorn'"),
        ({"num_experts": 8, "moe_layer_freq": "[1]*4"}, r"moe_layer_freq='\[1\]\*4' is neither"),
        ({"num_experts": 8, "moe_layer_freq": [1, 1]}, "moe_layer_freq has 2 entries for num_layers=4"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1"),
        ({"window_size": (128, 128)}, r"window_size=\(128, 128\) is not supported"),
        ({"window_size": (8, 0), "window_attn_skip_freq": [1, 0]}, "for each of num_layers=4"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type='learned_absolute'"),
        ({"rotary_interleaved": True}, "rotary_interleaved=True"),
        ({"apply_layernorm_1p": True, "normalization": "LayerNorm"}, "layernorm_zero_centered_gamma=True"),
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
