"""Legacy files of tensor parallel ranks as Megatron-LM writes them, and what can be wrong with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dcp.checkpoint import convert, open_source
from megatron_dcp.checkpoint.names import fused_name, shard, split_layer_name
from models import hf_tensors, tiny_model

ITERATION = "iter_0000001"


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    return convert(tiny_model("qwen2"), tmp_path / "legacy", to="legacy")


def rank_file(root: Path, rank: int = 0) -> Path:
    return root / ITERATION / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"


FUSED = {"self_attention.linear_qkv", "mlp.linear_fc1"}


def split_legacy(root: Path, tp: int, *, fused: bool = False, **args: Any) -> None:
    """Rewrite a legacy checkpoint as ``tp`` ranks would have saved it; ``fused``: with TransformerEngine's names."""
    source = open_source(root)
    tensors = {name: tensor.clone() for name, tensor in source.tensors()}  # its file, which is mapped, is overwritten
    state = torch.load(rank_file(root), weights_only=False)
    vars(state["args"]).update({"tensor_model_parallel_size": tp, **args})
    for rank in range(tp):
        model: dict[str, Any] = {}
        for name, spec in source.specs.items():
            layer, rest = split_layer_name(name)
            saved = f"decoder.layers.{layer}.{fused_name(rest, FUSED)}" if fused and layer is not None else name
            model[saved] = shard(tensors[name], spec, tp, rank).clone()
            if fused:
                model[saved.rpartition(".")[0] + "._extra_state"] = torch.zeros(3, dtype=torch.uint8)
        rank_file(root, rank).parent.mkdir(exist_ok=True)
        torch.save({**state, "model": model, "optimizer": {"exp_avg": torch.zeros(5)}}, rank_file(root, rank))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_legacy_of_any_tensor_parallel_size(legacy: Path, tmp_path: Path, tp: int, fused: bool) -> None:
    split_legacy(legacy, tp, fused=fused)
    if fused:
        assert any("layer_norm_weight" in name for name in torch.load(rank_file(legacy), weights_only=False)["model"])
    expected = hf_tensors(tiny_model("qwen2"))
    back = hf_tensors(convert(legacy, tmp_path / "hf", to="hf"))
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)


def edit_legacy(root: Path, edit: Any) -> None:
    state = torch.load(rank_file(root), weights_only=False)
    edit(state)
    torch.save(state, rank_file(root))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s["model"].pop("decoder.layers.1.mlp.linear_fc2.weight"), r"lacks decoder\.layers\.1\.mlp"),
        (lambda s: s["model"].update({"decoder.layers.0.mlp.router.weight": torch.ones(2)}), "holds .*router"),
        (lambda s: s["model"].update({"decoder.final_layernorm.weight": torch.ones(3)}), r"\(3,\).*\(32,\)"),
        (lambda s: s["model"].update({7: torch.ones(2)}), "cannot be read: 7 among its tensors is no name"),
        (
            lambda s: s["model"].update({"decoder.final_layernorm.weight": torch.ones(32, dtype=torch.int8)}),
            r"decoder\.final_layernorm\.weight in .* is stored as torch\.int8; supported are .*: cast it first",
        ),
        (lambda s: s.pop("args"), "has no 'args'"),
        (lambda s: s.update(checkpoint_version=1.0), "checkpoint_version=1.0.*load and save it once"),
        (lambda s: s.update(checkpoint_version=4.0), "checkpoint_version=4.0, which is newer than 3.0.*update"),
        (lambda s: vars(s["args"]).update(num_layers=3), "hold 2 layers together, but its args ask for 3"),
        (lambda s: s.pop("model"), "no 'model' in it"),
        (lambda s: s.update(model1=s.pop("model"), model0={}), r"model0 in .* lacks embedding|hold 2 layers"),
        (lambda s: s.update(model={"language_model": {}}), "before Megatron-Core"),
        (
            lambda s: vars(s["args"]).update(tensor_model_parallel_size=2),
            r"mp_rank_01/model_optim_rng\.pt is missing: the checkpoint, saved with tp 2",
        ),
    ],
)
def test_unsound_legacy(legacy: Path, edit: Any, message: str) -> None:
    edit_legacy(legacy, edit)
    with pytest.raises(ValueError, match=message):
        open_source(legacy)


@pytest.mark.parametrize("keep", [0, 100, -100])
def test_truncated_legacy(legacy: Path, keep: int) -> None:
    rank_file(legacy).write_bytes(rank_file(legacy).read_bytes()[:keep])
    with pytest.raises(ValueError, match="model_optim_rng.pt is truncated or not a torch file"):
        open_source(legacy)


def test_legacy_from_before_zip_files(legacy: Path) -> None:
    state = torch.load(rank_file(legacy), weights_only=False)
    torch.save(state, rank_file(legacy), _use_new_zipfile_serialization=False)
    expected = open_source(tiny_model("qwen2"))
    source = open_source(legacy)
    assert all(torch.equal(source.read(name), expected.read(name)) for name in expected.specs)
