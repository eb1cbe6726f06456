"""Legacy files of all ranks: as Megatron-LM writes them, read and written, and what can be wrong with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dcp import parallel_state
from megatron_dcp.checkpoint import convert, load_model, open_source
from megatron_dcp.checkpoint.names import fused_name, shard, split_layer_name
from models import hf_tensors, tiny_model
from workers import run_on_ranks

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


# --- several ranks


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
        state = torch.load(path / ITERATION / name / "model_optim_rng.pt", weights_only=False)
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
    state = torch.load(src / ITERATION / f"mp_rank_{numbers}" / "model_optim_rng.pt", weights_only=False)
    model = build_model(open_source(src).config, pgs)
    assert model.load_state_dict(state["model"], strict=True) is not None
    extra = {name for name in model.state_dict() if "_extra_state" in name}
    assert state["model"].keys() - extra == model.state_dict().keys() - extra
    assert {name for name in state["model"] if "_extra_state" in name} <= extra
    loaded, _ = load_model(src, pgs)
    for name, tensor in loaded.state_dict().items():
        assert name in extra or torch.equal(tensor, model.state_dict()[name]), name
    file = new / ITERATION / f"mp_rank_{numbers}" / "model_optim_rng.pt"
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
    state = torch.load(rank_file(convert(original, root, to="legacy")), weights_only=False)
    rank_file(root).unlink()
    rank_file(root).parent.rmdir()
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
        file = root / ITERATION / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt"
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
    (tmp_path / "legacy" / ITERATION / "mp_rank_00_001" / "model_optim_rng.pt").unlink()
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

    file = rank_file(path, 1)
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


def test_experts_parallel_without_experts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expert_model_parallel_size=2, but the model has no experts"):
        convert(tiny_model("llama"), tmp_path / "new", to="legacy", expert_model_parallel_size=2)
