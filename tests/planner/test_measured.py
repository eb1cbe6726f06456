"""The file of a measured machine: what is written is read, anything else is one error."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dcp.planner import machine, measured
from megatron_dcp.planner.machine import AttentionRate, ChunkRate, CollectiveRate, Machine
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
    drift=0.1,
    attention=(AttentionRate(kv_dtype="float32", head_dim=64, rows=2, latent=False, bytes_per_s=5e9),),
    activations=12.0,
    chunks=(ChunkRate(dtype="float32", head_dim=64, flops=1e11),),
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


RATE = {"kv_dtype": "int8", "head_dim": 64, "rows": 2, "latent": False, "bytes_per_s": 5e9}
RING = {"op": "ring", "ranks": 2, "span": 2, "bytes": 4096.0, "seconds": 1e-4}
CHUNK = {"dtype": "float32", "head_dim": 64, "flops": 1e11}
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"memory_bandwidth": 0}, "memory_bandwidth is 0, not a number from 1 to 1e.24"),
    ({"memory_bandwidth": 1e-300}, "memory_bandwidth is 1e-300"),
    ({"memory_bandwidth": 10**400}, "memory_bandwidth is 1000000"),
    ({"memory_bandwidth": True}, "memory_bandwidth is True"),
    ({"layer_s": -1e-6}, "layer_s is -1e-06, not a number from 0"),
    ({"layer_s": "1"}, "layer_s is '1'"),
    ({"layer_s": float("nan")}, "layer_s is nan"),
    ({"ranks": 0}, "ranks is 0"),
    ({"ranks": 1.5}, "ranks is 1.5, not a whole number from 1"),
    ({"ranks": 10**9}, "ranks is 1000000000"),
    ({"link_gpus": 1.5}, "link_gpus is 1.5"),
    ({"imbalance": 0.9}, "imbalance is 0.9"),
    ({"layer_s": None}, "machine lacks layer_s"),
    ({"speed": 1}, "machine has more than"),
    ({"name": 5}, "name is no line of text"),
    ({"name": "a\x1b[2J"}, "name is no line of text"),
    ({"flops": [1]}, "flops are to be those of"),
    ({"flops": {"float32": 1e11}}, "flops are to be those of float32, bfloat16 and fp8"),
    ({"flops": {"float32": float("nan"), "bfloat16": 1, "fp8": 1}}, "flops of float32 is nan"),
    ({"attention": 3}, "attention is no list"),
    ({"attention": [3]}, "attention lacks bytes_per_s"),
    ({"attention": [{**RATE, "latent": "no"}]}, "latent is 'no', not one of True, False"),
    ({"attention": [{**RATE, "kv_dtype": "int3"}]}, "kv_dtype is 'int3', not one of float32"),
    ({"attention": [{**RATE, "kv_dtype": ["int8"]}]}, "kv_dtype is"),
    ({"attention": [RATE, RATE]}, "attention has two rates of the same"),
    ({"collectives": [{**RING, "seconds": 0.0}]}, "seconds is 0.0"),
    ({"collectives": [{**RING, "op": "gossip"}]}, "op is 'gossip'"),
    ({"chunks": [{**CHUNK, "flops": {"float32": 1e11}}]}, "flops is {'float32'"),
    ({"chunks": [{**CHUNK, "dtype": "int8"}]}, "dtype is 'int8', not one of float32, bfloat16"),
    ({"chunks": [CHUNK, CHUNK]}, "chunks has two rates of the same"),
    ({"activations": -1}, "activations is -1"),
    ({"collectives": [RING, RING]}, "collectives has two rates of the same"),
]


@pytest.mark.parametrize(("values", "message"), BROKEN)
def test_a_broken_file_is_one_error_with_the_remedy(tmp_path: Path, values: dict, message: str) -> None:
    path = tmp_path / "m.json"
    save_machine(MEASURED, path, {})
    changed(path, **values)
    with pytest.raises(ValueError, match=f"m.json' is a broken measurement: {message}.*megatron-dcp plan --calibrate"):
        load_machine(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "other"}', "\xff", "[" * 100_000, '{"format": "megatron_dcp machine 1"}']
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="is (no measured machine|a broken measurement.*); write it anew with"):
        load_machine(path)


def test_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.json"
    save_machine(MEASURED, path, {})
    monkeypatch.setattr(measured, "MOST_BYTES", path.stat().st_size - 1)
    with pytest.raises(ValueError, match="is no measured machine"):
        load_machine(path)


@pytest.mark.parametrize("name", ["none.json", "folder.json", "pipe.json"])
def test_what_is_no_file_is_not_read(tmp_path: Path, name: str) -> None:
    os.mkdir(tmp_path / "folder.json")
    os.mkfifo(tmp_path / "pipe.json")  # reading it would wait for ever
    with pytest.raises(ValueError, match="does not exist; write it with" if name == "none.json" else "is no file; wri"):
        machine(str(tmp_path / name))


def test_a_file_is_known_by_its_whole_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_machine(MEASURED, "mine", {})
    assert machine("mine") == machine("./mine") == MEASURED
