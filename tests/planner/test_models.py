"""Shapes of well-known models: parameters against what their publishers say; names; GPUs."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from megatron_dcp.config import ParallelConfig
from megatron_dcp.model_config import MLAConfig, ModelConfig, MoEConfig
from megatron_dcp.model_tensors import model_tensors
from megatron_dcp.planner import MODELS, known_model, machine
from megatron_dcp.planner.gpus import NAMES, REACHED
from megatron_dcp.planner.weights import check_weight_dtype, count_parameters, weight_bytes

# Billions: technical reports and model cards.
PUBLISHED = {
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3-405b": 405.9,
    "qwen2.5-7b": 7.61,
    "qwen2.5-72b": 72.7,
    "qwen3-235b-a22b": 235.1,
    "qwen3-235b-a22b-2507": 235.1,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 141,
    "deepseek-v3": 671,
    "kimi-k2": 1040,
    "kimi-k2-0905": 1040,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "gemma-3-27b": 27.0,
}
MOE = ModelConfig(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=256,
    padded_vocab_size=256,
    max_position_embeddings=128,
    untie_embeddings_and_output_weights=True,
    mla=MLAConfig(q_lora_rank=24, kv_lora_rank=32, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=8),
    moe=MoEConfig(num_experts=8, moe_layer_freq=(0, 1, 1, 1), moe_ffn_hidden_size=16, moe_router_topk=2),
)


def test_every_model_is_compared() -> None:
    assert set(PUBLISHED) == set(MODELS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name: str) -> None:
    # "1.04 trillion" says Kimi K2's report; the tensors that its config.json describes add up to 1.026.
    tolerance = 0.014 if name.startswith("kimi") else 0.01
    assert count_parameters(MODELS[name]) / 1e9 == pytest.approx(PUBLISHED[name], rel=tolerance)


def test_experts_and_active_parameters() -> None:
    """GPT-OSS-120B has 5.13 B active parameters (model card), DeepSeek-V3 37 B: as with top-k experts only."""
    for name, active in (("gpt-oss-120b", 5.13), ("deepseek-v3", 37)):
        model = MODELS[name]
        assert model.moe is not None
        few = replace(model, moe=replace(model.moe, num_experts=model.moe.moe_router_topk))
        tables = model.vocab_size * model.hidden_size if name == "gpt-oss-120b" else 0  # it counts one of the two
        assert (count_parameters(few) - tables) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(("tp", "pp", "ep", "expert_tp"), [(1, 1, 1, 1), (2, 1, 1, 2), (4, 2, 2, 1), (1, 4, 8, 1)])
def test_weights_of_a_rank_are_its_shards(tp: int, pp: int, ep: int, expert_tp: int) -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expert_tp,
    )
    stages = [0] * pp
    for name, spec in model_tensors(replace(MOE, padded_vocab_size=512 if tp == 4 else 256)).items():
        stage = 0 if name.startswith("embedding") else pp - 1
        if name.startswith("decoder.layers."):
            stage = int(name.split(".")[2]) // (4 // pp)
        if name == "decoder.final_layernorm.weight":
            continue  # 64 numbers that the planner leaves out
        cut = 1 if spec.tp_dim is None else expert_tp if spec.expert else tp
        stages[stage] += prod(spec.shape) // cut // (ep if spec.expert else 1)
    assert weight_bytes(MOE, parallel, "float32") == 4 * max(stages)


def test_a_last_stage_has_a_copy_of_tied_embeddings() -> None:
    gemma = MODELS["gemma-3-27b"]
    table = 262272 * 5376 * 2  # padded to a multiple of 128
    one, two = (weight_bytes(gemma, ParallelConfig(pipeline_model_parallel_size=pp), "bfloat16") for pp in (1, 2))
    assert two == (one - table) / 2 + table
    untied = replace(gemma, untie_embeddings_and_output_weights=True)
    assert weight_bytes(untied, ParallelConfig(), "bfloat16") == one + table
    tied, last = replace(MOE, untie_embeddings_and_output_weights=False), ParallelConfig(pipeline_model_parallel_size=4)
    assert weight_bytes(tied, last, "bfloat16") == weight_bytes(MOE, last, "bfloat16")


def test_bytes_of_narrow_weights() -> None:
    """GPT-OSS-120B in mxfp4 has 60.8 GiB (model card). In nvfp4 60 x 384 experts of Kimi-K2 have 4.5 bits a number."""
    whole = ParallelConfig()
    assert weight_bytes(MODELS["gpt-oss-120b"], whole, "mxfp4") / 2**30 == pytest.approx(60.8, rel=0.01)
    kimi, experts = MODELS["kimi-k2"], 60 * 384 * 3 * 7168 * 2048
    rest = weight_bytes(kimi, whole, "bfloat16") - 2 * experts
    assert weight_bytes(kimi, whole, "nvfp4") == pytest.approx(experts * 4.5 / 8 + rest, rel=1e-12)
    matrices_of_fp8 = weight_bytes(MODELS["llama-3-8b"], whole, "fp8")
    tables = 2 * 128256 * 4096
    assert matrices_of_fp8 == pytest.approx(8.03e9 - tables + 2 * tables, rel=1e-3)
    with pytest.raises(ValueError, match="weight_dtype='nvfp4' is for experts, and the model has none; use fp8"):
        check_weight_dtype(MODELS["llama-3-8b"], "nvfp4")
    with pytest.raises(ValueError, match="weight_dtype='int4' is not known; use one of bfloat16"):
        check_weight_dtype(MODELS["llama-3-8b"], "int4")


def test_names_in_any_form() -> None:
    for name in ("Llama-3.1-70B", "llama3_70b", "LLAMA 3 70B", "llama-3.3-70b"):
        assert known_model(name) == ("llama-3-70b", MODELS["llama-3-70b"])
    assert known_model("DeepSeek-R1")[0] == "deepseek-v3"


def test_unknown_names_are_answered_with_the_closest() -> None:
    with pytest.raises(ValueError, match=r"model 'lama-3-7b' is not known; did you mean .*llama-3-70b.*\? Known are"):
        known_model("lama-3-7b")
    with pytest.raises(ValueError, match=r"GPU 'H2000' is not known; did you mean H200"):
        machine("H2000")
    with pytest.raises(ValueError, match=r"GPU 'xyz' is not known; known are A100-40GB, A100-80GB, H100"):
        machine("xyz")


def test_machines_are_data_sheets_times_what_is_reached() -> None:
    h200 = machine("h200")
    assert h200.memory_bytes == 141e9
    assert h200.memory_bandwidth == pytest.approx(4.8e12 * REACHED["memory"])
    assert h200.flops["bfloat16"] == pytest.approx(989e12 * REACHED["flops"])
    assert h200.link_bandwidth == pytest.approx(450e9 * REACHED["link"]) and h200.link_gpus == 8
    assert machine("A100") == machine("a100-80gb")
    assert machine("GB200").link_gpus == 72
    for name in NAMES:
        one = machine(name)
        assert one.flops["float32"] < one.flops["bfloat16"] <= one.flops["fp8"]
        assert one.network_bandwidth < one.link_bandwidth < one.memory_bandwidth
