"""Keys of ``torch_dist`` checkpoints: read in every layout that Megatron has, written in the one that it asks for."""

from dataclasses import replace

import pytest

from megatron_dcp.checkpoint.dist_keys import Place, Stored, extra_state_keys, find_tensors, places
from megatron_dcp.model_config import MLAConfig, ModelConfig, MoEConfig
from megatron_dcp.model_tensors import model_tensors

DENSE = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=100,
    padded_vocab_size=128,
    max_position_embeddings=512,
)
MLA = MLAConfig(q_lora_rank=24, kv_lora_rank=28, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
EXPERTS = replace(DENSE, moe=MoEConfig(num_experts=3, moe_layer_freq=(0, 1), moe_ffn_hidden_size=20, moe_router_topk=2))
LATENT = replace(EXPERTS, mla=MLA, qk_layernorm=True, num_query_groups=4)
LAYER1 = "decoder.layers.1."
EXPERT = f"{LAYER1}mlp.experts.local_experts.2.linear_fc1.weight"


def written(name: str, config: ModelConfig) -> list[str]:
    return [place.key for place in places(name, config)]


def test_layers_are_stacked_unless_some_may_have_experts() -> None:
    name = f"{LAYER1}mlp.linear_fc2.weight"
    assert places(name, DENSE) == [Place("decoder.layers.mlp.linear_fc2.weight", (2,), (1,))]
    assert places("decoder.layers.0.mlp.linear_fc2.weight", EXPERTS) == [
        Place("decoder.layers.0.mlp.linear_fc2.weight")
    ]
    assert places(EXPERT, EXPERTS) == [Place(f"{LAYER1}mlp.experts.experts.linear_fc1.weight", (3,), (2,))]
    assert places("output_layer.weight", EXPERTS) == [Place("output_layer.weight")]


def test_norms_have_the_names_of_megatrons_own_layers_and_of_transformer_engines() -> None:
    norm, mlp_norm = "input_layernorm.weight", "pre_mlp_layernorm.weight"
    fused, fused_mlp = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
    assert written(LAYER1 + norm, DENSE) == [f"decoder.layers.{fused}"]
    assert written(LAYER1 + mlp_norm, DENSE) == [f"decoder.layers.{fused_mlp}"]
    assert written(LAYER1 + norm, EXPERTS) == [LAYER1 + fused]
    assert written(LAYER1 + mlp_norm, EXPERTS) == [LAYER1 + fused_mlp, LAYER1 + mlp_norm]
    assert written(LAYER1 + norm, LATENT) == [LAYER1 + norm]
    assert written(LAYER1 + mlp_norm, LATENT) == [LAYER1 + mlp_norm]
    assert written(f"decoder.layers.0.{mlp_norm}", LATENT) == [f"decoder.layers.0.{x}" for x in (mlp_norm, fused_mlp)]
    for part in "q", "kv":
        names = (f"{part}_layernorm.weight", f"linear_{part}_up_proj.layer_norm_weight")
        assert written(f"{LAYER1}self_attention.{names[0]}", LATENT) == [f"{LAYER1}self_attention.{x}" for x in names]
    qk_norm = replace(EXPERTS, qk_layernorm=True)
    assert written(f"{LAYER1}self_attention.q_layernorm.weight", qk_norm) == [
        f"{LAYER1}self_attention.q_layernorm.weight"
    ]


@pytest.mark.parametrize("config", [DENSE, EXPERTS, LATENT, replace(LATENT, moe=None)])
@pytest.mark.parametrize("only", [0, -1])
def test_what_is_written_is_found_under_the_first_and_the_last_name(config: ModelConfig, only: int) -> None:
    specs = model_tensors(config)
    sizes, expected = {}, {}
    for name, spec in specs.items():
        place = places(name, config)[only]
        sizes[place.key] = (*place.stack, *spec.shape)
        expected[name] = Stored((place.key,), place.index)
    assert find_tensors(sizes, config, "dir") == expected


def test_experts_behind_stacked_layers_and_experts_with_numbers() -> None:
    everywhere = replace(EXPERTS, moe=replace(EXPERTS.moe, moe_layer_freq=(1, 1)))  # type: ignore[type-var]
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert find_tensors({key: (2, 3, 40, 32)}, everywhere, "dir")[EXPERT] == Stored((key,), (1, 2))
    halves = tuple(f"{LAYER1}mlp.experts.experts.2.linear_fc1.weight_{half}" for half in "wv")
    assert find_tensors(dict.fromkeys(halves, (20, 32)), EXPERTS, "dir") == {EXPERT: Stored(halves)}


@pytest.mark.parametrize(
    ("key", "size", "message"),
    [
        (f"{LAYER1}mlp.experts.experts.linear_fc1.weight", (4, 40, 32), r"\(4, 40, 32\).*asks for 3 experts"),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (3, 3, 40, 32), "asks for 2 layers"),
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 4, 40, 32), "asks for 3 experts"),
        (f"{LAYER1}mlp.experts.experts.linear_fc1.weight", (3,), "asks for 3 experts"),
    ],
)
def test_stacks_of_another_model(key: str, size: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_tensors({key: size}, EXPERTS, "dir")


def test_extra_states() -> None:
    keys = extra_state_keys(model_tensors(DENSE), DENSE)
    modules = ("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention")
    modules += ("mlp.linear_fc1", "mlp.linear_fc2")
    stacked = {f"decoder.layers.{module}._extra_state/shard_{i}_2" for module in modules for i in range(2)}
    assert set(keys) == stacked | {"decoder.final_layernorm._extra_state/shard_0_1"} and len(keys) == len(set(keys))
    keys = extra_state_keys(model_tensors(LATENT), LATENT)
    assert f"{LAYER1}mlp.experts.experts.linear_fc2._extra_state/shard_2_3" in keys
    assert f"{LAYER1}self_attention.linear_kv_up_proj._extra_state/shard_0_1" in keys
    assert not any("router" in key for key in keys)
