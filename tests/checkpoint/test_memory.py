"""Memory of a conversion is bounded by single tensors, in every direction, whatever the model's size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dcp.checkpoint import mapped
from megatron_dcp.checkpoint.mapped import MappedFiles
from models import hf_tensors, tiny_model

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 8 << 20  # of mapped files; the real one is larger than the model of this test
SLACK = 32 << 20  # what libraries keep for themselves
SCRIPT = f"""
import json, pathlib, sys
from megatron_dcp.checkpoint import convert, mapped
mapped.LIMIT_BYTES = {LIMIT}

def status(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

def peak(src, dst, **options):
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    convert(src, dst, **options)
    return status("VmHWM") - before

tiny, large, new = map(pathlib.Path, sys.argv[1:])
sizes = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
peaks = {{}}
for original in (tiny, large):  # the first makes libraries load what they load late
    at = new / original.name
    at.mkdir()
    peaks["hf to torch_dist"] = peak(original, at / "dist")
    peaks["torch_dist to hf"] = peak(at / "dist", at / "hf", to="hf", max_shard_bytes=60_000_000)
    peaks["torch_dist to legacy"] = peak(at / "dist", at / "legacy", to="legacy", **sizes)
    peaks["legacy to legacy of one rank"] = peak(at / "legacy", at / "one", to="legacy")
    peaks["legacy of one rank to hf"] = peak(at / "one", at / "hf2", to="hf")
    peaks["legacy to torch_dist"] = peak(at / "legacy", at / "dist2")
print(json.dumps(peaks))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's counters")
def test_peak_is_far_below_the_model(tmp_path: Path) -> None:
    large = tiny_model("llama", hidden=384, ffn=1024, layers=24, heads=6, kv_heads=2, max_shard_size="60MB")
    tensors = hf_tensors(large).values()
    total, largest = sum(tensor.nbytes for tensor in tensors), 2 * max(tensor.nbytes for tensor in tensors)
    bound = LIMIT + 8 * largest + SLACK
    assert total > 2 * bound  # holding one half of the model would be noticed
    command = [sys.executable, "-c", SCRIPT, str(tiny_model("llama", layers=2)), str(large), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert {name: peak for name, peak in peaks.items() if peak > bound} == {}, f"bound {bound}, model {total}"


def test_mapped_files_are_closed_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "LIMIT_BYTES", 100)
    opened: list[Path] = []
    files: MappedFiles[int] = MappedFiles(lambda path: opened.append(path) or len(opened))
    assert [files.get(Path("a")), files.get(Path("b")), files.get(Path("a"))] == [1, 2, 1]
    files.count(60)
    assert files.get(Path("a")) == 1
    files.count(60)
    assert [files.get(Path("a")), files.get(Path("b"))] == [3, 4]
    files.count(99)
    assert files.get(Path("b")) == 4
