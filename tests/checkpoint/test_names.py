"""The table of tensors against real models, and cutting and joining against each other."""

from dataclasses import replace

import pytest
import torch

from megatron_dcp.checkpoint.families import FAMILIES, Family
from megatron_dcp.checkpoint.families.transforms import QKV, GateUp
from megatron_dcp.checkpoint.names import fit_vocab, global_expert_name, join, shard
from megatron_dcp.model_config import MLAConfig, ModelConfig, MoEConfig
from megatron_dcp.model_tensors import TensorSpec, model_tensors, padded_vocab_size
from workers import run_on_ranks

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=64,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=10,
    vocab_size=100,
    padded_vocab_size=128,
    max_position_embeddings=512,
)
SHAPES = [
    CONFIG,
    replace(CONFIG, add_qkv_bias=True, untie_embeddings_and_output_weights=True),
    replace(CONFIG, qk_layernorm=True),
    replace(CONFIG, normalization="LayerNorm", add_bias_linear=True, swiglu=False, qk_layernorm=True),
]


def shapes_on_rank(rank: int, world: int, configs: list[ModelConfig]) -> list[dict[str, tuple[int, ...]]]:
    from megatron_dcp import parallel_state
    from megatron_dcp._mcore import build_model

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    pgs = parallel_state.get_process_group_collection()
    models = [build_model(config, pgs) for config in configs]
    return [{name: tuple(p.shape) for name, p in model.named_parameters()} for model in models]


@pytest.mark.mcore_line
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_table_is_that_of_megatrons_models(tp: int) -> None:
    for rank, shapes in enumerate(run_on_ranks(tp, shapes_on_rank, SHAPES)):
        for config, expected in zip(SHAPES, shapes, strict=True):
            specs = model_tensors(config)
            ours = {name: tuple(shard(torch.empty(s.shape), s, tp, rank).shape) for name, s in specs.items()}
            assert ours == expected


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "spec", [TensorSpec((24, 6), tp_dim=0), TensorSpec((6, 24), tp_dim=1), TensorSpec((24, 6), tp_dim=0, parts=2)]
)
def test_joined_shards_are_the_whole(spec: TensorSpec, tp: int) -> None:
    whole = torch.randn(spec.shape)
    assert torch.equal(join([shard(whole, spec, tp, rank) for rank in range(tp)], spec), whole)


def test_shards_of_a_gated_mlp_hold_both_halves() -> None:
    gate, up = torch.arange(8.0), torch.arange(8.0) + 100
    spec = TensorSpec((16,), tp_dim=0, parts=2)
    assert shard(torch.cat((gate, up)), spec, 4, 1).tolist() == [2, 3, 102, 103]


def test_qkv_rows_are_grouped_per_kv_head() -> None:
    """One row per head and dimension, named by what it is."""
    heads, groups, dim = 4, 2, 3
    config = replace(CONFIG, num_attention_heads=heads, num_query_groups=groups, kv_channels=dim)
    q = torch.tensor([100 + 10 * n + h for n in range(heads) for h in range(dim)])
    k = torch.tensor([200 + 10 * n + h for n in range(groups) for h in range(dim)])
    v = torch.tensor([300 + 10 * n + h for n in range(groups) for h in range(dim)])
    packed = QKV().pack([q, k, v], config)
    assert packed.tolist() == (
        [100, 101, 102, 110, 111, 112, 200, 201, 202, 300, 301, 302]
        + [120, 121, 122, 130, 131, 132, 210, 211, 212, 310, 311, 312]
    )
    assert all(torch.equal(a, b) for a, b in zip(QKV().unpack(packed, config), (q, k, v), strict=True))


def test_gate_comes_before_up() -> None:
    assert GateUp().pack([torch.zeros(2, 3), torch.ones(2, 3)], CONFIG)[:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_every_family_fills_its_whole_model(family: Family) -> None:
    moe = MoEConfig(
        num_experts=4,
        moe_layer_freq=(0, 1),
        moe_ffn_hidden_size=20,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias="mlp.router.expert_bias" in family.layer,
        moe_shared_expert_intermediate_size=40 if "mlp.shared_experts.linear_fc1.weight" in family.layer else None,
    )
    if "mlp.linear_fc1.weight" not in family.layer:
        moe = replace(moe, moe_layer_freq=(1, 1))
    for untied, q_lora_rank in ((False, None), (True, 24)):
        mla = MLAConfig(q_lora_rank=q_lora_rank, kv_lora_rank=28, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
        config = replace(
            CONFIG,
            add_qkv_bias=family.qkv_bias,
            qk_layernorm=family.qk_norm,
            add_bias_linear="self_attention.linear_proj.bias" in family.layer,
            softmax_type="learnable" if "self_attention.core_attention.softmax_offset" in family.layer else "vanilla",
            untie_embeddings_and_output_weights=untied,
            mla=mla if family.latent_attention else None,
            moe=moe if family.experts else None,
        )
        rows = family.rows(config)
        assert [row.megatron for row in rows] == list(model_tensors(config))
        slices = [(name, row.index) for row in rows for name in row.hf]
        assert len(set(slices)) == len(slices)
        assert not any("*" in name for name, _ in slices)


def test_experts_keep_their_global_numbers() -> None:
    assert global_expert_name("decoder.layers.3.mlp.experts.local_experts.2.linear_fc1.weight", 4) == (
        "decoder.layers.3.mlp.experts.local_experts.6.linear_fc1.weight"
    )
    assert global_expert_name("decoder.layers.3.mlp.router.weight", 4) == "decoder.layers.3.mlp.router.weight"


def test_padding_of_the_vocabulary() -> None:
    assert [padded_vocab_size(n) for n in (1, 128, 129, 151936)] == [128, 128, 256, 151936]
    assert padded_vocab_size(100, tp=3) == 384
    tensor = torch.ones(4, 2)
    assert fit_vocab(tensor, 4, 4) is tensor
    assert fit_vocab(tensor, 3, 6).sum(1).tolist() == [2, 2, 2, 0, 0, 0]
