"""Legacy files of many ranks: cut for any sizes, loaded and saved by Megatron's own models, stages of any length."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dcp import parallel_state
from megatron_dcp.checkpoint import convert, load_model, open_source
from megatron_dcp.checkpoint.names import split_layer_name
from models import hf_tensors, tiny_model
from workers import run_on_ranks

ITERATION = "iter_0000001"
FILE = "model_optim_rng.pt"


def sizes_of(tp: int = 1, pp: int = 1, ep: int = 1, expert_tp: int | None = None) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": expert_tp or tp,
    }


def directories(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ITERATION).iterdir())


def assert_same(root: Path, original: Path) -> None:
    """All tensors of ``root`` are those of the Hugging Face model ``original``, bit by bit, whatever the padding."""
    source, expected = open_source(root), open_source(original)
    assert source.specs.keys() == expected.specs.keys()
    for name, spec in expected.specs.items():
        rows = expected.config.vocab_size if spec.vocab else None
        one, other = source.read(name), expected.read(name)
        assert one.dtype == other.dtype and torch.equal(one[:rows], other[:rows]), name


@pytest.mark.parametrize(
    ("family", "tied", "sizes", "names"),
    [
        ("llama", False, sizes_of(2, 2), ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]),
        ("qwen2", True, sizes_of(1, 2), ["mp_rank_00_000", "mp_rank_00_001"]),
        ("qwen3", False, sizes_of(4), ["mp_rank_00", "mp_rank_01", "mp_rank_02", "mp_rank_03"]),
        ("mixtral", False, sizes_of(1, 1, 4), [f"mp_rank_00_{ep:03d}" for ep in range(4)]),
        ("qwen3_moe", False, sizes_of(2, 1, 2, 1), ["mp_rank_00_000", "mp_rank_01_001"]),
        (
            "deepseek_v3",
            False,
            sizes_of(2, 2, 2),
            [f"mp_rank_{tp:02d}_{pp:03d}_{ep:03d}" for tp in (0, 1) for pp in (0, 1) for ep in (0, 1)],
        ),
    ],
)
def test_there_and_back_at_any_size(
    family: str, tied: bool, sizes: dict[str, int], names: list[str], tmp_path: Path
) -> None:
    original = tiny_model(family, layers=4, tied=tied)
    path = convert(original, tmp_path / "legacy", to="legacy", **sizes)
    assert directories(path) == names
    for name in names:
        state = torch.load(path / ITERATION / name / FILE, weights_only=False)
        assert {key: getattr(state["args"], key) for key in sizes} == sizes
        assert state["args"].padded_vocab_size == 128 * sizes["tensor_model_parallel_size"]
    back, expected = hf_tensors(convert(path, tmp_path / "hf", to="hf")), hf_tensors(original)
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)
    assert_same(convert(path, tmp_path / "dist", to="torch_dist"), original)
    again = convert(path, tmp_path / "again", to="legacy")  # and to other sizes
    assert directories(again) == ["mp_rank_00"]
    assert_same(again, original)


def groups(sizes: dict[str, int]) -> Any:
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(**sizes)
    return parallel_state.get_process_group_collection()


def load_and_save_on_rank(rank: int, world: int, src: Path, new: Path, sizes: dict[str, int]) -> str:
    """Load this rank's file into a model of Megatron's, which ends up as the model that the loader makes of it; save
    it as Megatron-LM does. Returns the file's directory."""
    from megatron_dcp._mcore import build_model

    pgs = groups(sizes)
    numbers = f"{pgs.tp.rank():02d}"
    for group, digits in ((pgs.pp, 3), (pgs.ep, 3)):
        numbers += f"_{group.rank():0{digits}d}" if group.size() > 1 else ""
    state = torch.load(src / ITERATION / f"mp_rank_{numbers}" / FILE, weights_only=False)
    model = build_model(open_source(src).config, pgs)
    assert model.load_state_dict(state["model"], strict=True) is not None
    extra = {name for name in model.state_dict() if "_extra_state" in name}
    assert state["model"].keys() - extra == model.state_dict().keys() - extra
    assert {name for name in state["model"] if "_extra_state" in name} <= extra
    loaded, _ = load_model(src, pgs)
    for name, tensor in loaded.state_dict().items():
        assert name in extra or torch.equal(tensor, model.state_dict()[name]), name
    file = new / ITERATION / f"mp_rank_{numbers}" / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    if pgs.dp.rank() == 0 or pgs.expt_dp.rank() == 0:
        torch.save({**state, "model": model.state_dict(), "optimizer": {"exp_avg": torch.zeros(5)}}, file)
    return file.parent.name


@pytest.mark.mcore_line
@pytest.mark.parametrize(
    ("family", "tied", "sizes"),
    [
        ("qwen2", False, sizes_of(2, 2)),
        ("llama", True, sizes_of(2, 2)),
        ("mixtral", False, sizes_of(2, 2, 2, 1)),
        ("gpt_oss", False, sizes_of(2, 2, 2, 1)),
        ("qwen3_moe", False, sizes_of(2, 1, 2)),
        ("deepseek_v3", False, sizes_of(2, 1, 2)),
    ],
)
def test_megatrons_models_load_and_save_the_files(
    family: str, tied: bool, sizes: dict[str, int], tmp_path: Path
) -> None:
    original = tiny_model(family, layers=4, tied=tied)
    path = convert(original, tmp_path / "legacy", to="legacy", **sizes)
    names = run_on_ranks(4, load_and_save_on_rank, path, tmp_path / "new", sizes, timeout=300)
    assert sorted(set(names)) == directories(path) == directories(tmp_path / "new")
    assert_same(tmp_path / "new" / ITERATION, original)


def write_stages(original: Path, root: Path, stages: list[list[range]]) -> None:
    """Files of pipeline stages that hold these layers: by stage and virtual stage."""
    source = open_source(original)
    whole = convert(original, root, to="legacy") / ITERATION / "mp_rank_00"
    state = torch.load(whole / FILE, weights_only=False)
    shutil.rmtree(whole)
    vars(state["args"]).update(pipeline_model_parallel_size=len(stages))
    del state["model"]
    for stage, of_virtual in enumerate(stages):
        models = []
        for number, layers in enumerate(of_virtual):
            models.append({})
            for name in source.specs:
                layer, rest = split_layer_name(name)
                first = name.startswith("embedding") and (stage, number) == (0, 0)
                last = (stage, number) == (len(stages) - 1, len(of_virtual) - 1)
                if layer in layers:
                    models[-1][f"decoder.layers.{layer - layers.start}.{rest}"] = source.read(name)
                elif layer is None and (first or last and not name.startswith("embedding")):
                    models[-1][name] = source.read(name)
        file = root / ITERATION / f"mp_rank_00_{stage:03d}" / FILE
        file.parent.mkdir()
        keys = ["model"] if len(models) == 1 else [f"model{number}" for number in range(len(models))]
        torch.save({**state, **dict(zip(keys, models, strict=True))}, file)


@pytest.mark.parametrize(
    "stages",
    [
        [[range(0, 3)], [range(3, 4)]],  # stages of different lengths
        [[range(0, 1), range(2, 3)], [range(1, 2), range(3, 4)]],  # two virtual stages each
        [[range(0, 0)], [range(0, 4)]],  # the embedding alone
    ],
)
def test_stages_of_any_length_and_virtual_ones(stages: list[list[range]], tmp_path: Path) -> None:
    original = tiny_model("qwen3", layers=4)
    write_stages(original, tmp_path / "legacy", stages)
    assert_same(tmp_path / "legacy", original)
    (tmp_path / "legacy" / ITERATION / "mp_rank_00_001" / FILE).unlink()
    with pytest.raises(ValueError, match=r"mp_rank_00_001/model_optim_rng\.pt is missing.* saved with tp 1, pp 2"):
        open_source(tmp_path / "legacy")


@pytest.mark.parametrize("expert_tp", [1, 2])
def test_experts_of_grouped_layers(expert_tp: int, tmp_path: Path) -> None:
    original = tiny_model("mixtral")
    path = convert(original, tmp_path / "legacy", to="legacy", **sizes_of(2, 1, 2, expert_tp))
    for file in (path / ITERATION).glob("*/*.pt"):
        state = torch.load(file, weights_only=False)
        old = {name: value for name, value in state["model"].items() if "local_experts" in name and value is not None}
        for name, value in old.items():
            layer, expert, module = name.replace(".weight", "").split(".")[2], *name.split(".")[6:8]
            state["model"][f"decoder.layers.{layer}.mlp.experts.{module}.weight{expert}"] = value
            del state["model"][name]
        assert len(old) == 2 * 4 * 2
        torch.save(state, file)
    assert_same(path, original)


def test_ranks_that_are_not_there_or_too_many(tmp_path: Path) -> None:
    path = convert(tiny_model("mixtral"), tmp_path / "legacy", to="legacy", **sizes_of(1, 2, 2))
    assert_same(path, tiny_model("mixtral"))
    lost = path / ITERATION / "mp_rank_00_001_001"
    lost.rename(tmp_path / "lost")
    with pytest.raises(ValueError, match=r"mp_rank_00_001_001/model_optim_rng\.pt is missing.*tp 1, pp 2, ep 2"):
        open_source(path)
    (tmp_path / "lost").rename(lost)
    lost.with_name("mp_rank_01_000_000").mkdir()
    with pytest.raises(ValueError, match="holds mp_rank_01_000_000, which a checkpoint saved with tp 1, pp 2, ep 2"):
        open_source(path)
    lost.with_name("mp_rank_01_000_000").rename(lost.with_name("mp_rank_old"))
    with pytest.raises(ValueError, match="mp_rank_old is not the directory of a rank as Megatron names them"):
        open_source(path)


def test_ranks_that_disagree(tmp_path: Path) -> None:
    path = convert(tiny_model("llama"), tmp_path / "legacy", to="legacy", **sizes_of(2))

    def cut(state: dict[str, Any]) -> None:
        state["model"]["output_layer.weight"] = state["model"]["output_layer.weight"][:-1].clone()

    file = path / ITERATION / "mp_rank_01" / FILE
    state = torch.load(file, weights_only=False)
    cut(state)
    torch.save(state, file)
    with pytest.raises(
        ValueError, match=r"output_layer\.weight in .*mp_rank_01.* has shape \(127, 32\), .*\(128, 32\)"
    ):
        open_source(path)


@pytest.mark.parametrize(
    ("to", "arguments", "message"),
    [
        ("torch_dist", {"tensor_model_parallel_size": 2}, "loaded at any tensor, pipeline and expert parallel size"),
        ("hf", {"pipeline_model_parallel_size": 2}, "says nothing for to='hf'"),
        ("legacy", {"max_shard_bytes": 10}, "max_shard_bytes=10 is for to='hf'"),
        ("legacy", {"tensor_model_parallel_size": 0}, "tensor_model_parallel_size=0 is below 1"),
        ("legacy", {"tensor_model_parallel_size": 3}, "tensor_model_parallel_size=3 does not fit .*use one of 1, 2, 4"),
        ("legacy", {"pipeline_model_parallel_size": 3}, "pipeline_model_parallel_size=3 does not divide num_layers=2"),
        ("legacy", {"expert_model_parallel_size": 3}, "expert_model_parallel_size=3 does not divide num_experts=8"),
        ("legacy", {"expert_tensor_parallel_size": 2}, "does not divide tensor_model_parallel_size=1.*or torch_dist"),
    ],
)
def test_sizes_that_do_not_fit(to: str, arguments: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        convert(tiny_model("mixtral"), tmp_path / "new", to=to, **arguments)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_expert_sizes_in_the_args(tmp_path: Path) -> None:
    for family in ("llama", "mixtral"):
        path = convert(tiny_model(family), tmp_path / family, to="legacy")
        file = path / ITERATION / "mp_rank_00" / FILE
        state = torch.load(file, weights_only=False)
        vars(state["args"]).update(expert_tensor_parallel_size=4)
        torch.save(state, file)
    assert_same(tmp_path / "llama", tiny_model("llama"))  # of no effect
    with pytest.raises(
        ValueError, match="args in .* cannot be followed: expert_tensor_parallel_size=4 does not divide"
    ):
        open_source(tmp_path / "mixtral")


def test_experts_parallel_without_experts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expert_model_parallel_size=2, but the model has no experts"):
        convert(tiny_model("llama"), tmp_path / "new", to="legacy", expert_model_parallel_size=2)
