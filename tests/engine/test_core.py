import pytest
import torch
from fake_engine import VOCAB, FakeRunner, greedy_alone, request
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dcp.cache import KVLayout
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.engine.core import Engine
from megatron_dcp.engine.results import Decider
from megatron_dcp.engine.sampler import Sampler
from workers import run_on_ranks


class Alone:
    """A process group of one rank."""

    def size(self):
        return 1

    def rank(self):
        return 0


def make(*, group=None, layout=None, num_blocks=None, runners=None, **config) -> Engine:
    """An engine over fake runners, which are added to the list ``runners`` as they are made."""
    layout = layout or KVLayout(2, 1, 2)
    engine_config = EngineConfig(**config)

    def make_runner(blocks):
        blocks = blocks or num_blocks or 5
        runner = FakeRunner(layout, blocks, engine_config.prefill_chunk_size)
        if runners is not None:
            runners.append(runner)
        return runner

    cache = CacheConfig(block_size=layout.block_size, kv_interleave_size=layout.interleave, num_blocks=num_blocks)
    return Engine(make_runner, layout, cache, engine_config, Decider(Sampler(VOCAB), group or Alone()))


def finish(engine: Engine, requests) -> list[list[int]]:
    engine.add(requests)
    while engine.has_work:
        engine.step()
    assert not engine.decider.sampler._seeds  # an engine that runs for days keeps nothing of requests that ended
    engine.clear()
    return [r.token_ids for r in requests]


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(
            st.lists(st.integers(0, 96), min_size=1, max_size=15),
            st.integers(1, 8),
            st.sampled_from([{}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.7, "seed": 9, "top_p": 0.9}]),
        ),
        min_size=1,
        max_size=6,
    ),
    chunk=st.integers(1, 20),
    max_num_seqs=st.integers(1, 6),
)
def test_a_batch_yields_what_each_prompt_yields_alone(prompts, chunk, max_num_seqs):
    def ask(chosen):
        return [request(i, p, n, **params) for i, (p, n, params) in enumerate(chosen)]

    together = finish(make(prefill_chunk_size=chunk, max_num_seqs=max_num_seqs), ask(prompts))
    alone = [finish(make(), ask([prompt]))[0] for prompt in prompts]
    assert together == alone
    for (prompt, n, params), tokens in zip(prompts, together, strict=True):
        assert params or tokens == greedy_alone(prompt, n)


def test_a_pool_without_a_size_fits_the_largest_batch_and_grows():
    runners = []
    engine = make(runners=runners, max_num_seqs=2)  # blocks of 4 tokens
    finish(engine, [request(0, [1] * 4, 1), request(1, [1] * 9, 4), request(2, [1] * 5, 1)])
    assert [r.num_blocks for r in runners] == [3 + 2]
    finish(engine, [request(0, [1] * 20, 1)])
    assert len(runners) == 1  # it fits
    finish(engine, [request(0, [1] * 20, 2)])
    assert [r.num_blocks for r in runners] == [5, 6]


def test_a_pool_of_a_given_size_never_grows_and_refuses_what_cannot_fit():
    runners = []
    engine = make(runners=runners, num_blocks=3)
    with pytest.raises(ValueError, match="prompt 1 needs 13 tokens.*holds 12"):
        engine.add([request(0, [1] * 12, 1), request(1, [1] * 13, 1)])
    assert not engine.has_work  # prompt 0 was not queued either
    assert finish(engine, [request(0, [1] * 12, 1)]) == [greedy_alone([1] * 12, 1)]
    assert len(runners) == 1 and runners[0].num_blocks == 3


def test_clear_in_the_middle_and_start_again():
    engine = make(max_num_seqs=2)
    engine.add([request(i, [i, 2, 3], 9, temperature=1.0, seed=0) for i in range(4)])
    engine.step()
    engine.step()
    engine.clear()
    assert not engine.has_work and not engine.decider.sampler._seeds
    assert finish(engine, [request(0, [5, 6], 4)]) == [greedy_alone([5, 6], 4)]


def test_an_error_in_a_step_leaves_an_engine_that_can_be_cleared():
    engine = make()
    engine.add([request(0, [1, 2], 3)])
    engine.runner.step = lambda batch: torch.full((1, 5), torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        engine.step()
    engine.clear()
    assert not engine.has_work


def test_steps_hand_out_tokens_in_the_order_of_the_batch():
    engine = make(prefill_chunk_size=3)
    requests = [request(0, [1], 2), request(1, [1, 2, 3], 1), request(2, [7], 3)]
    engine.add(requests)
    events = []
    while engine.has_work:
        events.append([(sampled.request.index, sampled.token) for sampled in engine.step()])
    alone = {r.index: greedy_alone(r.prompt, r.max_tokens) for r in requests}
    assert events == [
        [(0, alone[0][0]), (2, alone[2][0])],
        [(0, alone[0][1]), (1, alone[1][0]), (2, alone[2][1])],
        [(2, alone[2][2])],
    ]


def run_everywhere(rank, world):
    from torch import distributed

    engine = make(group=distributed.group.WORLD, prefill_chunk_size=4, max_num_seqs=2)
    requests = [request(i, [i + 1] * (3 * i + 1), 5, temperature=0.8 * (i % 2)) for i in range(4)]
    return finish(engine, requests)


def fail_on_one_rank(rank, world):
    from torch import distributed

    engine = make(group=distributed.group.WORLD)
    if rank == 1:

        def fail(blocks):
            raise ValueError("no memory for the pool here")

        engine._make_runner = fail
    engine.add([request(0, [1], 1)])


def test_ranks_take_the_same_steps_without_a_seed():
    first, second = run_on_ranks(2, run_everywhere)
    assert first == second
    assert first[0] == greedy_alone([1], 5) and first[2] == greedy_alone([3] * 7, 5)


def test_a_pool_that_one_rank_cannot_make_is_an_error_on_all():
    errors = run_on_ranks(2, fail_on_one_rank, expect_errors=True)
    assert all(isinstance(error, ValueError) and "no memory for the pool here" in str(error) for error in errors)
