"""Models saved from memory on several ranks, and what Megatron itself saves: other layouts, optimizer states."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dcp import parallel_state
from megatron_dcp.checkpoint import convert, load_model, load_tokenizer, open_source, read_config, save_model
from megatron_dcp.checkpoint.dist import DistSource
from megatron_dcp.checkpoint.save import _save_sharded
from megatron_dcp.model_config import MLAConfig
from models import MOE_FAMILIES, hf_tensors, tiny_model
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line


def groups(world: int, ep: int = 1) -> Any:
    if not parallel_state.is_initialized():
        sizes = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": world // ep}
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world, **sizes)
    return parallel_state.get_process_group_collection()


class Layout(torch.nn.Module):
    """A model that saves itself in another of Megatron's layouts, with the state of an optimizer if asked."""

    def __init__(self, model: Any, *, optimizer: bool, **metadata: Any) -> None:
        super().__init__()
        self.inner, self.config, self.metadata, self.optimizer = model, model.config, metadata, optimizer

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        state = {"model": self.inner.sharded_state_dict(metadata={**(metadata or {}), **self.metadata})}
        if self.optimizer:
            values = torch.arange(1000.0)
            state["optimizer"] = {
                "exp_avg": ShardedTensor.from_rank_offsets(
                    "optimizer.state.exp_avg.embedding.word_embeddings.weight", values, replica_id=dist.get_rank()
                ),
                "chained": ShardedTensor.from_rank_offsets(
                    "chained_0.optimizer.state.fp32_param.decoder.layers.x", values + 1, replica_id=dist.get_rank()
                ),
            }
        return state


def save_on_rank(rank: int, world: int, src: Path, dst: Path, keywords: dict[str, Any], ep: int = 1) -> None:
    pgs = groups(world, ep)
    model, config = load_model(src, pgs)
    save_model(model, config, dst, pg_collection=pgs, iteration=30, **keywords)
    assert dst.is_dir()


@pytest.mark.parametrize(("family", "tied", "tp"), [("llama", False, 1), ("qwen2", True, 2), ("qwen3", False, 2)])
def test_saved_model_is_the_one_that_was_loaded(family: str, tied: bool, tp: int, tmp_path: Path) -> None:
    original = tiny_model(family, tied=tied, tokenizer=True)
    run_on_ranks(tp, save_on_rank, original, tmp_path / "dist", {"tokenizer_dir": original})
    assert [p.name for p in tmp_path.iterdir()] == ["dist"]
    assert (tmp_path / "dist" / "latest_checkpointed_iteration.txt").read_text().strip() == "30"
    assert read_config(tmp_path / "dist") == read_config(original)
    assert load_tokenizer(tmp_path / "dist").eos_token_id == 256
    back = hf_tensors(convert(tmp_path / "dist", tmp_path / "hf", to="hf"))
    expected = hf_tensors(original)
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_saved_experts_are_those_that_were_loaded(family: str, tp: int, ep: int, tmp_path: Path) -> None:
    original = tiny_model(family)
    run_on_ranks(tp, save_on_rank, original, tmp_path / "dist", {}, ep)
    source, expected = open_source(tmp_path / "dist"), open_source(original)
    assert source.config == expected.config
    for name in expected.specs:
        assert torch.equal(source.read(name), expected.read(name)), name


def save_layout_on_rank(rank: int, world: int, src: Path, dst: Path, layout: dict[str, Any], ep: int = 1) -> None:
    pgs = groups(world, ep)
    model, config = load_model(src, pgs)
    save_model(model, config, dst, pg_collection=pgs)
    if layout.get("non_homogeneous_layers") is False:
        model.config.moe_layer_freq = 1  # as in a training where all layers have experts: they are stacked
    if rank == 0:  # keep the arguments, write the tensors anew
        common = (dst / "iter_0000001" / "common.pt").read_bytes()
        shutil.rmtree(dst / "iter_0000001")
        (dst / "iter_0000001").mkdir()
    dist.barrier()
    _save_sharded(Layout(model, **layout), dst / "iter_0000001", pgs)
    if rank == 0:
        (dst / "iter_0000001" / "common.pt").write_bytes(common)
    dist.barrier()


LAYOUTS = [
    {"optimizer": True},
    {"optimizer": False, "non_homogeneous_layers": True},
    {"optimizer": True, "singleton_local_shards": True},  # numbered layers, gate and up apart
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatrons_other_layouts_and_optimizer_states(layout: dict[str, Any], tmp_path: Path) -> None:
    original = tiny_model("qwen3")
    run_on_ranks(2, save_layout_on_rank, original, tmp_path / "dist", layout)
    source = open_source(tmp_path / "dist")
    assert isinstance(source, DistSource)
    keys = set(source._reader.metadata.state_dict_metadata)
    assert ("decoder.layers.1.mlp.linear_fc2.weight" in keys) == (len(layout) == 2)
    assert any(key.startswith("optimizer.") for key in keys) == layout["optimizer"]
    if layout["optimizer"]:
        wipe_optimizer(source, tmp_path / "dist" / "iter_0000001")
    expected = open_source(original)
    for name, spec in expected.specs.items():
        assert torch.equal(source.read(name), expected.read(name)), name
        for rank in range(2):  # the boxes that one rank reads
            assert torch.equal(source.read_shard(name, 2, rank), expected.read_shard(name, 2, rank)), (name, spec)


@pytest.mark.parametrize(
    ("family", "layout", "key"),
    [
        ("mixtral", {"non_homogeneous_layers": False}, "decoder.layers.mlp.experts.experts.linear_fc2.weight"),
        ("mixtral", {"singleton_local_shards": True}, "decoder.layers.1.mlp.experts.experts.7.linear_fc1.weight_v"),
        ("deepseek_v3", {}, "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"),
    ],
)
def test_megatrons_layouts_of_experts(family: str, layout: dict[str, Any], key: str, tmp_path: Path) -> None:
    original = tiny_model(family)
    arguments = (original, tmp_path / "dist", {"optimizer": True, **layout}, 2)
    run_on_ranks(2, save_layout_on_rank, *arguments)
    source, expected = open_source(tmp_path / "dist"), open_source(original)
    assert isinstance(source, DistSource) and key in source._reader.metadata.state_dict_metadata
    for name in expected.specs:
        assert torch.equal(source.read(name), expected.read(name)), name
        assert torch.equal(source.read_shard(name, 2, 1), expected.read_shard(name, 2, 1)), name


def wipe_optimizer(source: DistSource, directory: Path) -> None:
    """Overwrite the optimizer's bytes: whoever reads them fails."""
    wiped = 0
    for key, pieces in source._reader._pieces.items():
        if key.startswith(("optimizer.", "chained_")):
            for piece in pieces:
                with (directory / piece.relative_path).open("r+b") as file:
                    file.seek(piece.offset)
                    wiped += file.write(b"\xff" * piece.length)
    assert wiped > 2 * 4000


def test_common_state_inside_the_checkpoint(tmp_path: Path) -> None:
    """Megatron-Core 0.19 writes no common.pt."""
    run_on_ranks(1, save_common_inside, tiny_model("llama"), tmp_path / "dist")
    assert not (tmp_path / "dist" / "iter_0000001" / "common.pt").exists()
    assert read_config(tmp_path / "dist") == read_config(tiny_model("llama"))
    source = open_source(tmp_path / "dist")
    assert torch.equal(source.read("output_layer.weight"), open_source(tiny_model("llama")).read("output_layer.weight"))


def save_common_inside(rank: int, world: int, src: Path, dst: Path) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    pgs = groups(world)
    model, config = load_model(src, pgs)
    save_model(model, config, dst, pg_collection=pgs)
    iteration = dst / "iter_0000001"
    common = torch.load(iteration / "common.pt", weights_only=False)

    class WithCommon(Layout):
        def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
            state = super().sharded_state_dict(metadata)
            # 0.19 makes the object from what is not sharded, 0.16 takes it as it is.
            return {**state, **common, "common_state": ShardedObject("common_state", common, (1,), (0,))}

    shutil.rmtree(iteration)
    iteration.mkdir()
    _save_sharded(WithCommon(model, optimizer=False), iteration, pgs)
    (iteration / "common.pt").unlink(missing_ok=True)


def save_wrong(rank: int, world: int, src: Path, dst: Path, changes: dict[str, Any]) -> None:
    pgs = groups(world)
    model, config = load_model(src, pgs)
    save_model(model, replace(config, **changes), dst, pg_collection=pgs)


OTHER_MLA = MLAConfig(q_lora_rank=24, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)


def test_existing_name_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    for error in run_on_ranks(2, save_wrong, tiny_model("llama"), tmp_path / "dst", {}, expect_errors=True):
        assert isinstance(error, ValueError) and "exists already" in str(error)
    assert [p.name for p in tmp_path.iterdir()] == ["dst"]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"ffn_hidden_size": 64}, "ffn_hidden_size=64 is not the model's, which has 48"),
        ("mixtral", {"moe": None}, "num_moe_experts=None is not the model's, which has 8"),
        ("deepseek_v2", {"mla": OTHER_MLA}, "kv_lora_rank=32 is not the model's, which has 28"),
    ],
)
def test_foreign_shape_is_an_error_on_every_rank(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for error in run_on_ranks(2, save_wrong, tiny_model(family), tmp_path / "new", changes, expect_errors=True):
        assert isinstance(error, ValueError) and message in str(error)
    assert list(tmp_path.iterdir()) == []
