"""What the engine adds to plain generation, on real ranks: samples, stop strings, drafts, prefixes, preemption."""

from __future__ import annotations

import pytest

from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams
from models import tiny_model
from workers import run_on_ranks

PROMPTS = ["once upon a time, " * 4, "once upon a time, " * 4 + "there", "x", "once"]


def generate(rank, world, path, dcp, params, engine=None, cache=None, calls=1):
    llm = LLM(
        path,
        decode_context_parallel_size=dcp,
        cache=CacheConfig(block_size=4, **(cache or {})),
        engine=EngineConfig(prefill_chunk_size=20, **(engine or {})),
    )
    outputs = []
    for _ in range(calls):
        outputs.append(llm.generate(PROMPTS, SamplingParams(**params)))
    stats = llm.stats() if llm.is_driver else None
    return outputs, stats and (stats.preemptions, stats.prefix_hit_tokens)


@pytest.fixture(scope="module")
def path() -> str:
    return str(tiny_model(tokenizer=True))


SAMPLED = dict(max_tokens=24, ignore_eos=True, temperature=0.9, seed=7, repetition_penalty=1.2, logprobs=True)
GREEDY = dict(max_tokens=24, ignore_eos=True, logprobs=True)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "engine,cache",
    [
        ({"num_draft_tokens": 3}, {}),
        ({"prefix_caching": False}, {}),
        ({}, {"num_blocks": 16}),  # 128 tokens for three sequences that need about 80 each
        ({"num_draft_tokens": 2}, {"num_blocks": 14}),
    ],
    ids=["drafts", "no prefix cache", "preempted", "preempted drafts"],
)
def test_how_it_is_computed_changes_no_token(path, params, engine, cache):
    (alone,), _ = run_on_ranks(1, generate, path, 1, params)[0]
    everywhere = run_on_ranks(2, generate, path, 2, params, engine, cache)
    for (outputs,), counts in everywhere:
        assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
        assert [output.text for output in outputs] == [output.text for output in alone]
        for one, other in zip(outputs, alone, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert not cache or counts is None or counts[0] > 0
    assert everywhere[0][0] == everywhere[1][0] and everywhere[0][1] is not None


def test_prefixes_are_reused_between_calls(path):
    for (first, second), counts in run_on_ranks(2, generate, path, 2, GREEDY, None, None, 2):
        assert [output.token_ids for output in first] == [output.token_ids for output in second]
        cached = [output.num_cached_tokens for output in second]
        lens = [len(output.prompt_token_ids) for output in second]
        assert cached == [(n - 1) // 8 * 8 for n in lens] and (counts is None or counts[1] >= sum(cached))


def test_samples_share_the_prompt_and_differ(path):
    params = dict(SAMPLED, n=3, prompt_logprobs=True)
    (alone,), _ = run_on_ranks(1, generate, path, 1, params)[0]
    (single,), _ = run_on_ranks(1, generate, path, 1, SAMPLED)[0]
    assert [output.token_ids for output in alone[::3]] == [output.token_ids for output in single]
    for (outputs,), _ in run_on_ranks(2, generate, path, 2, params):
        assert [(output.index, output.sample) for output in outputs] == [(i, s) for i in range(4) for s in range(3)]
        assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
        assert len({tuple(output.token_ids) for output in outputs[:3]}) == 3
        for one, other in zip(outputs, alone, strict=True):
            assert one.prompt_logprobs[0] is None and len(one.prompt_logprobs) == len(one.prompt_token_ids)
            assert one.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-4)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_stop_string_ends_text_and_tokens(path, drafts):
    (plain,), _ = run_on_ranks(1, generate, path, 1, GREEDY)[0]
    stop = plain[0].text[5:7]
    assert len(stop) == 2
    params = dict(GREEDY, stop=[stop])
    for (outputs,), _ in run_on_ranks(2, generate, path, 2, params, {"num_draft_tokens": drafts}):
        for output, whole in zip(outputs, plain, strict=True):
            assert output.text == whole.text.split(stop)[0]
            assert output.token_ids == whole.token_ids[: len(output.token_ids)]
            assert output.finish_reason == ("stop" if stop in whole.text else "length")
