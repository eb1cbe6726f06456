"""``fsdp_dtensor`` directories, made with torch.distributed.checkpoint under the names that Megatron-LM saves."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_dcp.checkpoint import convert, detect_format, open_source, read_config
from megatron_dcp.checkpoint.dist_write import common_state
from megatron_dcp.checkpoint.fsdp import FsdpSource
from megatron_dcp.checkpoint.names import fused_name, split_layer_name
from models import hf_tensors, tiny_model
from workers import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
ITERATION = "iter_0000007"
FUSED = {"self_attention.linear_qkv", "self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj"}


def training_state(original: Path, *, grouped: bool = False, **args: Any) -> dict[str, Any]:
    """What Megatron-LM gives to torch.distributed.checkpoint: nested, gate and up apart, norms in TE's layers."""
    source = open_source(original)
    common = common_state(source, 7)
    vars(common["args"]).update(args)
    model: dict[str, Any] = {}
    for name, spec in source.specs.items():
        layer, rest = split_layer_name(name)
        tensor = source.read(name)
        if layer is not None:
            dense = not source.config.is_moe_layer(layer)
            rest = fused_name(rest, FUSED | ({"mlp.linear_fc1"} if dense else set()))
            if grouped and "local_experts" in rest:
                _, _, _, expert, module, kind = rest.split(".")
                rest = f"mlp.experts.{module}.{kind}{expert}"
            name = f"decoder.layers.{layer}.{rest}"
        parts = {f"{name}_w": 0, f"{name}_v": 1} if spec.parts == 2 else {name: 0}
        for part, half in parts.items():
            model[f"module.{part}"] = tensor.chunk(len(parts))[half].clone()
    model["module.decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
    model["module.decoder.layers.0.self_attention.linear_proj._extra_state"] = torch.zeros(5, dtype=torch.uint8)
    states = {name: {"exp_avg": torch.full_like(t, 9.0)} for name, t in model.items() if isinstance(t, torch.Tensor)}
    return {
        "args": common["args"],
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model,
        "optimizer": {"state": states, "param_groups": [{"lr": torch.ones(())}]},
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": torch.ones(1)},
        "rng_state": {"(0, 0)": [{"torch_rng_state": torch.get_rng_state()}]},
    }


def save_state(state: dict[str, Any], root: Path) -> Path:
    (root / ITERATION).mkdir(parents=True)
    save(state, checkpoint_id=root / ITERATION, no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def assert_same(root: Path, original: Path) -> None:
    source, expected = open_source(root), open_source(original)
    assert isinstance(source, FsdpSource) and detect_format(root) == "fsdp_dtensor"
    assert source.config == expected.config == read_config(root)
    for name in expected.specs:
        assert torch.equal(source.read(name), expected.read(name)), name
        assert torch.equal(source.read_shard(name, 2, 1), expected.read_shard(name, 2, 1)), name


@pytest.mark.parametrize(
    ("family", "grouped"), [("qwen2", False), ("mixtral", True), ("qwen3_moe", False), ("deepseek_v3", True)]
)
def test_names_of_megatron_fsdp(family: str, grouped: bool, tmp_path: Path) -> None:
    original = tiny_model(family)
    root = save_state(training_state(original, grouped=grouped, tensor_model_parallel_size=2), tmp_path / "fsdp")
    assert_same(root, original)
    back, expected = hf_tensors(convert(root, tmp_path / "hf", to="hf")), hf_tensors(original)
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)
    legacy = convert(root, tmp_path / "legacy", to="legacy", tensor_model_parallel_size=2)
    assert (legacy / ITERATION / "mp_rank_01" / "model_optim_rng.pt").is_file()


def test_the_optimizers_states_are_not_read(tmp_path: Path) -> None:
    original = tiny_model("qwen2")
    root = save_state(training_state(original), tmp_path / "fsdp")
    source = open_source(root)
    assert isinstance(source, FsdpSource)
    wiped = 0
    for key, pieces in source._reader._pieces.items():
        if not key.startswith(("model.", "args", "checkpoint_version", "iteration")):
            for piece in pieces:
                with (root / ITERATION / piece.relative_path).open("r+b") as file:
                    file.seek(piece.offset)
                    wiped += file.write(b"\xff" * piece.length)
    assert wiped > sum(tensor.nbytes for tensor in hf_tensors(original).values())
    assert_same(root, original)


def save_on_rank(rank: int, world: int, state: dict[str, Any], directory: Path) -> None:
    """Rows dealt out over the ranks, unevenly, as Megatron-FSDP does."""
    mesh = dist.init_device_mesh("cpu", (world,))
    for part in (state["model"], *state["optimizer"]["state"].values()):
        for name, value in part.items():
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                part[name] = distribute_tensor(value, mesh, [Shard(0)])
    save(state, checkpoint_id=directory)


def test_rows_dealt_out_over_ranks(tmp_path: Path) -> None:
    original = tiny_model("qwen3", ffn=45, vocab_size=97)
    run_on_ranks(2, save_on_rank, training_state(original), tmp_path / "fsdp" / ITERATION)
    (tmp_path / "fsdp" / "latest_checkpointed_iteration.txt").write_text("7")
    assert len(list((tmp_path / "fsdp" / ITERATION).glob("*.distcp"))) == 2
    source, expected = open_source(tmp_path / "fsdp"), open_source(original)
    assert all(torch.equal(source.read(name), expected.read(name)) for name in expected.specs)


def test_unsound_ones(tmp_path: Path) -> None:
    original = tiny_model("llama")
    state = training_state(original)
    lost = state["model"].pop("module.decoder.layers.1.mlp.linear_fc1.weight_v")
    with pytest.raises(ValueError, match=r"decoder\.layers\.1\.mlp\.linear_fc1\.weight .* has shape"):
        open_source(save_state(state, tmp_path / "half"))
    state["model"]["module.decoder.layers.1.mlp.linear_fc1.weight_v"] = lost
    state["model"]["module.decoder.layers.1.mlp.gate.weight"] = lost
    with pytest.raises(ValueError, match=r"holds decoder\.layers\.1\.mlp\.gate\.weight"):
        open_source(save_state(state, tmp_path / "extra"))
    state = training_state(original, tensor_model_parallel_size=2)
    model = state["model"]
    for name in [name for name in model if name.endswith("_w")]:
        model[name.removesuffix("_w")] = torch.cat([model.pop(name), model.pop(name.removesuffix("_w") + "_v")])
    with pytest.raises(ValueError, match="gate and up of 2 tensor parallel ranks.*--ckpt-format torch_dist"):
        open_source(save_state(state, tmp_path / "packed"))
    vars(state["args"]).update(tensor_model_parallel_size=1)  # torch_dcp
    assert_same(save_state(state, tmp_path / "dcp"), original)
    del state["args"]
    with pytest.raises(ValueError, match="has no 'args'"):
        open_source(save_state(state, tmp_path / "no-args"))
    state["checkpoint_version"] = 4.0
    state["args"] = training_state(original)["args"]
    with pytest.raises(ValueError, match="checkpoint_version=4.0, which is newer"):
        read_config(save_state(state, tmp_path / "newer"))
    (tmp_path / "dcp" / ITERATION / ".metadata").unlink()
    with pytest.raises(ValueError, match="has no .metadata, which is written after the tensors"):
        open_source(tmp_path / "dcp")
