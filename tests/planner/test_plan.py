"""What is recommended, and what is said about it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_dcp.planner import MODELS, Pins, Plan, Workload, machine, make_plan
from megatron_dcp.planner.advice import advise, binding, problems
from megatron_dcp.planner.plan import frontier
from megatron_dcp.planner.render import render, to_dict


def plan(name: str, gpus: int = 8, gpu: str = "H200", pins: Pins | None = None, **work: object) -> Plan:
    return make_plan(name, MODELS[name], machine(gpu), gpus, Workload(**work), pins)  # type: ignore[arg-type]


def test_small_contexts_want_dp_and_not_dcp() -> None:
    for context, batch in ((1024, 64), (8192, 256)):
        found = plan("llama-3-8b", context=context, batch=batch)
        assert found.best is not None and found.best.candidate.dcp == 1
        rows = {row.candidate.name: row for row in found.rows}
        for tp in (1, 2, 4):
            replicas = rows[f"tp {tp}, dp {8 // tp}"]
            assert replicas.tpot_s < rows[f"tp {tp} x dcp {8 // tp} (orthogonal)"].tpot_s


def test_one_long_sequence_wants_dcp_where_tp_would_copy_it() -> None:
    """Without dcp every rank of DeepSeek would read the same latents."""
    found = plan("deepseek-v3", context=131072, batch=8, weight_dtype="fp8")
    assert found.best is not None and found.best.candidate.dcp == 8 and found.best.memory.kv_copies == 1
    alone = next(row for row in found.rows if row.candidate.dcp == 1 and row.candidate.tp == 8)
    assert alone.memory.kv_copies == 8 and alone.problem is not None


def test_the_best_is_the_fastest_that_fits() -> None:
    found = plan("qwen2.5-72b", context=131072, batch=8)
    best = found.best
    assert best is not None and best is found.rows[0] and best.candidate.name == "tp 8"
    fits = [row.problem is None for row in found.rows]
    assert fits == sorted(fits, reverse=True)
    times = [row.tpot_s for row in found.fitting]
    assert times == sorted(times)
    assert best.throughput == pytest.approx(8 / best.tpot_s / 8) and best.interactivity == 1 / best.tpot_s


def test_8_bit_caches_are_listed_and_not_recommended() -> None:
    found = plan("qwen2.5-72b", context=131072, batch=8, pins=Pins(kv_cache_dtypes=("auto", "fp8_e4m3", "int8")))
    assert found.rows[0].candidate.kv_cache_dtype != "auto"
    assert found.best is not None and found.best.candidate.kv_cache_dtype == "auto"
    only = plan("qwen2.5-72b", context=131072, batch=8, pins=Pins(kv_cache_dtypes=("fp8_e4m3",)))
    assert only.best is not None and only.best.candidate.kv_cache_dtype == "fp8_e4m3"


def test_two_sentences_say_what_binds_and_what_more_dcp_would_cost() -> None:
    found = plan("qwen2.5-72b", context=131072, batch=8)
    first, second = advise(found).split(". ")
    assert first.startswith("Take tp 8: of 20.3 ms per token, the largest part is reading the KV cache (11.2 ms)")
    assert first.endswith("with 61.2 GB of the 126.9 GB of a GPU in use")
    other = found.next_dcp(found.best)  # type: ignore[arg-type]
    assert other is not None and other.candidate.name == "tp 4 x dcp 2 (orthogonal)"
    more = (other.tpot_s - found.best.tpot_s) * 1e3  # type: ignore[union-attr]
    assert f"tp 4 x dcp 2 (orthogonal), would take {more:.1f} ms more per token" in second
    assert "weights 18.2 GB -> 36.4 GB" in second
    short = plan("qwen2.5-72b", context=1024, batch=8)
    assert binding(short.best.step)[0] == "weights"  # type: ignore[union-attr]


def test_a_measured_machine_has_ranks() -> None:
    found = plan("llama-3-8b", gpus=2, context=1024)
    found = replace(found, machine=replace(found.machine, ranks=2))
    text = render(found, 5)
    assert "per rank" in text and "of a rank in use" in text and "GPU" not in text.replace(found.machine.name, "")


def test_rates_have_the_prefix_that_leaves_few_digits() -> None:
    assert "reached 6.4 TB/s, 1.35 PFLOP/s in bf16" in render(plan("llama-3-8b", gpu="B200", context=1024), 1)
    assert "reached 3.84 TB/s, 593 TFLOP/s in bf16" in render(plan("llama-3-8b", context=1024), 1)


def test_no_larger_dcp() -> None:
    found = plan("llama-3-8b", gpus=1, context=1024)
    assert advise(found).endswith("No larger dcp than 1 is among the listed configurations of 1 GPU.")


def test_nothing_fits() -> None:
    tight = plan("llama-3-405b", gpu="A100-40GB", context=131072)
    assert tight.best is None
    assert "Nothing fits: no configuration of 8 x A100-40GB holds 1 sequence of 131072 tokens" in advise(tight)
    assert "take more GPUs" in advise(tight)
    assert all("alone exceed 36.0 GB" in line for line in problems(tight)[:3])
    many = plan("qwen2.5-72b", context=131072, batch=1000)
    assert "would hold" in advise(many) and "sequences per replica would fit" in problems(many)[0]
    assert "configuration " not in render(many, 10).split("Nothing fits")[0]


def test_context_beyond_the_models() -> None:
    with pytest.raises(ValueError, match="context=50000 is beyond the 40960 positions of qwen3-235b-a22b; give"):
        plan("qwen3-235b-a22b", context=50_000)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (dict(context=0), "context=0 must be"),
        (dict(context=1, batch=0), "batch=0 must be"),
        (dict(context=1, chunk=0), "chunk=0 must be"),
        (dict(context=1, memory_share=1.5), "memory_share=1.5 must be above 0 and at most 1"),
    ],
)
def test_bad_workloads(work: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**work)  # type: ignore[arg-type]


def test_frontier_trades_interactivity_for_throughput() -> None:
    found = plan("qwen2.5-72b", context=131072, batch=8)
    points = frontier(found, found.rows[0])
    assert [batch for batch, _, _ in points] == [1, 2, 4, 8, 16]  # 20 fit
    assert found.rows[0].largest_batch == 20
    for (_, fast, few), (_, slow, many) in zip(points, points[1:], strict=False):
        assert slow < fast and many > few
    assert points[3][1:] == pytest.approx((found.rows[0].interactivity, found.rows[0].throughput))


def test_table_has_units_and_is_aligned() -> None:
    text = render(plan("deepseek-v3", context=65536, batch=16, weight_dtype="fp8"), 5)
    lines = text.splitlines()
    top = next(index for index, line in enumerate(lines) if line.startswith("configuration"))
    names, units, rule, *rows = lines[top : top + 8]
    assert all(word in names for word in ("weights", "KV", "copies", "batch", "context", "TTFT", "TPOT", "per GPU"))
    assert all(word in units for word in ("GB", "%", "KB/tok/layer", "ms", "tok/s"))
    assert set(rule) == {"-"}
    assert len({line.index(word) + len(word) for line, word in ((names, "TPOT"), (units, "ms"))}) == 1
    assert sum(line.startswith("* ") for line in rows) == 1
    assert "fp8 weights are for planning: the engine computes with 16 or 32 bits" in text
    assert "does not fit:" in text


def test_everything_is_in_the_json() -> None:
    found = plan("gpt-oss-120b", context=65536, batch=4, pins=Pins(ep=8))
    loaded = json.loads(json.dumps(to_dict(found), allow_nan=False))
    assert len(loaded["configurations"]) == len(found.rows)
    best = loaded["configurations"][loaded["best"]]
    assert best["fits"] and best["name"] == found.best.candidate.name  # type: ignore[union-attr]
    assert best["bytes_per_gpu"]["total"] == pytest.approx(
        sum(best["bytes_per_gpu"][part] for part in ("weights", "kv", "activations", "work"))
    )
    assert loaded["legal_interleaves"] == [1, 2, 4, 8, 16, 32, 64]
    assert loaded["machine"]["memory_bytes"] == 141e9 and loaded["parameters"] == 116_829_156_672
