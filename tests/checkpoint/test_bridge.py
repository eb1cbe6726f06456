"""``--via bridge`` with a stand-in for Megatron-Bridge that has its signatures."""

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_dcp.checkpoint import convert, detect_format
from megatron_dcp.checkpoint.bridge import convert_via_bridge
from models import tiny_model


class AutoBridge:
    """``megatron.bridge.AutoBridge``, which lets this package do the work."""

    calls: list[tuple[Any, ...]] = []

    def __init__(self, name: str) -> None:
        self._name = name

    @classmethod
    def from_hf_pretrained(cls, path: str | Path, **kwargs: Any) -> "AutoBridge":
        return cls(str(path))

    @classmethod
    def import_ckpt(
        cls, hf_model_id: str | Path, megatron_path: str | Path, *, low_memory_save: bool = False, **kwargs: Any
    ) -> None:
        cls.calls.append(("import", hf_model_id))
        convert(hf_model_id, Path(megatron_path) / "new")
        for path in (Path(megatron_path) / "new").iterdir():
            path.rename(Path(megatron_path) / path.name)
        (Path(megatron_path) / "new").rmdir()

    def export_ckpt(
        self,
        megatron_path: str | Path,
        hf_path: str | Path,
        show_progress: bool = True,
        strict: bool = False,
        source_path: str | Path | None = None,
    ) -> None:
        self.calls.append(("export", megatron_path, self._name))
        shutil.copytree(self._name, hf_path, dirs_exist_ok=True)


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> type[AutoBridge]:
    module = types.ModuleType("megatron.bridge")
    module.AutoBridge = AutoBridge  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.bridge", module)
    AutoBridge.calls.clear()
    return AutoBridge


def test_both_directions(bridge: type[AutoBridge], tmp_path: Path) -> None:
    original = tiny_model("llama")
    dist = convert_via_bridge(original, tmp_path / "dist", to="torch_dist")
    assert detect_format(dist) == "torch_dist"
    back = convert_via_bridge(dist, tmp_path / "hf", to="hf", hf_model=str(original))
    assert detect_format(back) == "hf"
    assert bridge.calls == [("import", str(original)), ("export", str(dist), str(original))]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "hf"]


def test_what_it_cannot_do(bridge: type[AutoBridge], tmp_path: Path) -> None:
    original = tiny_model("llama")
    dist = convert(original, tmp_path / "dist")
    for src, to, message in (
        (original, "legacy", "not hf to legacy; leave out --via bridge"),
        (original, "hf", "not hf to hf"),
        (dist, "hf", "give the name or directory of the one that .* comes from with --hf-model"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_via_bridge(src, tmp_path / "new", to=to)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="could not convert '.*dist': .*Error"):
        convert_via_bridge(dist, tmp_path / "new", to="hf", hf_model=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="exists already"):
        convert_via_bridge(original, dist, to="torch_dist")
    assert [path.name for path in tmp_path.iterdir()] == ["dist"]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(ValueError, match="needs Megatron-Bridge, which is not there .*: pip install megatron-bridge"):
        convert_via_bridge(tiny_model("llama"), tmp_path / "new", to="torch_dist")
    assert list(tmp_path.iterdir()) == []
