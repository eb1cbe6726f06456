"""The report of tools/gpu_check.sh: what is read, which goals count as reached, and what the exit code says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """<testsuites><testsuite>
<testcase classname="tests.gpu.a" name="one"/>
<testcase classname="tests.gpu.a" name="two"><skipped message="te: not installed"/></testcase>
<testcase classname="tests.gpu.b" name="three"><failure message="no"/></testcase>
</testsuite></testsuites>"""


def row(name: str, ratio: float | None, keys: int = 65536, size: int = 64 << 20) -> dict[str, object]:
    return {
        "name": name,
        "keys": keys,
        "bytes": size,
        **({"refused": "no"} if ratio is None else {"ratio_to_copy": ratio}),
    }


def report(folder: Path, rows: list[dict[str, object]] | None, tests: int = 0) -> tuple[int, dict]:
    (folder / "env.json").write_text('{"torch": "2.13"}')
    (folder / "tests.xml").write_text(TESTS)
    text = "copy: 3000 GB/s\n" + ("" if rows is None else json.dumps({"rows": rows}) + "\n")
    (folder / "kernels.txt").write_text(text)
    where = folder / "report.json"
    command = [sys.executable, ROOT / "tools" / "gpu_report.py", folder, where, "--tests-status", str(tests)]
    done = subprocess.run([*command, "--kernels-status", "0"], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(where.read_text())


@pytest.mark.parametrize(("sdpa", "reached"), [(0.3, True), (0.85, True), (None, True)])
def test_the_best_back_end_counts(tmp_path: Path, sdpa: float | None, reached: bool) -> None:
    rows = [
        row("attend te gqa torch.bfloat16 context 65536 dcp 1", 0.81),
        row("attend sdpa gqa torch.bfloat16 context 65536 dcp 1", sdpa),
        row("attend te mla torch.bfloat16 context 65536 dcp 1", 0.1),
        row("attend te gqa torch.bfloat16 context 65536 dcp 8", 0.1, keys=8192),
        row("merge gqa dcp 2 2048 tokens", 0.75),
        row("merge gqa dcp 2 1 tokens", 0.01, size=1 << 20),
        row("write gqa torch.bfloat16 1 tokens", 0.01),
    ]
    code, found = report(tmp_path, rows)
    assert code == 0
    assert found["tests"] == {
        "exit_code": 0, "passed": 1, "failed": 1, "skipped": 1, "failures": ["tests.gpu.b::three"]
    }  # fmt: skip
    assert found["environment"] == {"torch": "2.13"} and found["kernels"]["rows"] == rows
    assert found["goals"]["attention"] == {"goal": 0.8, "least_of_best": max(0.81, sdpa or 0), "reached": reached}
    assert found["goals"]["merge"] == {"goal": 0.7, "least": 0.75, "reached": True}


def test_one_slow_context_is_not_outweighed(tmp_path: Path) -> None:
    rows = [row(f"attend te gqa torch.bfloat16 context {n} dcp 1", ratio) for n, ratio in ((1, 0.9), (2, 0.7))]
    _, found = report(tmp_path, rows)
    assert found["goals"]["attention"] == {"goal": 0.8, "least_of_best": 0.7, "reached": False}
    assert found["goals"]["merge"] == {"goal": 0.7, "least": None, "reached": False}


def test_what_did_not_run_or_failed_is_no_success(tmp_path: Path) -> None:
    code, found = report(tmp_path, None)
    assert code == 1 and found["kernels"] is None and not found["goals"]["attention"]["reached"]
    assert report(tmp_path, [row("merge gqa dcp 2 64 tokens", 0.9)], tests=1)[0] == 1


def test_without_a_gpu_the_check_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        ["bash", ROOT / "tools" / "gpu_check.sh", tmp_path / "report.json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )
    assert done.returncode == 1 and "torch sees no GPU here; run this on a machine that has one" in done.stderr
    assert not (tmp_path / "report.json").exists()
