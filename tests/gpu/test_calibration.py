"""A GPU is measured: rates of the order of a data sheet's, in less than a minute, and a plan follows from them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_dcp.planner.measured import load_machine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")


def test_a_gpu_is_measured_and_planned_for(tmp_path: Path) -> None:
    path, plan = tmp_path / "m.json", tmp_path / "plan.json"
    command = ["plan", "llama-3-8b", "--calibrate", str(path), "--gpus", "1", "--context", "8192", "--json", str(plan)]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "megatron_dcp", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    print(done.stdout, f"{time.perf_counter() - start:.0f} s")
    machine = load_machine(path)
    assert machine.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert machine.memory_bandwidth > 1e11 and machine.flops["bfloat16"] > machine.flops["float32"] > 1e12
    assert all(one.bytes_per_s > 1e9 for one in machine.attention)
    assert all(one.flops > 1e12 for one in machine.chunks) and machine.activations < 100
    assert 0 < machine.layer_s < 0.1 and machine.collectives == ()
    assert json.loads(plan.read_text())["configurations"][0]["tpot_s"] > 0
