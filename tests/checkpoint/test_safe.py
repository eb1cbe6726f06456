"""Pickles that want to run something are refused, with nothing run; harmless ones of Megatron-LM are read."""

import enum
import io
import os
import pickle
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dcp.checkpoint import convert, open_source
from megatron_dcp.checkpoint.safe import load_metadata, load_torch
from models import tiny_model

ITERATION = "iter_0000001"


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_file_that_runs_something(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "x.pt"
    torch.save({"args": Evil(tmp_path / "mark")}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"mkdir.*could run foreign code.*add_safe_globals"):
        load_torch(file)
    assert not (tmp_path / "mark").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "mark").exists()  # it would have


@pytest.mark.parametrize("to", ["torch_dist", "legacy"])
def test_checkpoints_that_run_something(tmp_path: Path, to: str) -> None:
    root = convert(tiny_model("llama"), tmp_path / "src", to=to)
    file = root / ITERATION / ("common.pt" if to == "torch_dist" else "mp_rank_00/model_optim_rng.pt")
    state = torch.load(file, weights_only=False)
    state["args"].evil = Evil(tmp_path / "mark")
    torch.save(state, file)
    with pytest.raises(ValueError, match="could run foreign code"):
        convert(root, tmp_path / "dst", to="hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


class Dotted:
    """Reaches ``os.mkdir`` through a module that is allowed: ``filesystem`` imports ``os``."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def dumps(self, argument: Path) -> bytes:
        def text(value: str) -> bytes:
            return b"\x8c" + bytes([len(value)]) + value.encode()

        name = text(self.module) + text(self.name) + b"\x93"  # STACK_GLOBAL
        return b"\x80\x04" + name + text(str(argument)) + b"\x85R."  # a tuple of one, REDUCE, STOP


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "mkdir"),
        ("posix", "mkdir"),
        ("builtins", "eval"),
        ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
        ("torch.distributed.checkpoint.filesystem", "os"),
        ("torch.distributed.checkpoint.filesystem", "Path"),
        ("torch", "load"),
        ("torch.serialization", "load"),
    ],
)
def test_metadata_that_runs_something(tmp_path: Path, module: str, name: str) -> None:
    file = tmp_path / ".metadata"
    file.write_bytes(Dotted(module, name).dumps(tmp_path / "mark"))
    with pytest.raises(ValueError, match=rf"names {module}\.{name}.*could run foreign code"):
        load_metadata(file)
    assert not (tmp_path / "mark").exists()


def test_the_crafted_pickle_would_have_run(tmp_path: Path) -> None:
    pickle.loads(Dotted("torch.distributed.checkpoint.filesystem", "os.mkdir").dumps(tmp_path / "mark"))
    assert (tmp_path / "mark").exists()


def test_what_megatron_lm_puts_into_its_arguments(tmp_path: Path) -> None:
    module = types.ModuleType("megatron.training.enumerations")
    kind = enum.Enum("Kind", {"auto": 5}, module=module.__name__)
    module.Kind = kind  # type: ignore[attr-defined]
    root = convert(tiny_model("llama"), tmp_path / "src", to="torch_dist")
    file = root / ITERATION / "common.pt"
    state = torch.load(file, weights_only=False)
    vars(state["args"]).update(
        attention_backend=kind.auto, exit_signal=signal.SIGTERM, data_path=Path("/data"), extra=io.BytesIO(b"x")
    )
    sys.modules[module.__name__] = module
    try:
        torch.save(state, file)
    finally:
        del sys.modules[module.__name__]
    assert open_source(root).config == open_source(tiny_model("llama")).config


def test_what_the_program_allowed_before_stays_allowed(tmp_path: Path) -> None:
    before = list(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals([types.SimpleNamespace])
    try:
        root = convert(tiny_model("llama"), tmp_path / "src", to="legacy")
        open_source(root)
        assert types.SimpleNamespace in torch.serialization.get_safe_globals()
        assert set(map(str, torch.serialization.get_safe_globals())) == set(map(str, [*before, types.SimpleNamespace]))
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_way_out_for_a_trusted_class(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    torch.save({"value": Trusted(3)}, file)
    with pytest.raises(ValueError, match=r"Trusted.*add_safe_globals"):
        load_torch(file)
    with torch.serialization.safe_globals([Trusted]):
        assert load_torch(file)["value"].number == 3


class Trusted:
    def __init__(self, number: int) -> None:
        self.number = number
