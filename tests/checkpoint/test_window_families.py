"""Families with sliding windows, and every scaling of RoPE: their config.json, and bits and logits of their models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import assert_logits, load_on_rank

from megatron_dcp.checkpoint import convert, read_config
from megatron_dcp.checkpoint.families import family_of
from megatron_dcp.checkpoint.files import WRITABLE_FORMATS
from megatron_dcp.checkpoint.hf_config import config_from_hf, config_to_hf
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.rope import inverse_frequencies, softmax_scale, window_inverse_frequencies
from models import WINDOW_FAMILIES, hf_model, hf_tensors, tiny_model
from workers import run_on_ranks

# The keys that matter of each model's config.json on the hub.
GEMMA3_1B: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "attention_bias": False, "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}  # fmt: skip
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 131072,
    "use_sliding_window": False, "max_window_layers": 28, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def config(values: dict[str, Any], **changes: Any) -> ModelConfig:
    return config_from_hf({**values, **changes}, "config.json")[0]


def test_gemma3() -> None:
    model = config(GEMMA3_1B)
    assert model.window_size == 512 and model.window_attn_skip_freq == ((1,) * 5 + (0,)) * 4 + (1, 1)
    assert (model.rotary_base, model.window_rotary_base, model.rope_scaling) == (1e6, 1e4, None)
    assert model.softmax_scale == 256**-0.5
    flags = (model.geglu, model.swiglu, model.layernorm_zero_centered_gamma, model.sandwich_norms, model.qk_layernorm)
    assert flags == (True, False, True, True, True) and model.scale_embeddings
    assert not model.untie_embeddings_and_output_weights
    scaled = config(GEMMA3_1B, rope_scaling={"factor": 8.0, "rope_type": "linear"})  # the larger ones
    assert torch.allclose(inverse_frequencies(scaled), inverse_frequencies(model) / 8)
    assert torch.equal(window_inverse_frequencies(scaled), window_inverse_frequencies(model))


def test_gemma3_4b_says_little() -> None:
    """Its text part leaves out whatever is the default of transformers."""
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    model = config(text)
    sizes = (model.num_attention_heads, model.num_query_groups, model.kv_channels, model.vocab_size, model.window_size)
    assert sizes == (8, 4, 256, 262208, 1024)


def test_mistral() -> None:
    model = config(MISTRAL_7B)
    assert model.window_size == 4096 and model.window_attn_skip_freq == (1,) * 32
    assert config(MISTRAL_7B, sliding_window=None).window_size is None  # from v0.2 on
    missing = {name: value for name, value in MISTRAL_7B.items() if name != "sliding_window"}
    assert config(missing) == model  # as transformers reads it


def test_qwen2_windows() -> None:
    assert config(QWEN2_7B).window_size is None
    model = config(QWEN2_7B, use_sliding_window=True, max_window_layers=21)
    assert model.window_attn_skip_freq == (0,) * 21 + (1,) * 7
    kinds = ["sliding_attention", "full_attention"] * 14
    assert config(QWEN2_7B, use_sliding_window=True, layer_types=kinds).window_attn_skip_freq == (1, 0) * 14
    with pytest.raises(ValueError, match="layer_types in config.json has chunked_attention"):
        config(QWEN2_7B, use_sliding_window=True, layer_types=["chunked_attention"] * 28)


@pytest.mark.parametrize(
    "values",
    [
        GEMMA3_1B,
        {**GEMMA3_1B, "sliding_window_pattern": 2, "query_pre_attn_scalar": 168},
        MISTRAL_7B,
        {**MISTRAL_7B, "sliding_window": None},
        QWEN2_7B,
        {**QWEN2_7B, "use_sliding_window": True, "max_window_layers": 21},
        {**QWEN2_7B, "rope_scaling": QWEN_YARN},
    ],
)
def test_config_json_says_the_same_again(values: dict[str, Any]) -> None:
    model = config(values)
    original = None
    written = config_to_hf(model, torch.bfloat16, original)
    assert config_from_hf(json.loads(json.dumps(written)), "config.json")[0] == model
    assert family_of(model, values["model_type"]).model_type == values["model_type"]


def test_no_family_has_a_mixture_of_them() -> None:
    for change in ({"geglu": False, "swiglu": True}, {"sandwich_norms": False}, {"scale_embeddings": False}):
        with pytest.raises(ValueError, match="no supported Hugging Face family"):
            family_of(replace(config(GEMMA3_1B), **change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": 4}, "window_size and window_attn_skip_freq belong together"),
        ({"window_size": 0, "window_attn_skip_freq": (1,) * 32}, "window_size=0"),
        ({"window_size": 4, "window_attn_skip_freq": (1,) * 31}, "for each of num_layers=32"),
        ({"window_size": 4, "window_attn_skip_freq": (0,) * 32}, "a 1 somewhere"),
        ({"window_rotary_base": 5.0}, "window_rotary_base needs window_size"),
        ({"geglu": True}, "swiglu=True and geglu=True exclude each other"),
        ({"layernorm_zero_centered_gamma": True, "normalization": "LayerNorm"}, "supported with normalization"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    plain = config(MISTRAL_7B, sliding_window=None)
    with pytest.raises(ValueError, match=message):
        replace(plain, **changes)


# --- models

ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with its own factor": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.7,
        "beta_fast": 20.0, "beta_slow": 2.0,
    },
    "yarn, not truncated": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False,
    },
}  # fmt: skip
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {}),
    ("mistral", {"sliding_window": None}),
    ("mixtral", {"sliding_window": 7}),
    ("gemma3_text", {}),
    ("gemma3_text", {"tied": True, "layers": 3, "rope_scaling": (("rope_type", "linear"), ("factor", 8.0))}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ("gpt_oss", {}),
    ("gpt_oss", {"rope_scaling": tuple(ROPES["yarn, not truncated"].items())}),
    *(("llama", {"rope_scaling": tuple(rope.items()), "positions": 256}) for rope in ROPES.values()),
]


@pytest.mark.mcore_line
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_are_those_of_transformers(tp: int, tmp_path: Path) -> None:
    originals = [tiny_model(family, **keys) for family, keys in MODELS]
    jobs = [(convert(original, tmp_path / f"{number}"), True) for number, original in enumerate(originals)]
    whole = {"expert_tensor_parallel_size": 1}  # GPT-OSS has no others
    for results in run_on_ranks(tp, load_on_rank, jobs, whole, timeout=300):
        for original, (logits, wrong) in zip(originals, results, strict=True):
            assert wrong == []
            assert_logits(logits, original)


@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_every_direction_is_bit_identical(family: str, tmp_path: Path) -> None:
    original = tiny_model(family)
    start = {"hf": original}
    for to in ("torch_dist", "legacy"):
        start[to] = convert(original, tmp_path / to, to=to)
    for src in WRITABLE_FORMATS:
        for to in WRITABLE_FORMATS:
            dst = convert(start[src], tmp_path / f"{src}-{to}", to=to)
            assert read_config(dst) == read_config(original)
            back = dst if to == "hf" else convert(dst, tmp_path / f"{src}-{to}-hf", to="hf")
            a, b = hf_tensors(back), hf_tensors(original)
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
            assert json.loads((back / "config.json").read_text()) == json.loads((original / "config.json").read_text())


@pytest.mark.parametrize(
    ("family", "keys"), [("gemma3_text", {"tied": True}), ("mistral", {}), MODELS[5], MODELS[-2], ("mixtral", {})]
)
def test_transformers_reads_what_was_written_without_the_original_config(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    original = tiny_model(family, **keys)
    legacy = convert(original, tmp_path / "legacy", to="legacy")
    (file,) = legacy.rglob("model_optim_rng.pt")
    state = torch.load(file, weights_only=False)
    state["args"].hf_config = None  # as in a checkpoint that was trained by Megatron
    torch.save(state, file)
    written = convert(legacy, tmp_path / "hf", to="hf")
    ids = torch.arange(90)[None]
    with torch.no_grad():
        assert torch.equal(hf_model(written)(ids).logits, hf_model(original)(ids).logits)
    assert read_config(written) == read_config(original)


def test_of_a_model_that_sees_the_text_part_is_read(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = tiny_model("gemma3_text", tied=True)
    text_config = json.loads((text / "config.json").read_text())
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    both = Gemma3Config(text_config=text_config, vision_config=vision | {"patch_size": 14}, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(both)
    model.model.language_model.load_state_dict(hf_model(text).model.state_dict())
    model.save_pretrained(tmp_path / "both")
    assert read_config(tmp_path / "both") == read_config(text)
    written = convert(convert(tmp_path / "both", tmp_path / "dist"), tmp_path / "hf", to="hf")
    a, b = hf_tensors(written), hf_tensors(text)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    ids = torch.arange(90)[None]
    with torch.no_grad():
        assert torch.equal(hf_model(written)(ids).logits, hf_model(text)(ids).logits)


def test_yarn_turns_into_the_scale_of_the_scores() -> None:
    plain = config(QWEN2_7B)
    assert softmax_scale(plain) is None
    concentration = 1.1386294361119891  # 0.1 ln 4 + 1, the paper's
    assert softmax_scale(config(QWEN2_7B, rope_scaling=QWEN_YARN)) == pytest.approx(128**-0.5 * concentration**2)
    with pytest.raises(ValueError, match="yarn parameters .*'wobble': 3.* are not supported"):
        config(QWEN2_7B, rope_scaling={**QWEN_YARN, "wobble": 3})
    with pytest.raises(ValueError, match="lacks original_max_position_embeddings"):
        config(QWEN2_7B, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ValueError, match="rope_type='longrope' is not supported"):
        config(QWEN2_7B, rope_scaling={"rope_type": "longrope", "factor": 4.0})
