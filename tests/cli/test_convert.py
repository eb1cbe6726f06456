"""``convert`` as a user runs it: sizes of a legacy checkpoint, size of files, the bar, what is refused."""

import io
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_dcp.checkpoint import open_source
from megatron_dcp.cli import main
from models import hf_model, hf_tensors, tiny_model


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_legacy_for_several_ranks_and_back_in_several_files(tmp_path, capsys):
    original = tiny_model("mixtral")
    capsys.readouterr()  # transformers' own bar
    legacy, back = tmp_path / "legacy", tmp_path / "hf"
    sizes = ["--tp", "2", "--pipeline-model-parallel-size", "2", "--ep", "2", "--expert-tp", "1"]
    assert main(["convert", str(original), str(legacy), "--to", "legacy", *sizes]) == 0
    names = sorted(path.name for path in (legacy / "iter_0000001").iterdir())
    assert names == ["mp_rank_00_000_000", "mp_rank_00_001_000", "mp_rank_01_000_001", "mp_rank_01_001_001"]
    assert main(["convert", str(legacy), str(back), "--to", "hf", "--max-shard-size", "40KB"]) == 0
    assert capsys.readouterr() == (f"wrote {legacy} (legacy)\nwrote {back} (hf)\n", "")
    files = list(back.glob("model-*-of-*.safetensors"))
    assert len(files) > 2 and max(file.stat().st_size for file in files) < 45_000
    assert hf_tensors(back).keys() == hf_tensors(original).keys()
    ids = torch.arange(50)[None]
    with torch.no_grad():  # from_pretrained takes the files
        assert torch.equal(hf_model(back)(ids).logits, hf_model(original)(ids).logits)
    assert main(["convert", str(back), str(tmp_path / "dist"), "--to", "torch_dist"]) == 0
    source, expected = open_source(tmp_path / "dist"), open_source(original)
    assert all(torch.equal(source.read(name), expected.read(name)) for name in expected.specs)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_of_bytes_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(["convert", str(tiny_model("llama")), str(tmp_path / "new"), "--to", "hf"]) == 0
    assert re.search(r"convert: 100%.*?(\d+\.?\d*k)/\1 .*B/s", terminal.getvalue())
    assert capsys.readouterr().out == f"wrote {tmp_path / 'new'} (hf)\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--to torch_dist --tp 2", "--tp 2 says nothing for --to 'torch_dist'.* loaded at any"),
        ("--to hf --ep 2", "--ep 2 says nothing for --to 'hf'"),
        ("--to legacy --tp 3", "--tp 3 does not fit"),
        ("--to legacy --max-shard-size 1GB", "--max-shard-size 1000000000 is for --to 'hf'"),
        ("--to torch_dist --via bridge", "pip install megatron-bridge"),
        ("--to torch_dist --via bridge --tp 2", "--tp cannot be given to Megatron-Bridge"),
        ("--to hf --hf-model x", "--hf-model is for --via bridge"),
    ],
)
def test_refused_in_one_line(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    assert main(["convert", str(tiny_model("llama")), str(tmp_path / "new"), *options.split()]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("40KB", 40_000), ("1.5 gb", 1_500_000_000), ("2GiB", 2 << 30), ("3M", 3 * 10**6)]
)
def test_sizes(text, size):
    from megatron_dcp.cli.convert import _size

    assert _size(text) == size
