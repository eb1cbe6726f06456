"""A random workload on the real model, a long one on the fake: whatever happens around a prompt, it gets its tokens."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from fake_engine import greedy_alone, make_engine, request, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams, parallel_state
from megatron_dcp.engine.core import Engine
from megatron_dcp.engine.link import Link
from megatron_dcp.engine.request import Request
from megatron_dcp.engine.sampler import Sampler
from models import tiny_model

BLOCK = 4
SHARED = [list(range(10, 10 + n)) for n in (0, 5, 8, 19)]
KINDS = [{}, {"temperature": 0.9, "seed": 4}, {"repetition_penalty": 1.3}, {"logprobs": True, "prompt_logprobs": True}]


class Alone:
    """The real model on this process, and what it says to a prompt that has it to itself."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.answers = cache(self._answer)
        self.pools: dict[int | None, object] = {}

    def _answer(self, prompt: tuple[int, ...], max_tokens: int, kind: int) -> tuple:
        self.llm.weights_changed()
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **KINDS[kind])
        (output,) = self.llm.generate([list(prompt)], params)
        return output.token_ids, output.prompt_logprobs

    def engine(self, num_blocks: int | None, config: EngineConfig) -> Engine:
        llm = self.llm
        sizes = CacheConfig(block_size=BLOCK, num_blocks=num_blocks)
        link = Link(llm.groups.dcp_replica, 0)

        def make_runner(blocks):
            return llm._make_runner(blocks or num_blocks)

        return Engine(make_runner, llm.layout, sizes, config, Sampler(llm.prompt_reader.vocab_size), link)


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model(request):
    """The second has layers with a sliding window of 9."""
    llm = LLM(
        tiny_model(request.param), cache=CacheConfig(block_size=BLOCK), engine=EngineConfig(prefill_chunk_size=64)
    )
    yield Alone(llm)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


prompts = st.tuples(
    st.builds(
        lambda shared, own: tuple(SHARED[shared] + own),
        st.integers(0, len(SHARED) - 1),
        st.lists(st.integers(0, 99), min_size=1, max_size=9),
    ),
    st.integers(1, 6),
    st.integers(0, len(KINDS) - 1),
)
arrivals = st.tuples(prompts, st.integers(0, 12), st.one_of(st.none(), st.integers(0, 9)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    workload=st.lists(arrivals, min_size=1, max_size=7),
    num_blocks=st.sampled_from([None, 9, 12, 60]),  # the longest sequence needs 9
    chunk=st.integers(1, 24),
    max_num_seqs=st.integers(1, 5),
    drafts=st.integers(0, 2),
    prefix_caching=st.booleans(),
)
def test_every_prompt_gets_the_tokens_it_gets_alone(
    model, workload, num_blocks, chunk, max_num_seqs, drafts, prefix_caching
):
    """Requests arrive at a step, and some are aborted a few steps later."""
    config = EngineConfig(
        prefill_chunk_size=chunk, max_num_seqs=max_num_seqs, num_draft_tokens=drafts, prefix_caching=prefix_caching
    )
    engine = model.engine(num_blocks, config)
    requests = []
    for index, ((prompt, max_tokens, kind), _, _) in enumerate(workload):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **KINDS[kind])
        requests.append(Request(index=index, prompt=list(prompt), params=params, max_tokens=max_tokens))
    last = max(max(start, start + (after or 0)) for _, start, after in workload)
    step = 0
    while step <= last or engine.has_work:
        for one, (_, start, after) in zip(requests, workload, strict=True):
            if start == step:
                engine.add_request(one)
            if after is not None and start + after == step:
                engine.abort(one.index)
        if engine.has_work:
            engine.step()
        if engine.scheduler is not None:
            engine.scheduler.check_integrity()
        step += 1
    for one, ((prompt, max_tokens, kind), _, after) in zip(requests, workload, strict=True):
        tokens, prompt_logprobs = model.answers(prompt, max_tokens, kind)
        if after is None:
            assert one.finish_reason == "length"
        assert one.token_ids == tokens[: len(one.token_ids)]
        if one.finish_reason == "length":
            assert len(one.token_ids) == max_tokens
            if prompt_logprobs:
                assert one.prompt_logprobs == pytest.approx(prompt_logprobs[1:], abs=1e-4)
    assert engine.stats().kv_used_tokens == 0


def test_thousands_of_requests_leave_an_empty_pool():
    rng = random.Random(5)
    engine = make_engine(num_blocks=7, max_num_seqs=6, prefill_chunk_size=16, num_draft_tokens=1)  # 28 tokens
    requests = []
    for index in range(2000):
        prompt = [rng.randrange(3)] * rng.choice((0, 4, 9)) + [rng.randrange(97) for _ in range(rng.randint(1, 6))]
        params = rng.choice(({}, {"temperature": 1.0}, {"frequency_penalty": 0.5}, {"stop_token_ids": [7, 8]}))
        requests.append(request(index, prompt, rng.randint(1, 6), **params))
        engine.add_request(requests[-1])
        while engine.stats().waiting > 5:
            engine.step()
        if rng.random() < 0.1:
            engine.abort(rng.choice(requests[-12:]).index)
    run(engine)
    assert all(one.finish_reason for one in requests)
    for one in requests:
        if one.params == SamplingParams(max_tokens=one.max_tokens) and one.finish_reason == "length":
            assert one.token_ids == greedy_alone(one.prompt, one.max_tokens)
    stats = engine.stats()
    assert sum(stats.finished.values()) == 2000 and stats.finished["abort"] > 50 and stats.preemptions > 50
    assert stats.kv_used_tokens == 0 and stats.prefix_hit_tokens > 1000
    assert not engine.recorder._arrivals and not engine.recorder._firsts and not engine.drafter._indexes
    assert not engine.sampler._shapers
