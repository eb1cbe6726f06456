"""The benchmark runs, and what it counts is exact. Durations are not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 4, 2, 16
CONTEXT, BATCHES = 64, (1, 3)


def bench(*arguments: str) -> dict:
    command = [sys.executable, str(ROOT / "tools" / "bench.py"), *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def result() -> dict:
    sizes = dict(layers=LAYERS, hidden=HIDDEN, ffn=96, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, vocab=100)
    shape = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    run = ["--contexts", str(CONTEXT), "--batches", *map(str, BATCHES), "--block-size", "16", "--interleave", "2"]
    return bench("decode", *shape, *run, "--repeats", "2", "--threads", "2", "--buffer-gb", "0.01")


def rows(result: dict, name: str) -> list[dict]:
    found = [row for row in result["rows"] if row["name"] == name]
    assert [(row["context"], row["batch"]) for row in found] == [(CONTEXT, batch) for batch in BATCHES]
    return found


NAMES = ("dcp 1", "dcp 2", "megatron static", "transformers", "transformers static")


@pytest.mark.parametrize("name", NAMES)
def test_every_contender_is_measured_and_computes_the_same(result, name):
    for row in rows(result, name):
        assert row["ms_per_token"] > 0 and row["bandwidth_gb_s"] > 0 and row["kv_gb_s"] > 0
        assert row["ratio_to_dcp1"] > 0 and row["ratio_to_floor"] > 0
        assert row["logit_difference"] < 1e-5


def test_setting(result):
    assert result["benchmark"] == "decode"
    assert {row["name"] for row in result["rows"]} == set(NAMES)
    assert result["setting"]["shape"]["kv_heads"] == KV_HEADS
    assert result["setting"]["threads"] == 2


@pytest.mark.parametrize("dcp", [1, 2])
def test_kv_bytes(result, dcp):
    per_token = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
    for row, batch in zip(rows(result, f"dcp {dcp}"), BATCHES, strict=True):
        assert row["kv_bytes_per_rank"] == CONTEXT * batch * per_token // dcp
        assert row["kv_ratio_to_total_over_dcp"] == 1
        assert row["attention_ms"] > 0 and row["attention_ratio_to_floor"] > 0


def test_one_rank_sends_nothing(result):
    for row in rows(result, "dcp 1"):
        assert row["collectives"] == row["expected_collectives"] == {}
        assert row["collectives_per_step"] == row["sent_bytes_per_token"] == 0


def test_traffic_of_two_ranks(result):
    """``fold``: per layer one gather of the LSEs, one sum of the output projection's shares."""
    for row, batch in zip(rows(result, "dcp 2"), BATCHES, strict=True):
        gathered, summed = 4 * batch * HEADS, 4 * batch * HIDDEN
        assert row["collectives"] == {
            "all_gather": [LAYERS, LAYERS * gathered],
            "all_reduce": [LAYERS, LAYERS * summed],
        }
        assert row["expected_collectives"] == row["collectives"]
        assert row["collectives_per_step"] == 2 * LAYERS
        assert row["sent_bytes_per_token"] * batch == LAYERS * (gathered + summed)


def test_mla_computes_the_same_and_names_its_floors():
    sizes = ["--heads", "4", "--rank", "16", "--rotated", "8", "--contexts", "40", "100", "--batches", "1", "2"]
    result = bench("mla", *sizes, "--repeats", "1", "--threads", "1", "--buffer-gb", "0.01", "--block-size", "16")
    assert [(row["context"], row["batch"]) for row in result["rows"]] == [(40, 1), (40, 2), (100, 1), (100, 2)]
    for row in result["rows"]:
        assert row["difference"] < 1e-5
        assert min(row["bandwidth floor ms"], row["arithmetic floor ms"], row["x floor"], row["GFLOP/s"]) > 0


def test_prefill():
    run = ["--layers", "1", "--prompts", "512", "--chunk", "256", "--ways", "pass_kv", "replicated", "--repeats", "1"]
    alone, dealt, replicated = bench("prefill", *run, "--threads", "2")["rows"]
    assert [row["contender"] for row in (alone, dealt, replicated)] == ["dcp 1", "dcp 2 pass_kv", "dcp 2 replicated"]
    for row in (dealt, replicated):
        assert row["s"] > 0 and row["x dcp 1"] > 0 and row["logit diff"] < 1e-5
        assert row["KV MiB/rank"] == alone["KV MiB/rank"] / 2
    # both chunks, and the second again; one layer of 8 heads of 128, keys and values
    assert dealt["sent MB/rank"] * 1e6 > (128 + 256) * 8 * 128 * 2 * 4
    assert dealt["step MiB/rank"] < 0.8 * replicated["step MiB/rank"] <= alone["step MiB/rank"]


def test_serve():
    run = ["--layers", "1", "--requests", "5", "--long", "40", "60", "--prefix", "48", "--prefixes", "1"]
    rows = bench("serve", *run, "--output", "3", "6", "--max-num-seqs", "2", "--repeats", "1", "--threads", "2")["rows"]
    assert [row["contender"] for row in rows] == [
        "dcp 1", "dcp 1, no prefix cache", "dcp 2", "dcp 2, no prefix cache", "transformers",
    ]  # fmt: skip
    for row in rows:
        assert row["same"] == 1.0 and row["out tok/s"] > 0 and 0 < row["TTFT p50 s"] <= row["p95"]
        assert row["TPOT p50 ms"] > 0
    assert rows[0]["prefix hit"] > 0.3 and rows[1]["prefix hit"] == 0 and rows[2]["prefix hit"] > 0.2


def test_driver():
    rows = bench("driver", "--sequences", "1", "3", "--steps", "5", "--vocab", "100", "--prompt", "10")["rows"]
    assert [row["sequences"] for row in rows] == [1, 3]
    assert all(0 < row["sampler_ms"] < row["ms_per_step"] for row in rows)


def test_convert(tmp_path):
    sizes = ["--layers", "2", "--hidden", "64", "--ffn", "96", "--heads", "4", "--kv-heads", "2", "--vocab", "100"]
    rows = bench("convert", *sizes, "--max-shard-bytes", "50000", "--repeats", "1", "--directory", str(tmp_path))[
        "rows"
    ]
    assert [row["name"] for row in rows] == [
        "plain copy", "hf to torch_dist", "torch_dist to hf", "hf to legacy tp 2 pp 2", "legacy tp 2 pp 2 to hf",
    ]  # fmt: skip
    assert all(row["gb_per_s"] > 0 and row["time_to_copy"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
