"""``bench.py plan`` on ranks, with small sizes: every case is measured and predicted. Durations are not looked at."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

from small_calibration import shrink_calibration

from workers import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]


def measured(rank: int, world: int) -> str:
    sys.path.insert(0, str(ROOT / "tools"))
    import bench_plan
    from bench_world import World

    from megatron_dcp import parallel_state

    shrink_calibration()
    bench_plan.STEPS = 8
    parallel_state.initialize_model_parallel(1)
    arguments = argparse.Namespace(
        checkpoint=str(ROOT / "examples/quickstart/checkpoint"), contexts=[300, 6000], batches=[1, 3], dcp=[1, 2],
        prompts=[70, 140], repeats=2, threads=2,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as out:
        bench_plan.measure_all(World(2), arguments)
    sys.path.remove(str(ROOT / "tools"))
    return out.getvalue()


def test_every_case_is_measured_and_predicted() -> None:
    first, second = run_on_ranks(2, measured)
    assert second == ""
    *table, last = first.splitlines()
    rows = json.loads(last)["rows"]
    prompts = json.loads(last)["prompts"]
    assert {(row["dcp"], row["prompt"]) for row in prompts} == {(dcp, tokens) for dcp in (1, 2) for tokens in (70, 140)}
    assert all(row["measured_ms"] > 0 and row["predicted_ms"] > 0 and row["ratio"] > 0 for row in prompts)
    assert len(rows) == 8 and len(table) == 3 + len(rows) + len(prompts)
    assert len(json.loads(last)["memory_gb_s"]) == 2 and min(json.loads(last)["memory_gb_s"]) > 0
    assert {(row["dcp"], row["batch"], row["context"]) for row in rows} == {
        (dcp, batch, context) for dcp in (1, 2) for batch in (1, 3) for context in (300, 6000)
    }
    for row in rows:
        assert row["measured_ms"] > 0 and row["predicted_ms"] > 0 and row["ratio"] > 0
        assert (row["exchange_ms"] > 0) == (row["dcp"] == 2)
        assert row["kv_ms"] > 0 and row["weights_ms"] > 0
