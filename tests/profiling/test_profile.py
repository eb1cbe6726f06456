"""Runs on ranks by the clock: the parts add up, every kind of layer has its own, and nothing else changes."""

import json
import time

import pytest
import torch

from models import tiny_model
from workers import run_on_ranks

PROMPTS = [[i * 7 % 90 + 1 for i in range(40)], [5, 6, 7]]
NEW = 4


def originals():
    from megatron_dcp.engine.core import Engine
    from megatron_dcp.engine.runner import ModelRunner

    return torch.mm, torch.distributed.all_reduce, torch.nn.functional.linear, ModelRunner.step, Engine.plan


def measured_run(rank, world, path, sizes):
    """Steps of this rank, the pool, range names, and what the same calls took by other clocks."""
    from megatron_dcp import LLM, CacheConfig, SamplingParams
    from megatron_dcp.profiling.clock import Clock, ClockMetrics
    from megatron_dcp.profiling.measure import Ranges, measured

    clock, params = Clock(), SamplingParams(max_tokens=NEW, ignore_eos=True)
    llm = LLM(path, **sizes, cache=CacheConfig(block_size=4, num_blocks=20), metrics=ClockMetrics(clock))
    plain = [output.token_ids for output in llm.generate(PROMPTS, params)]
    assert clock.steps == []
    llm.weights_changed()
    names = []
    ranges = Ranges((names.append, lambda _: names.append(None)))
    before = originals(), [vars(layer.mlp).keys() for layer in llm.model.decoder.layers]
    stepped = llm.stats().step_s if llm.is_driver else 0.0
    start = time.perf_counter()
    clock.restart()
    with measured(llm, clock, ranges) as moments:
        assert torch.mm is not before[0][0]
        tokens = [output.token_ids for output in llm.generate(PROMPTS, params)]
    whole = time.perf_counter() - start
    stepped = llm.stats().step_s - stepped if llm.is_driver else 0.0
    assert (originals(), [vars(layer.mlp).keys() for layer in llm.model.decoder.layers]) == before
    assert tokens == plain
    count = len(clock.steps)
    llm.generate([[1, 2]], params)
    assert len(clock.steps) == count
    return clock.steps, moments, names, stepped, whole, llm.is_driver


def seconds(steps, kind, part):
    from megatron_dcp.profiling.clock import key_of

    return sum(step.parts[key_of(kind, part)] for step in steps)


def kinds_of(steps):
    from megatron_dcp.profiling.clock import KINDS, PARTS

    return {
        kind for i, kind in enumerate(KINDS) if any(sum(s.parts[i * len(PARTS) : (i + 1) * len(PARTS)]) for s in steps)
    }


def check_times(by_rank):
    """Parts add up to the steps; the steps hold what the engine times itself, and fit into the whole call."""
    for steps, _, _, stepped, whole, is_driver in by_rank:
        assert [step.phase for step in steps] == ["prefill"] + ["decode"] * (NEW - 1)
        assert [step.tokens for step in steps] == [43] + [2] * (NEW - 1)
        for step in steps:
            assert sum(step.parts) == pytest.approx(step.seconds, rel=1e-9)
            assert list(step.times) == sorted(step.times) and step.times[-1] <= step.seconds
        total = sum(step.seconds for step in steps)
        assert total <= whole and (not is_driver or total >= stepped)
        assert all(a.start_s + a.seconds <= b.start_s for a, b in zip(steps, steps[1:], strict=False))
    assert len({tuple((step.phase, step.tokens) for step in steps) for steps, *_ in by_rank}) == 1


@pytest.mark.mcore_line
def test_dense_layers_over_dcp():
    by_rank = run_on_ranks(2, measured_run, tiny_model("llama"), dict(decode_context_parallel_size=2))
    check_times(by_rank)
    for steps, *_ in by_rank:
        assert kinds_of(steps) == {"full attention", "dense FFN", "embedding", "logits", "engine"}
        for part in ("attention", "communication", "gemm", "rest"):
            assert seconds(steps, "full attention", part) > 0
        assert seconds(steps, "dense FFN", "gemm") > 0 == seconds(steps, "dense FFN", "communication")
        assert seconds(steps, "engine", "communication") > 0
    moments = by_rank[0][1]
    assert [moment.lengths for moment in moments] == [(40 + i, 3 + i) for i in range(NEW)]
    assert all(moment.num_blocks == 20 and moment.shared_blocks == 0 for moment in moments)
    assert all(moment.window_held is None for moment in moments)
    assert moments[0].held_blocks == 5 + 1 and moments[-1].held_blocks == 6 + 1
    assert by_rank[1][1] == []


def test_ranges_have_stable_names_and_close():
    ((_, _, names, *_),) = run_on_ranks(1, measured_run, tiny_model("mixtral"), {})
    opened = ["decode step", "embedding", *(f"layer {i} {each}" for i in (0, 1) for each in ("attention", "experts"))]
    opened.append("logits")
    assert [name for name in names if name][-len(opened) :] == opened
    assert names.count(None) == len(names) // 2
    assert names[0] == "prefill step" and names[-2:] == [None, None]


def test_megatrons_own_sums_are_communication():
    by_rank = run_on_ranks(2, measured_run, tiny_model("llama"), dict(tensor_model_parallel_size=2))
    check_times(by_rank)
    for steps, *_ in by_rank:
        for kind in ("dense FFN", "full attention", "embedding", "logits"):
            assert seconds(steps, kind, "communication") > 0, kind


def test_linear_layers_of_transformer_engine_are_products():
    from megatron_dcp.profiling.measure import _multiplies_in_te

    theirs = type("LayerNormLinear", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch.module"})
    norm = type("RMSNorm", (torch.nn.Module,), {"__module__": "transformer_engine.pytorch.module"})
    megatrons = type("TELayerNormColumnParallelLinear", (theirs,), {"__module__": "megatron.core.extensions"})
    assert [_multiplies_in_te(each()) for each in (theirs, megatrons, norm)] == [True, True, False]
    assert not _multiplies_in_te(torch.nn.Linear(1, 1))


@pytest.mark.mcore_line
def test_latents_experts_and_windows_are_kinds_of_their_own():
    by_rank = run_on_ranks(2, measured_run, tiny_model("deepseek_v3"), dict(decode_context_parallel_size=2))
    check_times(by_rank)
    for steps, *_ in by_rank:
        assert kinds_of(steps) == {"MLA", "experts", "dense FFN", "embedding", "logits", "engine"}
        assert seconds(steps, "MLA", "attention") > 0 and seconds(steps, "MLA", "communication") > 0
        assert seconds(steps, "experts", "gemm") > 0
    ((steps, moments, *_),) = run_on_ranks(1, measured_run, tiny_model("gemma3_text"), {})
    assert {"windows", "full attention"} <= kinds_of(steps)
    assert all(0 < moment.window_held <= 1 for moment in moments)


def test_stages_wait_for_each_other():
    by_rank = run_on_ranks(2, measured_run, tiny_model("llama"), dict(pipeline_model_parallel_size=2))
    check_times(by_rank)
    for steps, *_ in by_rank:
        assert seconds(steps, "stages", "communication") > 0


def whole_profile(rank, world, path, trace):
    from megatron_dcp import CacheConfig, parallel_state
    from megatron_dcp.profiling.run import profile

    prompts = [PROMPTS[0], [*PROMPTS[0][:24], 9, 9]]
    report = profile(
        path,
        prompts,
        max_new_tokens=NEW,
        trace=trace,
        decode_context_parallel_size=world,
        cache=CacheConfig(block_size=4, num_blocks=12),
    )
    parallel_state.destroy_model_parallel()
    return report.to_dict()


def test_the_report_of_a_run(tmp_path):
    first, second = run_on_ranks(2, whole_profile, tiny_model("llama"), str(tmp_path / "trace.json"))
    assert first == second
    assert [rank["rank"] for rank in first["ranks"]] == [0, 1] and first["ranks"][0]["is_driver"]
    for phase in first["phases"]:
        total = sum(sum(parts.values()) for parts in phase["table"].values())
        assert total == pytest.approx(phase["wall"], rel=1e-9)
    # 24 tokens are three logical blocks of 8, found by the second prompt
    assert first["prefix_hits"] == pytest.approx(24 / 66)
    assert max(point["held"] for point in first["kv"]) <= 1
    # tokens in the pool, the shared ones once: the second prompt waited a step for them
    assert max(sum(point["fill"]) for point in first["kv"]) * 2 * 24 == pytest.approx(43 + 28 - 24)
    for rank in (0, 1):
        trace = json.loads((tmp_path / f"trace.rank{rank}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"prefill step", "decode step", "embedding", "layer 1 attention", "layer 1 ffn"} <= names


def test_tokens_that_prompts_share():
    from megatron_dcp.profiling.run import shareable_tokens, trace_path

    assert shareable_tokens([[1, 2, 3], [1, 2, 4], [5], [1, 2, 3, 9]]) == 3 + 2
    assert shareable_tokens([[1, 2]]) == shareable_tokens([]) == 0
    assert trace_path("a/b.json", 0, 1) == "a/b.json" and trace_path("a/b.json", 3, 4) == "a/b.rank3.json"
