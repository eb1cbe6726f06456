"""``config.json`` of families with latent attention or experts, as the hub has it, and what of it is not supported."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dcp.checkpoint import open_source
from megatron_dcp.checkpoint.families import FAMILIES, family_of
from megatron_dcp.checkpoint.hf_config import config_from_hf, config_to_hf
from megatron_dcp.model_config import MLAConfig, ModelConfig, MoEConfig
from models import MOE_FAMILIES, tiny_model

# The keys that matter of each model's config.json on the hub, with their names of transformers 4.
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "ep_size": 1,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "hidden_act": "silu", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "attention_bias": False,
    "rope_theta": 10000, "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 1.0, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_layer_freq": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": False, "scoring_func": "softmax", "hidden_act": "silu", "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6, "attention_bias": False, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "attention_bias": False, "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None,
    "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
HUB = {values["model_type"]: values for values in (DEEPSEEK_V3, DEEPSEEK_V2_LITE, QWEN3_MOE, MIXTRAL)}


def config(values: dict[str, Any], **changes: Any) -> ModelConfig:
    return config_from_hf({**values, **changes}, "config.json")[0]


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def test_deepseek_v3() -> None:
    model = config(DEEPSEEK_V3)
    assert model.mla == MLAConfig(
        q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128
    )
    assert model.mla.latent_dim == 576
    assert model.moe == MoEConfig(
        num_experts=256, moe_layer_freq=(0,) * 3 + (1,) * 58, moe_ffn_hidden_size=2048, moe_router_topk=8,
        moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5, moe_router_enable_expert_bias=True,
        moe_router_num_groups=8, moe_router_group_topk=4, moe_router_group_score_topk=2,
        moe_shared_expert_intermediate_size=2048,
    )  # fmt: skip
    assert (model.num_query_groups, model.qk_layernorm, model.ffn_hidden_size) == (128, True, 18432)
    assert model.rope_scaling is not None and model.rope_scaling["rope_type"] == "yarn"
    one_group = config(DEEPSEEK_V3, n_group=1, topk_group=1).moe
    assert one_group is not None and one_group.moe_router_num_groups is None


def test_deepseek_v2() -> None:
    lite = config(DEEPSEEK_V2_LITE)
    assert lite.mla is not None and lite.mla.q_lora_rank is None
    assert lite.moe == MoEConfig(
        num_experts=64, moe_layer_freq=(0,) + (1,) * 26, moe_ffn_hidden_size=1408, moe_router_topk=6,
        moe_router_pre_softmax=True, moe_shared_expert_intermediate_size=2816,
    )  # fmt: skip
    grouped = config(
        DEEPSEEK_V2_LITE, topk_method="group_limited_greedy", n_group=8, topk_group=3, routed_scaling_factor=16.0
    ).moe
    assert grouped == replace(
        lite.moe, moe_router_topk_scaling_factor=16.0, moe_router_num_groups=8, moe_router_group_topk=3,
        moe_router_group_score_topk=1,
    )  # fmt: skip


def test_qwen3_moe() -> None:
    model = config(QWEN3_MOE)
    assert model.moe == MoEConfig(num_experts=128, moe_layer_freq=(1,) * 48, moe_ffn_hidden_size=768, moe_router_topk=8)
    assert (model.qk_layernorm, model.num_query_groups, model.kv_channels) == (True, 4, 128)
    assert config(without(QWEN3_MOE, "num_experts"), num_local_experts=128) == model  # as transformers 5 writes it
    moe = config(QWEN3_MOE, norm_topk_prob=False, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]).moe
    assert moe is not None and (moe.moe_layer_freq, moe.moe_router_pre_softmax) == ((0, 1, 0, 0, 0, 1), True)


def test_mixtral() -> None:
    model = config(MIXTRAL)
    assert model.moe == MoEConfig(num_experts=8, moe_layer_freq=(1,) * 32, moe_ffn_hidden_size=14336, moe_router_topk=2)
    assert model.rotary_base == 1e6  # transformers' default for this family


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_written_config_reads_as_the_same_model(family: str) -> None:
    model = config(HUB[family])
    assert config_to_hf(model, torch.bfloat16, HUB[family]) == {**HUB[family], "dtype": "bfloat16"}
    assert config(config_to_hf(model, torch.bfloat16)) == model
    other = replace(model, vocab_size=1000, padded_vocab_size=1024)  # of which the original says something else
    assert config(config_to_hf(other, torch.bfloat16, HUB[family])) == other
    assert family_of(model).model_type == family


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *[("deepseek_v3", name) for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")],
        *[("deepseek_v3", name) for name in ("v_head_dim", "n_routed_experts", "n_group", "first_k_dense_replace")],
        *[("deepseek_v2", name) for name in ("q_lora_rank", "n_shared_experts", "moe_intermediate_size")],
        *[("mixtral", name) for name in ("num_local_experts", "num_experts_per_tok")],
        ("qwen3_moe", "moe_intermediate_size"),
    ],
)
def test_missing_key_is_named(family: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"config.json lacks {name}, without which"):
        config(without(HUB[family], name))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 is not supported: the norms of the latents"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with weights"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads=8 is not num_attention_heads=128"),
        ("deepseek_v3", {"n_group": 7}, "moe_router_num_groups=7 does not divide num_experts=256"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*dequantize=True"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not known"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": None}, "needs n_group and topk_group"),
        ("deepseek_v2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear' is not supported"),
        ("qwen3_moe", {"num_experts": None}, "num_experts is missing"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with weights"),
        ("qwen3_moe", {"num_experts_per_tok": 129}, "moe_router_topk=129 is above num_experts=128"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "describes no model"),
        ("mixtral", {"attention_bias": True}, "attention_bias=True"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with weights"),
    ],
)
def test_unsupported_keys_are_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(HUB[family], **changes)


@pytest.mark.parametrize(("mscale", "all_dim"), [(0.7, None), (0.7, 0.0), (None, 0.7)])
def test_yarn_that_transformers_and_megatron_read_differently(mscale: float | None, all_dim: float | None) -> None:
    scaling = {**DEEPSEEK_V3["rope_scaling"], "mscale": mscale, "mscale_all_dim": all_dim}
    scaling = {name: value for name, value in scaling.items() if value is not None}
    with pytest.raises(ValueError, match=f"mscale={mscale} with mscale_all_dim={all_dim} in config.json"):
        config(DEEPSEEK_V3, rope_scaling=scaling)
    model = replace(config(DEEPSEEK_V3), rope_scaling={**scaling, "rope_type": "yarn"})
    with pytest.raises(ValueError, match="give both, or neither"):
        config_to_hf(model, torch.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_epsilon": 1e-5},
        {"mla": None},
        {"moe": None},
        {"moe": replace(config(DEEPSEEK_V3).moe, moe_router_group_score_topk=1)},  # type: ignore[type-var]
        {"moe": replace(config(DEEPSEEK_V3).moe, moe_layer_freq=(0, 1, 0) + (1,) * 58)},  # type: ignore[type-var]
        {"moe": replace(config(DEEPSEEK_V3).moe, moe_shared_expert_intermediate_size=3000)},  # type: ignore[type-var]
        {"moe": replace(config(DEEPSEEK_V3).moe, moe_router_enable_expert_bias=False)},  # type: ignore[type-var]
    ],
)
def test_no_family_has_such_a_model(changes: dict[str, Any]) -> None:
    model = replace(config(DEEPSEEK_V3), **changes)
    assert not any(family.fits(model) for family in FAMILIES.values())
    with pytest.raises(ValueError, match="no supported Hugging Face family"):
        family_of(model)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model("deepseek_v3", num_nextn_predict_layers=1), tmp_path / "model")
    file = directory / "model.safetensors"
    held = load_file(file)
    further = {"model.layers.2.eh_proj.weight": torch.ones(32, 64), "model.layers.2.mlp.gate.weight": torch.ones(8, 32)}
    save_file({**held, **further}, file)
    source = open_source(directory)
    assert source.config.num_layers == 2 and not any("layers.2." in name for name in source.specs)
    save_file({**held, "model.layers.3.eh_proj.weight": torch.ones(32, 64)}, file)
    with pytest.raises(ValueError, match=r"holds model\.layers\.3\.eh_proj\.weight"):
        open_source(directory)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model("mixtral"), tmp_path / "model")
    file = directory / "model.safetensors"
    save_file(without(load_file(file), "model.layers.1.block_sparse_moe.experts.5.w2.weight"), file)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.block_sparse_moe\.experts\.5\.w2\.weight"):
        open_source(directory)
