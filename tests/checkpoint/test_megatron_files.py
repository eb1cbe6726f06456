"""What can be wrong with a ``torch_dist`` checkpoint."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dcp.checkpoint import convert, open_source, read_config
from models import hf_tensors, tiny_model

ITERATION = "iter_0000001"


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    return convert(tiny_model("qwen3"), tmp_path / "dist", to="torch_dist")


def edit_common(root: Path, **args: Any) -> None:
    path = root / ITERATION / "common.pt"
    common = torch.load(path, weights_only=False)
    vars(common["args"]).update(args)
    torch.save(common, path)


def edit_metadata(root: Path, edit: Any) -> None:
    path = root / ITERATION / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


# --- torch_dist


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
@pytest.mark.parametrize("keep", [0, 10, -10])
def test_truncated_small_files(dist: Path, name: str, keep: int) -> None:
    path = dist / ITERATION / name
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"{name} is truncated or no"):
        open_source(dist)


@pytest.mark.parametrize("keep", [0, 1000, -1])
def test_truncated_tensors_are_noticed_before_any_is_read(dist: Path, keep: int) -> None:
    path = dist / ITERATION / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"__0_0\.distcp is truncated: it has \d+ bytes, its metadata asks for \d+"):
        open_source(dist)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("__0_0.distcp", "__0_0.distcp is missing"),
        ("common.pt", "common.pt is missing"),
        (".metadata", ".metadata is missing"),
        ("metadata.json", "no metadata.json, which Megatron writes last"),
    ],
)
def test_missing_files(dist: Path, name: str, message: str) -> None:
    (dist / ITERATION / name).unlink()
    with pytest.raises(ValueError, match=message):
        open_source(dist)


def test_garbage_in_a_tensor_is_an_error_when_it_is_read(dist: Path) -> None:
    path = dist / ITERATION / "__0_0.distcp"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(ValueError, match="embedding.word_embeddings.weight cannot be read"):
        open_source(dist).read("embedding.word_embeddings.weight")


def test_missing_and_extra_tensors(dist: Path) -> None:
    edit_common(dist, qk_layernorm=False)
    with pytest.raises(ValueError, match=r"holds decoder\.layers\.0\.self_attention\.[qk]_layernorm.*and 1 more"):
        open_source(dist)
    edit_common(dist, qk_layernorm=True, add_qkv_bias=True)
    with pytest.raises(ValueError, match=r"lacks decoder\.layers\.0\.self_attention\.linear_qkv\.bias"):
        open_source(dist)
    edit_common(dist, add_qkv_bias=False)
    assert open_source(dist).config == read_config(tiny_model("qwen3"))


def test_scalar_that_nobody_knows(dist: Path) -> None:
    def add_scale(metadata: Any) -> None:
        stored = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
        scalar = type(stored)(properties=stored.properties, size=torch.Size([]), chunks=[])
        metadata.state_dict_metadata["decoder.final_layernorm.scale"] = scalar

    edit_metadata(dist, add_scale)
    with pytest.raises(ValueError, match=r"holds decoder\.final_layernorm\.scale"):
        open_source(dist)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"ffn_hidden_size": 64}, r"linear_fc1\.weight.*\(96, 32\).*\(128, 32\)"),
        ({"num_layers": 3}, r"has shape \(2, .*asks for 3 layers"),
        ({"vocab_size": 200, "padded_vocab_size": 256}, r"word_embeddings\.weight.*\(128, 32\).*at least 200 rows"),
        ({"num_query_groups": 4}, r"linear_qkv\.weight"),
    ],
)
def test_arguments_of_another_model(dist: Path, args: dict[str, Any], message: str) -> None:
    edit_common(dist, **args)
    with pytest.raises(ValueError, match=message):
        open_source(dist)


def test_padding_of_another_tensor_parallel_size_is_no_error(dist: Path) -> None:
    edit_common(dist, padded_vocab_size=104)
    source = open_source(dist)
    assert source.read("output_layer.weight").shape[0] == 104
    source.repad(384)
    assert source.read_shard("output_layer.weight", 3, 2).shape[0] == 128
    assert torch.equal(source.read("output_layer.weight")[:100], hf_tensors(tiny_model("qwen3"))["lm_head.weight"])


def test_metadata_with_a_hole(dist: Path) -> None:
    def forget_a_layer(metadata: Any) -> None:
        metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()

    edit_metadata(dist, forget_a_layer)
    source = open_source(dist)
    source.read("decoder.layers.0.mlp.linear_fc2.weight")
    with pytest.raises(ValueError, match="does not say where all of decoder.layers.mlp.linear_fc2.weight lies"):
        source.read("decoder.layers.1.mlp.linear_fc2.weight")


def test_metadata_that_points_elsewhere(dist: Path) -> None:
    def outside(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../../secret"

    edit_metadata(dist, outside)
    with pytest.raises(ValueError, match="'../../secret', which is not a file beside it"):
        open_source(dist)


def test_keys_with_a_prefix(dist: Path) -> None:
    def prefix(metadata: Any) -> None:
        metadata.state_dict_metadata = {f"model.{k}": v for k, v in metadata.state_dict_metadata.items()}
        for index in list(metadata.storage_data):
            info = metadata.storage_data.pop(index)
            metadata.storage_data[type(index)(f"model.{index.fqn}", index.offset, index.index)] = info

    edit_metadata(dist, prefix)
    source = open_source(dist)
    expected = open_source(tiny_model("qwen3"))
    assert all(torch.equal(source.read(name), expected.read(name)) for name in expected.specs)


def test_another_backend(dist: Path) -> None:
    (dist / ITERATION / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(ValueError, match="sharded_backend='zarr'.*supported is 'torch_dist'"):
        open_source(dist)


def test_the_optimizers_files_may_be_absent(dist: Path) -> None:
    def add_optimizer(metadata: Any) -> None:
        weight = "decoder.final_layernorm.weight"
        ((index, info),) = [(k, v) for k, v in metadata.storage_data.items() if k.fqn == weight]
        for key in ("optimizer.state.exp_avg." + weight, "chained_0.optimizer.state.fp32_param." + weight):
            metadata.state_dict_metadata[key] = metadata.state_dict_metadata[weight]
            moved = replace(info, relative_path="__5_0.distcp")
            metadata.storage_data[type(index)(key, index.offset, index.index)] = moved

    edit_metadata(dist, add_optimizer)
    assert not (dist / ITERATION / "__5_0.distcp").exists()
    source, expected = open_source(dist), open_source(tiny_model("qwen3"))
    assert all(torch.equal(source.read(name), expected.read(name)) for name in expected.specs)


def test_newer_than_what_is_known(dist: Path) -> None:
    path = dist / ITERATION / "metadata.json"
    kept = path.read_text()
    path.write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 2}))
    with pytest.raises(ValueError, match="sharded_backend_version=2; supported is 1: the checkpoint is newer"):
        open_source(dist)
    path.write_text(kept)
    common = torch.load(dist / ITERATION / "common.pt", weights_only=False)
    for version, message in ((4.0, "newer than 3.0.*update megatron-dcp"), (2.0, "order of query, key and value")):
        torch.save(common | {"checkpoint_version": version}, dist / ITERATION / "common.pt")
        for read in (open_source, read_config):
            with pytest.raises(ValueError, match=f"checkpoint_version={version}.*{message}"):
                read(dist)
    torch.save(common, dist / ITERATION / "common.pt")
    path = dist / ITERATION / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"TensorStorageMetadata", b"TensorStorageMetadat2"))
    with pytest.raises(ValueError, match="Metadat2, which torch .* does not have: the checkpoint is newer"):
        open_source(dist)


def test_checkpoint_that_does_not_say_its_shape(dist: Path) -> None:
    path = dist / ITERATION / "common.pt"
    common = torch.load(path, weights_only=False)
    del common["args"]
    torch.save(common, path)
    for read in (open_source, read_config):
        with pytest.raises(ValueError, match="has no 'args'.*save_model"):
            read(dist)
