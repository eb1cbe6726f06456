"""Loaded models on 1 to 4 tensor parallel ranks: the right shards, the logits of ``transformers``, errors on all."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import assert_logits, groups, load_on_rank, wrong_tensors

from megatron_dcp.checkpoint import convert, load_model, open_source
from models import FAMILIES, LLAMA3, MOE_FAMILIES, YARN, tiny_model
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_are_those_of_transformers(tp: int, tmp_path: Path) -> None:
    originals = [tiny_model(family, tied=family == "qwen2") for family in FAMILIES]
    originals.append(tiny_model("llama", rope_scaling=LLAMA3, rope_theta=50000.0))
    jobs = [(convert(original, tmp_path / f"{number}"), True) for number, original in enumerate(originals)]
    for results in run_on_ranks(tp, load_on_rank, jobs, timeout=300):
        for original, (logits, wrong) in zip(originals, results, strict=True):
            assert wrong == []
            assert_logits(logits, original)


LATENT_AND_EXPERTS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"layers": 3, "norm_topk_prob": False, "mlp_only_layers": (), "decoder_sparse_step": 2}),
    ("deepseek_v2", {"rope_scaling": YARN}),
    ("deepseek_v2", {"q_lora_rank": None, "rope_theta": 500.0}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_scaling": YARN, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}),
]


def test_logits_of_latent_attention_and_experts_are_those_of_transformers(tmp_path: Path) -> None:
    originals = [tiny_model(family, **keys) for family, keys in LATENT_AND_EXPERTS]
    jobs = [(convert(original, tmp_path / f"{number}"), True) for number, original in enumerate(originals)]
    (results,) = run_on_ranks(1, load_on_rank, jobs, timeout=300)
    for original, (logits, wrong) in zip(originals, results, strict=True):
        assert wrong == []
        assert_logits(logits, original, 2e-5)


def sizes(tp: int, ep: int, expert_tp: int) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": expert_tp,
    }


@pytest.mark.parametrize(("world", "tp", "ep", "expert_tp"), [(2, 2, 1, 2), (2, 1, 2, 1), (2, 2, 2, 1), (4, 2, 2, 2)])
def test_every_rank_gets_its_experts(world: int, tp: int, ep: int, expert_tp: int, tmp_path: Path) -> None:
    jobs = [(convert(tiny_model(family), tmp_path / family), False) for family in MOE_FAMILIES]
    jobs += [(tiny_model("deepseek_v3"), False)]
    for results in run_on_ranks(world, load_on_rank, jobs, sizes(tp, ep, expert_tp), timeout=300):
        assert [wrong for _, wrong in results] == [[]] * len(jobs)


# With 2 KV heads, tp 4 cuts through the rows of a KV group.
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_format_gives_every_rank_its_shard(tp: int, tmp_path: Path) -> None:
    original = tiny_model("qwen2")
    jobs = [(original, False)]
    jobs += [(convert(original, tmp_path / to, to=to), False) for to in ("torch_dist", "legacy")]
    for results in run_on_ranks(tp, load_on_rank, jobs, timeout=300):
        assert [wrong for _, wrong in results] == [[], [], []]


def test_vocabulary_is_padded_further_where_tp_does_not_divide_it(tmp_path: Path) -> None:
    original = tiny_model("llama", hidden=48, heads=6, kv_heads=3)
    paths = [original, convert(original, tmp_path / "dist"), convert(original, tmp_path / "legacy", to="legacy")]
    for results in run_on_ranks(3, load_on_rank, [(path, path != original) for path in paths], timeout=300):
        assert [wrong for _, wrong in results] == [[], [], []]
        for logits, _ in results[1:]:
            assert_logits(logits, original)


def dtypes_on_rank(rank: int, world: int, path: Path) -> set[torch.dtype]:
    model, _ = load_model(path, groups(world), dtype=torch.bfloat16)
    source = open_source(path)
    assert all(torch.equal(p, source.read(name).bfloat16()) for name, p in model.named_parameters())
    biases = {name: b for name, b in model.named_buffers() if name.endswith("expert_bias")}
    assert all(torch.equal(b, source.read(name)) for name, b in biases.items())
    return {p.dtype for p in model.parameters()} | {b.dtype for b in biases.values()}


def test_dtype_is_the_callers_but_for_the_biases_that_choose_experts(tmp_path: Path) -> None:
    assert run_on_ranks(1, dtypes_on_rank, tiny_model("qwen3")) == [{torch.bfloat16}]
    assert run_on_ranks(1, dtypes_on_rank, tiny_model("deepseek_v3")) == [{torch.bfloat16, torch.float32}]


def plain_megatron_load(rank: int, world: int, path: Path, strict: str, sizes: dict[str, int]) -> list[str]:
    """Load by Megatron-Core alone into a model full of NaN; the tensors that came out wrong."""
    from megatron.core import dist_checkpointing

    from megatron_dcp._mcore import build_model

    source, pgs = open_source(path), groups(world, **sizes)
    model = build_model(source.config, pgs)
    for tensor in (*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("expert_bias"))):
        tensor.data.fill_(float("nan"))
    state = model.sharded_state_dict()
    loaded = dist_checkpointing.load(state, str(path / "iter_0000001"), strict=strict)
    assert loaded["args"].num_layers == source.config.num_layers and loaded["iteration"] == 1
    tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    model.load_state_dict(tensors, strict=False)
    return wrong_tensors(model, source, pgs)


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_core_alone_loads_what_convert_wrote(tp: int, tmp_path: Path) -> None:
    for family in FAMILIES:
        path = convert(tiny_model(family, tied=family == "qwen3"), tmp_path / family)
        assert run_on_ranks(tp, plain_megatron_load, path, "raise_unexpected", {}) == [[]] * tp


@pytest.mark.parametrize(("world", "tp", "ep"), [(1, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)])
def test_megatron_core_alone_loads_experts(world: int, tp: int, ep: int, tmp_path: Path) -> None:
    for family in MOE_FAMILIES:
        path = convert(tiny_model(family), tmp_path / family)
        arguments = (path, "raise_unexpected", sizes(tp, ep, 1 if ep == 2 else tp))
        assert run_on_ranks(world, plain_megatron_load, *arguments) == [[]] * world


# --- errors


def load_only(rank: int, world: int, paths: list[Path], sizes: dict[str, Any]) -> None:
    load_model(paths[rank % len(paths)], groups(world, **sizes))


def test_an_unsound_checkpoint_is_an_error_on_every_rank(tmp_path: Path) -> None:
    path = convert(tiny_model("llama"), tmp_path / "dist")
    data = next(path.rglob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-100])
    for error in run_on_ranks(2, load_only, [path], {}, expect_errors=True):
        assert isinstance(error, ValueError) and "__0_0.distcp is truncated" in str(error)


@pytest.mark.parametrize("sizes", [{}, {"tensor_model_parallel_size": 1, "decode_context_parallel_size": 2}])
def test_one_ranks_error_is_everybodys(sizes: dict[str, Any], tmp_path: Path) -> None:
    good, bad = tiny_model("llama"), shutil.copytree(tiny_model("llama"), tmp_path / "bad")
    (bad / "model.safetensors").unlink()
    errors = run_on_ranks(2, load_only, [good, bad], sizes, expect_errors=True)
    assert all(isinstance(error, ValueError) and "neither model.safetensors" in str(error) for error in errors)
    assert "rank 1" in str(errors[0])


def test_ranks_that_see_different_models_notice(tmp_path: Path) -> None:
    errors = run_on_ranks(2, load_only, [tiny_model("llama"), tiny_model("llama", layers=1)], {}, expect_errors=True)
    assert all(isinstance(error, ValueError) and "the shape of the model" in str(error) for error in errors)


def test_tensor_parallel_size_that_does_not_fit() -> None:
    for error in run_on_ranks(3, load_only, [tiny_model("llama")], {}, expect_errors=True):
        assert isinstance(error, ValueError) and "tensor_model_parallel_size=3 does not fit" in str(error)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"expert_model_parallel_size": 3}, "expert_model_parallel_size=3 does not divide num_experts=8; use one of 1"),
        (
            {"expert_tensor_parallel_size": 3},
            "expert_tensor_parallel_size=3 does not divide moe_ffn_hidden_size=20",
        ),
    ],
)
def test_expert_parallel_size_that_does_not_fit(sizes: dict[str, Any], message: str) -> None:
    sizes = {"tensor_model_parallel_size": 1, **sizes}
    for error in run_on_ranks(3, load_only, [tiny_model("qwen3_moe")], sizes, expect_errors=True):
        assert isinstance(error, ValueError) and message in str(error)


def test_ranks_that_share_experts_fail_together(tmp_path: Path) -> None:
    good, bad = tiny_model("mixtral"), shutil.copytree(tiny_model("mixtral"), tmp_path / "bad")
    (bad / "model.safetensors").unlink()
    arguments = ([good, bad], sizes(1, 2, 1))
    for error in run_on_ranks(2, load_only, *arguments, expect_errors=True):
        assert isinstance(error, ValueError) and "neither model.safetensors" in str(error)
