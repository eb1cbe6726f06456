"""Pipeline stages: each loads and saves its own layers, whatever the format; what cannot be split is an error."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dcp import parallel_state
from megatron_dcp.checkpoint import convert, load_model, open_source, read_config, save_model
from megatron_dcp.checkpoint.names import shard, split_layer_name
from models import tiny_model
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line
LAYERS = 4
FORMATS = ("hf", "torch_dist", "legacy")


def groups(**sizes: int) -> Any:
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(**{"pipeline_model_parallel_size": 2, **sizes})
    return parallel_state.get_process_group_collection()


def load_on_rank(rank: int, world: int, paths: list[Path], sizes: dict[str, int]) -> list[list[str]]:
    """Of every checkpoint: names of this rank's tensors, after comparing them with what the checkpoint holds."""
    pgs, names = groups(**sizes), []
    first = pgs.pp.rank() * LAYERS // pgs.pp.size()
    for path in paths:
        model, _ = load_model(path, pgs)
        source = open_source(path)
        state = {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
        for name, value in state.items():
            layer, rest = split_layer_name(name)
            whole = name if layer is None else f"decoder.layers.{layer + first}.{rest}"
            if whole not in source.specs:
                assert whole == "output_layer.weight", "tied embeddings: a copy on the last stage"
                whole = "embedding.word_embeddings.weight"
            want = shard(source.read(whole), source.specs[whole], pgs.tp.size(), pgs.tp.rank())
            assert torch.equal(value, want), name
        names.append(sorted(state))
    return names


def expected_names(path: Path, stage: int, stages: int, tied: bool) -> list[str]:
    own, names = LAYERS // stages, []
    for name in open_source(path).specs:
        layer, rest = split_layer_name(name)
        if layer is not None and layer // own == stage:
            names.append(f"decoder.layers.{layer % own}.{rest}")
        if layer is None and stage == (0 if name.startswith("embedding") else stages - 1):
            names.append(name)
    if tied and stage == stages - 1:
        names.append("output_layer.weight")
    return sorted(names)


@pytest.mark.parametrize(("world", "sizes"), [(2, {}), (4, {"tensor_model_parallel_size": 2}), (4, {"pp": 4})])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("deepseek_v3", False)])
def test_a_stage_has_its_own_layers(family: str, tied: bool, world: int, sizes: dict[str, int], tmp_path: Path) -> None:
    original, stages = tiny_model(family, layers=LAYERS, tied=tied), sizes.get("pp", 2)
    paths = [original if to == "hf" else convert(original, tmp_path / to, to=to) for to in FORMATS]
    sizes = {"pipeline_model_parallel_size": stages, **{k: v for k, v in sizes.items() if k != "pp"}}
    for rank, names in enumerate(run_on_ranks(world, load_on_rank, paths, sizes)):
        expected = expected_names(original, rank * stages // world, stages, tied)
        assert names == [expected] * len(paths)


def save_on_rank(rank: int, world: int, src: Path, dst: Path, sizes: dict[str, int]) -> None:
    pgs = groups(**sizes)
    model, config = load_model(src, pgs)
    save_model(model, config, dst, pg_collection=pgs)


@pytest.mark.parametrize(("world", "sizes"), [(2, {}), (4, {"tensor_model_parallel_size": 2})])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("deepseek_v3", False)])
def test_stages_save_the_model_that_they_loaded(
    family: str, tied: bool, world: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    original = tiny_model(family, layers=LAYERS, tied=tied)
    run_on_ranks(world, save_on_rank, original, tmp_path / "dist", sizes)
    source, expected = open_source(tmp_path / "dist"), open_source(original)
    assert read_config(tmp_path / "dist").num_layers == LAYERS
    assert source.specs.keys() == expected.specs.keys()
    for name, spec in expected.specs.items():
        rows = expected.config.vocab_size if spec.vocab else None  # tp pads it further
        assert torch.equal(source.read(name)[:rows], expected.read(name)[:rows]), name


def load_only(rank: int, world: int, paths: list[Path], sizes: dict[str, int]) -> None:
    load_model(paths[rank % len(paths)], groups(**sizes))


def test_layers_that_the_stages_do_not_divide() -> None:
    arguments = [tiny_model("llama", layers=4)], {"pipeline_model_parallel_size": 3}
    for error in run_on_ranks(3, load_only, *arguments, expect_errors=True):
        assert isinstance(error, ValueError)
        assert "pipeline_model_parallel_size=3 does not divide num_layers=4; use one of 1, 2, 4" in str(error)


def test_an_error_on_one_stage_is_everybodys(tmp_path: Path) -> None:
    good, bad = tiny_model("llama", layers=4), shutil.copytree(tiny_model("llama", layers=4), tmp_path / "bad")
    (bad / "model.safetensors").unlink()
    sizes = {"tensor_model_parallel_size": 2}
    for error in run_on_ranks(4, load_only, [good, good, good, bad], sizes, expect_errors=True):
        assert isinstance(error, ValueError) and "neither model.safetensors" in str(error)
