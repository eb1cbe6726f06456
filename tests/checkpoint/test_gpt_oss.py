"""GPT-OSS: its config.json, the tensors that hold the experts of a layer, and what is not supported."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loaded import TOKENS
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from safetensors.torch import load_file, save_file

from megatron_dcp import parallel_state
from megatron_dcp._cpu import megatron_on_cpu
from megatron_dcp.checkpoint import convert, load_model, open_source, read_config, save_model
from megatron_dcp.checkpoint.families import family_of
from megatron_dcp.checkpoint.hf_config import config_from_hf, config_to_hf
from megatron_dcp.model_config import ModelConfig, MoEConfig
from megatron_dcp.rope import YarnScaling, softmax_scale
from models import hf_model, hf_tensors, tiny_model
from workers import run_on_ranks

# The keys that matter of the model's config.json on the hub, once its weights are dequantised.
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_act": "silu",
    "attention_bias": True, "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128, "swiglu_limit": 7.0,
    "max_position_embeddings": 131072, "initial_context_length": 4096, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "tie_word_embeddings": False, "eos_token_id": 200002,
}  # fmt: skip


def config(**changes: Any) -> ModelConfig:
    return config_from_hf({**GPT_OSS_20B, **changes}, "config.json")[0]


def test_the_models_of_the_hub() -> None:
    model = config()
    assert model.moe == MoEConfig(num_experts=32, moe_layer_freq=(1,) * 24, moe_ffn_hidden_size=2880, moe_router_topk=4)
    assert (model.window_size, model.window_attn_skip_freq) == (128, (1, 0) * 12)
    assert (model.softmax_type, model.add_bias_linear, model.add_qkv_bias) == ("learnable", True, True)
    assert (model.quick_geglu, model.glu_linear_offset, model.activation_func_clamp_value) == (True, 1.0, 7.0)
    yarn = YarnScaling.of(model.rope_scaling or {})
    assert not yarn.truncate and yarn.concentration == pytest.approx(1.3465735902799727)
    assert softmax_scale(model) == pytest.approx(1.3465735902799727**2 / 8)
    missing = {name: value for name, value in GPT_OSS_20B.items() if name not in ("layer_types", "sliding_window")}
    assert config_from_hf(missing, "config.json")[0] == model  # as transformers reads it


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": {"rope_type": "default"}}, {"swiglu_limit": 5.0}])
def test_config_json_says_the_same_again(changes: dict[str, Any]) -> None:
    model = config(**changes)
    written = json.loads(json.dumps(config_to_hf(model, torch.bfloat16)))
    assert config_from_hf(written, "config.json")[0] == model
    assert family_of(model).model_type == written["model_type"] == "gpt_oss"
    for change in ({"softmax_type": "off-by-one"}, {"glu_linear_offset": 0.0}, {"activation_func_clamp_value": None}):
        with pytest.raises(ValueError, match="no supported Hugging Face family"):
            family_of(replace(model, **change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"Mxfp4Config\(dequantize=True\)"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
        ({"attention_bias": False}, "attention_bias=False"),
        ({"rope_scaling": None}, "rope_scaling is missing"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ],
)
def test_what_is_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quick_geglu": True, "swiglu": True}, "swiglu=True and quick_geglu=True exclude"),
        ({"quick_geglu": False}, "need an MLP with a gate"),
        ({"softmax_type": "sharp"}, "softmax_type='sharp'"),
        ({"moe": replace(config().moe, moe_shared_expert_intermediate_size=64)}, "not supported with a shared expert"),  # type: ignore[type-var]
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config(), **changes)


def test_experts_with_biases_are_not_split() -> None:
    config().check_expert_parallel(4, 1, ranks=8)
    with pytest.raises(ValueError, match="expert_tensor_parallel_size=2 is not supported for experts with biases"):
        config().check_expert_parallel(2, 2, ranks=8)


def test_the_experts_of_a_layer_are_one_tensor_there_and_one_each_here() -> None:
    path = tiny_model("gpt_oss")
    source, theirs = open_source(path), hf_tensors(path)
    prefix, mine = "model.layers.1.mlp.experts.", "decoder.layers.1.mlp.experts.local_experts.3."
    fc1, gate_up = source.read(f"{mine}linear_fc1.weight"), theirs[f"{prefix}gate_up_proj"]
    assert gate_up.shape == (8, 32, 96) and fc1.shape == (96, 32)
    assert torch.equal(fc1[:48], gate_up[3, :, ::2].T) and torch.equal(fc1[48:], gate_up[3, :, 1::2].T)
    assert torch.equal(source.read(f"{mine}linear_fc1.bias")[48:], theirs[f"{prefix}gate_up_proj_bias"][3, 1::2])
    assert torch.equal(source.read(f"{mine}linear_fc2.weight"), theirs[f"{prefix}down_proj"][3].T)
    assert torch.equal(source.read(f"{mine}linear_fc2.bias"), theirs[f"{prefix}down_proj_bias"][3])


@pytest.mark.parametrize("max_shard_bytes", [None, 10_000])
def test_bits_of_bf16_in_files_of_any_size(max_shard_bytes: int | None, tmp_path: Path) -> None:
    """A file of 10 kB holds less than the experts of a layer."""
    original = tiny_model("gpt_oss", dtype="bfloat16", layers=3, max_shard_size="30KB")
    legacy = convert(
        original, tmp_path / "legacy", to="legacy", tensor_model_parallel_size=2, expert_model_parallel_size=2
    )
    back = convert(legacy, tmp_path / "hf", to="hf", max_shard_bytes=max_shard_bytes)
    ours, theirs = hf_tensors(back), hf_tensors(original)
    assert (len(list(back.glob("*.safetensors"))) > 5) == (max_shard_bytes is not None)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs)


def test_transformers_reads_what_is_written_without_the_original(tmp_path: Path) -> None:
    """Also that there is no yarn, which it would assume."""
    original = tiny_model("gpt_oss")
    source = open_source(convert(original, tmp_path / "dist"))
    written = config_to_hf(source.config, torch.float32)
    directory = shutil.copytree(original, tmp_path / "hf")
    (directory / "config.json").write_text(json.dumps(written))
    tokens = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]])
    with torch.no_grad():
        assert torch.equal(hf_model(directory)(tokens).logits, hf_model(original)(tokens).logits)


def test_a_tensor_with_too_few_experts(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model("gpt_oss"), tmp_path / "hf")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({**tensors, name: tensors[name][:7].contiguous()}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} in .* has shape \(7, 32, 96\), but .* asks for \(8, 32, 96\)"):
        open_source(directory)


def save_on_rank(rank: int, world: int, src: Path, dst: Path, sizes: dict[str, int]) -> None:
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(**sizes)
    groups = parallel_state.get_process_group_collection()
    model, shape = load_model(src, groups)
    save_model(model, shape, dst, pg_collection=groups)


@pytest.mark.mcore_line
@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 1), (2, 1, 2), (2, 2, 1)])
def test_a_model_saves_what_it_has_loaded(tp: int, pp: int, ep: int, tmp_path: Path) -> None:
    original = tiny_model("gpt_oss")
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
    }
    run_on_ranks(tp * pp, save_on_rank, original, tmp_path / "dist", sizes)
    assert read_config(tmp_path / "dist") == read_config(original)
    back, expected = hf_tensors(convert(tmp_path / "dist", tmp_path / "hf", to="hf")), hf_tensors(original)
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)


def train_on_rank(rank: int, world: int, src: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a text, and its gradients, by the training forward of Megatron's layers."""
    parallel_state.initialize_model_parallel()
    model, _ = load_model(src, parallel_state.get_process_group_collection())
    inputs, labels = torch.tensor([TOKENS[:-1]]), torch.tensor([TOKENS[1:]])
    length = inputs.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with megatron_on_cpu():
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        loss = model.train()(inputs, torch.arange(length)[None], mask, labels=labels).mean()
        loss.backward()
    return float(loss), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.mcore_line
def test_a_training_step_has_the_gradients_of_transformers() -> None:
    original = tiny_model("gpt_oss", seed=3, vocab_size=128)  # none that only pads, and counts in the loss
    ((loss, ours),) = run_on_ranks(1, train_on_rank, original)
    theirs = hf_model(original)
    want = F.cross_entropy(theirs(torch.tensor([TOKENS[:-1]])).logits[0], torch.tensor(TOKENS[1:]))
    want.backward()
    assert abs(loss - float(want.detach())) < 1e-5
    for layer in (0, 1):
        block, prefix = theirs.model.layers[layer], f"decoder.layers.{layer}."
        experts = block.mlp.experts
        for name, expected in {
            "self_attention.core_attention.softmax_offset": block.self_attn.sinks.grad,
            "self_attention.linear_proj.bias": block.self_attn.o_proj.bias.grad,
            "mlp.router.bias": block.mlp.router.bias.grad,
            "mlp.experts.local_experts.3.linear_fc1.bias": experts.gate_up_proj_bias.grad[3].view(-1, 2).T.flatten(),
            "mlp.experts.local_experts.3.linear_fc2.weight": experts.down_proj.grad[3].T,
        }.items():
            assert expected.abs().max() > 0
            torch.testing.assert_close(
                ours[prefix + name], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
            )
