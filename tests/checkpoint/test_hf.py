"""Hugging Face directories: configurations of both generations, and everything that can be wrong with one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dcp.checkpoint import open_source, read_config
from megatron_dcp.checkpoint.hf_config import config_from_hf, config_to_hf
from models import LLAMA3, tiny_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def config(**changes: Any) -> Any:
    return config_from_hf({**LLAMA, **changes}, "config.json")[0]


def test_defaults_of_keys_that_are_left_out() -> None:
    assert (config().num_query_groups, config().kv_channels, config().norm_epsilon) == (4, 8, 1e-6)
    assert config().untie_embeddings_and_output_weights
    assert not config(tie_word_embeddings=True).untie_embeddings_and_output_weights
    assert (config().rotary_base, config().rope_scaling) == (10000.0, None)
    qwen3 = config(model_type="qwen3", num_key_value_heads=2)
    assert (qwen3.kv_channels, qwen3.qk_layernorm, qwen3.add_qkv_bias) == (128, True, False)
    qwen2 = config(model_type="qwen2", num_key_value_heads=2)
    assert (qwen2.kv_channels, qwen2.qk_layernorm, qwen2.add_qkv_bias) == (8, False, True)
    assert config(num_key_value_heads=None, head_dim=None) == config()


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": dict(LLAMA3)},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **{k: v for k, v in LLAMA3 if k != "rope_type"}}},
        {"rope_parameters": {"rope_theta": 5e5, **dict(LLAMA3)}},
    ],
)
def test_rope_of_both_generations(keys: dict[str, Any]) -> None:
    assert config(**keys).rotary_base == 5e5
    assert config(**keys).rope_scaling == dict(LLAMA3)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default", "factor": 8.0}},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ],
)
def test_default_rope_stays_unscaled(keys: dict[str, Any]) -> None:
    assert config(**keys).rope_scaling is None


def test_linear_rope() -> None:
    assert config(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_end_tokens_of_the_generation_config_come_first() -> None:
    values = {**LLAMA, "eos_token_id": 7}
    assert config_from_hf(values, "c")[0].eos_token_ids == (7,)
    assert config_from_hf(values, "c", generation={"eos_token_id": [8, 9]})[0].eos_token_ids == (8, 9)
    assert config_from_hf(values, "c", generation={"top_p": 1})[0].eos_token_ids == (7,)
    assert config().eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type='gemma'.*supported are llama, qwen2, qwen3, mistral"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "lacks original_max_position_embeddings"),
        ({"rope_scaling": {"type": "dynamic"}}, "of type 'dynamic' lacks factor"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ from layer to layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "config.json describes no model.*num_query_groups=3 does not divide"),
        ({"hidden_size": "32"}, "config.json describes no model.*hidden_size='32' must be a whole number"),
        ({"rms_norm_eps": "a"}, "rms_norm_eps='a' must be a number above 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps=True must be a number above 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1 must be a number above 0"),
        ({"rope_theta": "big"}, "config.json describes no model.*rope_theta='big' must be a number above 0"),
        ({"rope_parameters": "x"}, "rope_parameters='x' must be an object"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta=-1 must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' must be true or false"),
        ({"eos_token_id": "x"}, "eos_token_id='x' must be a token id or a list"),
        ({"layer_types": ["full_attention"]}, "layer_types=.* must be a list with an entry for each of num_hidden_la"),
        ({"num_hidden_layers": 0}, "num_layers=0"),
    ],
)
def test_unsupported_configurations_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_original_config_is_kept_only_while_it_describes_the_model() -> None:
    original = {**LLAMA, "num_key_value_heads": 2, "pad_token_id": 3, "rope_theta": 5e5, "transformers_version": "4.4"}
    shape = config_from_hf(original, "c")[0]
    assert config_to_hf(shape, torch.bfloat16, original) == {**original, "dtype": "bfloat16"}
    longer = config_to_hf(config(num_key_value_heads=2, rope_theta=1e6), torch.float32, original)
    assert (longer["rope_theta"], longer["pad_token_id"], longer["torch_dtype"]) == (1e6, 3, "float32")
    assert config_from_hf(longer, "c")[0] == config(num_key_value_heads=2, rope_theta=1e6)


def test_no_family_for_megatrons_other_models() -> None:
    from dataclasses import replace

    with pytest.raises(ValueError, match="no supported Hugging Face family.*normalization=LayerNorm"):
        config_to_hf(replace(config(), normalization="LayerNorm"), torch.float32)


# --- directories that are not sound


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model("qwen2"), tmp_path / "model")


def edit(directory: Path, **tensors: torch.Tensor | None) -> None:
    file = directory / "model.safetensors"
    held = {**load_file(file), **{name.replace("__", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, file)


def test_missing_tensor(directory: Path) -> None:
    edit(directory, model__layers__1__self_attn__k_proj__bias=None)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.bias.*incomplete"):
        open_source(directory)
    assert read_config(directory).num_layers == 2  # says nothing about tensors


def test_a_head_beside_the_one_that_is_tied(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model("llama", tied=True), tmp_path / "model")
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    edit(directory, lm_head__weight=table.clone())
    assert "output_layer.weight" not in open_source(directory).specs
    edit(directory, lm_head__weight=table + 1)
    with pytest.raises(ValueError, match=r"lm_head\.weight that is not model\.embed_.*tie_word_embeddings to false"):
        open_source(directory)


def test_extra_tensor(directory: Path) -> None:
    edit(directory, model__layers__0__self_attn__o_proj__bias=torch.zeros(32))
    with pytest.raises(ValueError, match=r"holds model\.layers\.0\.self_attn\.o_proj\.bias.*no place for"):
        open_source(directory)


def test_wrong_shape(directory: Path) -> None:
    edit(directory, model__layers__0__mlp__up_proj__weight=torch.zeros(32, 48))
    with pytest.raises(ValueError, match=r"up_proj\.weight.*shape \(32, 48\).*asks for \(48, 32\)"):
        open_source(directory)


def test_wrong_vocabulary(directory: Path) -> None:
    edit(directory, model__embed_tokens__weight=torch.zeros(128, 32))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight.*\(128, 32\).*\(100, 32\)"):
        open_source(directory)


def test_quantised_tensor(directory: Path) -> None:
    edit(directory, model__norm__weight=torch.zeros(32, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*I8.*supported are F32"):
        open_source(directory)


def test_old_inverse_frequencies_are_no_extra_tensors(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model("llama", tied=True), tmp_path / "model")
    edit(directory, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    assert "output_layer.weight" not in open_source(directory).specs


@pytest.mark.parametrize("keep", [0, 5, 200, -8])
def test_truncated_file(directory: Path, keep: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors is truncated or no safetensors file"):
        open_source(directory)


def test_missing_files(directory: Path, tmp_path: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        open_source(directory)
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="safe_serialization"):
        open_source(directory)
    sharded = shutil.copytree(tiny_model("qwen2", max_shard_size="20KB"), tmp_path / "sharded")
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"{lost.name} is missing"):
        open_source(sharded)


def test_index_that_lies(tmp_path: Path) -> None:
    sharded = shutil.copytree(tiny_model("qwen2", max_shard_size="20KB"), tmp_path / "sharded")
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], first: "../../etc/passwd"}}))
    with pytest.raises(ValueError, match="not a file beside it"):
        open_source(sharded)
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], "model.ghost": index["weight_map"][first]}}))
    with pytest.raises(ValueError, match="lists model.ghost"):
        open_source(sharded)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "llama", "vocab'])
def test_broken_config(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        read_config(directory)
