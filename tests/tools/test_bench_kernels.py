"""``bench.py kernels`` in a tiny form on a CPU: every row is there, and what it counts is exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def result() -> dict:
    sizes = ["--contexts", "100", "--dcp", "1", "3", "--shapes", "gqa", "--batch", "2", "--block-size", "16"]
    speed = ["--repeats", "2", "--buffer-gb", "0.01", "--cold-mb", "0", "--seconds", "200"]
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), "kernels", "--device", "cpu"]
    command += ["--dtypes", "bfloat16", "int8", *sizes, *speed]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "MEGATRON_DCP_TRITON": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_step_is_measured_against_the_copy(result):
    assert result["benchmark"] == "kernels" and result["copy_gb_s"] > 0 and result["left_out"] == 0
    rows = {row["name"]: row for row in result["rows"]}
    assert (
        len(rows) == len(result["rows"]) == 2 * 2 + 3 * 2 + 2 * 2 * len({n.split()[1] for n in rows if "attend" in n})
    )
    measured = [row for row in rows.values() if "refused" not in row]
    assert all(row["us"] > 0 and row["gb_s"] > 0 and row["ratio_to_copy"] > 0 for row in measured)
    assert all(not row["captured"] for row in measured)
    assert {name.split()[0] for name, row in rows.items() if row in measured} == {
        "write",
        "pack",
        "share",
        "merge",
        "attend",
    }


def test_bytes(result):
    rows = {row["name"]: row for row in result["rows"]}
    token = 8 * (128 + 128)
    assert rows["write gqa torch.bfloat16 2 tokens"]["bytes"] == 2 * token * (2 + 2)
    assert rows["write gqa torch.int8 2 tokens"]["bytes"] == 2 * (token * 2 + token + 8 * 2 * 4)
    assert rows["merge gqa dcp 3 2 tokens"]["bytes"] == 4 * 2 * 10 * 129 * 4
    attend = rows["attend sdpa gqa torch.int8 context 100 dcp 3"]
    assert attend["keys"] == 34 and attend["bytes"] == 2 * 34 * (token + 8 * 2 * 4)
    # 2 tokens; 32 heads in slices of 11, of which 11 stay
    assert attend["wire_us"] == pytest.approx(2 * 21 * 129 * 4 / 400e9 * 1e6)


def test_a_back_end_that_cannot_run_says_why(result):
    refused = [row for row in result["rows"] if row["name"].startswith("attend triton")]
    assert refused and all(row["refused"] for row in refused)
