"""The file of a measured machine: what is written is read, anything else is one error."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dcp.planner import machine
from megatron_dcp.planner.machine import AttentionRate, CollectiveRate, Machine
from megatron_dcp.planner.measured import load_machine, save_machine

MEASURED = Machine(
    name="measured",
    memory_bytes=1e10,
    memory_bandwidth=1e10,
    flops={"float32": 1e11, "bfloat16": 2e11, "fp8": 2e11},
    link_bandwidth=1e9,
    link_gpus=2,
    network_bandwidth=1e9,
    collective_s=1e-4,
    link_step_s=0.0,
    network_step_s=0.0,
    layer_s=3e-4,
    step_s=1e-3,
    layer_sequence_s=2e-5,
    sequence_s=1e-5,
    followers_s=5e-4,
    merge_s=1e-4,
    imbalance=1.2,
    attention=(AttentionRate(kv_dtype="float32", head_dim=64, rows=2, latent=False, bytes_per_s=5e9),),
    collectives=(CollectiveRate(op="all_gather", ranks=2, span=2, bytes=4096.0, seconds=1e-4),),
    ranks=2,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text("older")
    save_machine(MEASURED, path, {"threads": 1})
    assert load_machine(path) == machine(str(path)) == MEASURED
    assert json.loads(path.read_text())["about"] == {"threads": 1}
    assert os.listdir(tmp_path) == ["m.json"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    save_machine(MEASURED, path, {})
    with pytest.raises(ValueError):
        save_machine(replace(MEASURED, layer_s=float("nan")), path, {})
    assert load_machine(path) == MEASURED and os.listdir(tmp_path) == ["m.json"]


def changed(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text())
    content["machine"] |= values
    path.write_text(json.dumps({**content, "machine": {k: v for k, v in content["machine"].items() if v is not None}}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"memory_bandwidth": 0}, "memory_bandwidth is 0"),
        ({"layer_s": -1e-6}, "layer_s is -1e-06"),
        ({"layer_s": "1"}, "layer_s is no number"),
        ({"ranks": 0}, "ranks is 0"),
        ({"imbalance": 0.9}, "imbalance is 0.9"),
        ({"layer_s": None}, "layer_s"),
        ({"speed": 1}, "speed"),
        ({"flops": {"float32": 1e11}}, "flops lack a dtype"),
        ({"flops": {"float32": float("nan"), "bfloat16": 1, "fp8": 1}}, "flops is no number"),
        ({"attention": [{"rows": 1}]}, "kv_dtype"),
        ({"collectives": 3}, "not iterable"),
        (
            {"collectives": [{"op": "ring", "ranks": 2, "span": 2, "bytes": 1.0, "seconds": 0.0}]},
            "seconds is 0",
        ),
    ],
)
def test_a_broken_file_is_one_error_with_the_remedy(tmp_path: Path, values: dict, message: str) -> None:
    path = tmp_path / "m.json"
    save_machine(MEASURED, path, {})
    changed(path, **values)
    with pytest.raises(ValueError, match=f"is a broken measurement .*{message}.*megatron-dcp plan --calibrate"):
        load_machine(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', "\xff"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="is no measured machine; write it anew with"):
        load_machine(path)


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        machine(str(tmp_path / "none.json"))
