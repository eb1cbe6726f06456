import pytest
import torch
from fake_engine import greedy_alone, make_engine, request, run, runner_maker
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dcp.cache import KVLayout
from megatron_dcp.engine.follower import Follower
from megatron_dcp.engine.link import Link
from workers import run_on_ranks


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

    together = run(make_engine(prefill_chunk_size=chunk, max_num_seqs=max_num_seqs), ask(prompts))
    alone = [run(make_engine(), ask([prompt]))[0] for prompt in prompts]
    assert together == alone
    for (prompt, n, params), tokens in zip(prompts, together, strict=True):
        assert params or tokens == greedy_alone(prompt, n)


def test_a_pool_without_a_size_fits_the_largest_batch_and_grows():
    runners = []
    engine = make_engine(runners=runners, max_num_seqs=2)  # blocks of 4 tokens
    run(engine, [request(0, [1] * 4, 1), request(1, [1] * 9, 4), request(2, [1] * 5, 1)])
    assert [r.num_blocks for r in runners] == [3 + 2]
    run(engine, [request(0, [1] * 20, 1)])
    assert len(runners) == 1  # it fits
    run(engine, [request(0, [1] * 20, 2)])
    assert [r.num_blocks for r in runners] == [5, 6]


def test_a_pool_of_a_given_size_never_grows_and_refuses_what_cannot_fit():
    runners = []
    engine = make_engine(runners=runners, num_blocks=3)
    with pytest.raises(ValueError, match="prompt 1 needs 13 tokens.*holds 12"):
        engine.add([request(0, [1] * 12, 1), request(1, [1] * 13, 1)])
    assert not engine.has_work  # prompt 0 was not queued either
    assert run(engine, [request(0, [1] * 12, 1)]) == [greedy_alone([1] * 12, 1)]
    assert len(runners) == 1 and runners[0].num_blocks == 3


def test_clear_in_the_middle_and_start_again():
    engine = make_engine(max_num_seqs=2)
    engine.add([request(i, [i, 2, 3], 9, temperature=1.0, seed=0) for i in range(4)])
    engine.step()
    engine.step()
    engine.clear()
    assert not engine.has_work and not engine.sampler._seeds
    assert run(engine, [request(0, [5, 6], 4)]) == [greedy_alone([5, 6], 4)]


def test_an_error_in_a_step_leaves_an_engine_that_can_be_cleared():
    engine = make_engine()
    engine.add([request(0, [1, 2], 3)])
    engine.runner.step = lambda batch: torch.full((1, 5), torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        engine.step()
    engine.clear()
    assert not engine.has_work


class Tokenizer:
    """Cannot decode one token."""

    def __init__(self, bad):
        self.bad = bad

    def decode(self, tokens, skip_special_tokens=True):
        if self.bad in tokens:
            raise LookupError("no such token")
        return "".join(map(chr, tokens))


def test_what_goes_wrong_with_one_request_of_many_ends_that_one():
    """As `AsyncLLM` has it: requests of one call fail together instead."""
    prompts = [[1, 2, 3], [4, 5], [6, 7]]
    second = greedy_alone(prompts[2], 4)[1]
    engine = make_engine(tell_outcomes=False, tokenizer=Tokenizer(second), num_blocks=60)
    poisoned = request(1, prompts[1], 4, min_tokens=2, stop_token_ids=range(97))
    unreadable = request(2, prompts[2], 4, stop=["~"])
    innocent = request(0, prompts[0], 4)
    engine.add([innocent, poisoned, unreadable])
    failures = []
    while engine.has_work:
        engine.step()
        failures += engine.take_failures()
    assert [(r.index, type(error)) for r, error in failures] == [(1, ValueError), (2, LookupError)]
    assert "min_tokens=2 of prompt 1 forbids every token" in str(failures[0][1])
    assert poisoned.finish_reason == unreadable.finish_reason == "abort" and not poisoned.token_ids
    assert innocent.token_ids == greedy_alone(prompts[0], 4) and innocent.finish_reason == "length"
    assert run(engine, [request(9, prompts[1], 4)]) == [greedy_alone(prompts[1], 4)]


def test_a_request_that_no_pool_can_hold_ends_alone_also_while_others_run():
    made = []

    def no_memory_above(limit, make):
        def make_runner(blocks):
            if blocks > limit:
                raise ValueError(f"no memory for {blocks} blocks")
            made.append(blocks)
            return make(blocks)

        return make_runner

    engine = make_engine(tell_outcomes=False)
    engine._make_runner = no_memory_above(50, engine._make_runner)
    first, huge, later = request(0, [1] * 8, 5), request(1, [2], 10_000), request(2, [3] * 30, 20)
    engine.add([first])
    engine.step()
    engine.add([huge])
    engine.add([later])
    run(engine)
    ((failed, error),) = engine.take_failures()
    assert failed is huge and "no memory for" in str(error) and huge.finish_reason == "abort"
    assert first.token_ids == greedy_alone(first.prompt, 5) and later.token_ids == greedy_alone(later.prompt, 20)
    assert made == [3, 13]


def test_steps_hand_out_tokens_in_the_order_of_the_batch():
    engine = make_engine(prefill_chunk_size=3)
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


def test_requests_arrive_and_are_aborted_while_others_run():
    engine = make_engine(num_blocks=20, max_num_seqs=2, prefill_chunk_size=4)
    requests = [request(i, [i + 1] * (2 * i + 1), 6) for i in range(6)]
    engine.add(requests[:2])
    engine.step()
    engine.add_request(requests[2])
    engine.add(requests[3:])
    engine.step()
    got = list(requests[0].token_ids)
    assert engine.abort(0) is requests[0] and engine.abort(5) is requests[5]  # one runs, one waits
    assert engine.abort(0) is None and engine.abort(77) is None
    run(engine)
    assert [r.finish_reason for r in requests] == ["abort", *["length"] * 4, "abort"]
    assert requests[0].token_ids == got and not requests[5].token_ids
    assert all(r.token_ids == greedy_alone(r.prompt, 6) for r in requests[1:5])
    assert engine.stats().finished == {"length": 4, "abort": 2}


def test_an_abort_between_the_halves_of_a_step_drops_what_the_step_computes():
    engine = make_engine(num_blocks=20)
    one, other = request(0, [1, 2], 5, temperature=1.0), request(1, [3], 5)
    engine.add([one, other])
    engine.step()
    engine.plan()
    engine.abort(0)
    assert [sampled.request.index for sampled in engine.compute()] == [1]
    run(engine)
    assert len(one.token_ids) == 1 and other.token_ids == greedy_alone([3], 5)


def test_a_pool_without_a_size_grows_only_while_nothing_runs():
    runners = []
    engine = make_engine(runners=runners, max_num_seqs=3)  # blocks of 4 tokens
    first, small, large = request(0, [1] * 4, 5), request(1, [2], 2), request(2, [3] * 30, 3)
    engine.add([first])
    engine.add_request(small)  # nothing has run yet
    assert [r.num_blocks for r in runners] == [2, 3]
    engine.step()
    engine.add_request(large)
    behind = request(3, [4], 2)
    engine.add_request(behind)  # it would fit soon, but arrived later
    while not first.finish_reason:
        engine.step()
        assert len(runners) == 2 and not large.token_ids and not behind.token_ids
    assert engine.stats().waiting == 2
    run(engine)
    assert [r.num_blocks for r in runners] == [2, 3, 8 + 1]
    assert [r.token_ids for r in (first, small, large, behind)] == [
        greedy_alone(r.prompt, r.max_tokens) for r in (first, small, large, behind)
    ]
    engine.add_request(request(4, [1], 9))
    engine.step()
    engine.add_request(request(5, [1] * 99, 9))
    assert engine.abort(5).finish_reason == "abort"  # it waits for a larger pool
    run(engine)
    assert len(runners) == 3


def test_requests_that_wait_keep_their_pool_if_a_larger_one_cannot_be_made():
    runners = []
    engine = make_engine(runners=runners)
    make = engine._make_runner

    def refuse(blocks):
        if blocks > 5:
            raise ValueError("no memory")
        return make(blocks)

    engine._make_runner = refuse
    engine.add_request(first := request(0, [1] * 4, 5))
    with pytest.raises(ValueError, match="no memory"):
        engine.add_request(request(1, [1] * 90, 5))
    run(engine)
    assert first.token_ids == greedy_alone([1] * 4, 5)
    assert [r.num_blocks for r in runners] == [2, 2]


def test_statistics_add_up():
    engine = make_engine(num_blocks=8, max_num_seqs=2, prefill_chunk_size=8)
    requests = [request(i, [1] * 9, 4) for i in range(3)]
    engine.add(requests)
    engine.step()
    during = engine.stats()
    assert (during.waiting, during.running) in {(1, 2), (2, 1)} and during.kv_capacity_tokens == 8 * 4
    assert 0 < during.kv_used_tokens <= 32 and during.prompt_tokens == 8
    run(engine)
    after = engine.stats()
    assert (after.waiting, after.running, after.kv_used_tokens) == (0, 0, 0)
    assert after.prompt_tokens + after.prefix_hit_tokens == after.prefix_query_tokens == 27
    assert after.generated_tokens == 12 and after.finished == {"length": 3}
    assert after.ttft_s.count == after.tpot_s.count == 3
    assert after.step_s >= after.attention_s + after.communication_s and after.steps > 0
    engine.add([request(5, [2], 1)])
    engine.clear()  # dropped without an end
    assert engine.stats().finished == {"length": 3} and not engine.recorder._arrivals


def test_a_line_is_logged_at_most_once_an_interval(caplog):
    with caplog.at_level("INFO", logger="megatron_dcp"):
        run(make_engine(), [request(0, [1], 4)])
        assert not caplog.records  # ten seconds are not over
        run(make_engine(log_interval_s=0), [request(0, [1], 4)])
    assert len(caplog.records) == 4
    line = caplog.records[1].getMessage()
    assert line.startswith("step 2: 1 running, 0 waiting, 0 finished, KV 4 of 4 tokens (100%), prompt "), line


REQUESTS = [([i + 1] * (3 * i + 1), 5, {"temperature": 0.8 * (i % 2), "logprobs": i == 3}) for i in range(4)]


def drive_or_follow(rank, world, num_blocks, config):
    """Batches that this rank computed, and what it knows of the requests."""
    from torch import distributed

    runners = []
    if rank == 0:
        engine = make_engine(group=distributed.group.WORLD, num_blocks=num_blocks, runners=runners, **config)
        requests = [request(i, p, n, **params) for i, (p, n, params) in enumerate(REQUESTS)]
        for one in requests:  # one more in every step
            engine.add_request(one)
            engine.step()
        while engine.has_work:
            engine.step()
        engine.end()
        engine.clear()
        known = {r.index: (r.token_ids, r.logprobs, r.finish_reason, r.num_cached_tokens) for r in requests}
        assert not engine.stats().kv_used_tokens
    else:
        follower = Follower(
            runner_maker(KVLayout(2, 1, 2), num_blocks, runners=runners), Link(distributed.group.WORLD, 0)
        )
        known = {}
        for outcomes in follower.follow():
            for one in outcomes:
                tokens, logprobs, *_ = known.get(one.request, ([], []))
                known[one.request] = (
                    tokens + one.tokens,
                    logprobs + one.logprobs,
                    one.finish_reason,
                    one.num_cached_tokens,
                )
    steps = [[(seq.token_ids, seq.start, seq.num_logits) for seq in batch.seqs] for r in runners for batch in r.batches]
    return steps, known, [sorted(r.slots.items()) for r in runners]


@pytest.mark.parametrize(
    ("num_blocks", "config"),
    [
        (None, {}),
        (7, {"prefill_chunk_size": 4, "max_num_seqs": 3}),  # preempts
        (12, {"num_draft_tokens": 3, "max_num_seqs": 2}),
    ],
    ids=["grows", "preempts", "drafts"],
)
def test_followers_compute_the_same_steps_and_hear_of_every_token(num_blocks, config):
    first, *others = run_on_ranks(3, drive_or_follow, num_blocks, config)
    assert first[1][0][0] == greedy_alone([1], 5) and first[1][2][0] == greedy_alone([3] * 7, 5)
    for steps, known, slots in others:
        assert steps == first[0]
        assert repr(known) == repr(first[1])  # NaN where no log-probability is asked for
        assert slots == first[2]  # every token in the same block


def fail_on_one_rank(rank, world):
    from torch import distributed

    def fail(blocks):
        raise ValueError("no memory for the pool here")

    if rank == 0:
        engine = make_engine(group=distributed.group.WORLD)
        try:
            engine.add([request(0, [1], 1)])
        except ValueError as error:
            engine.fail(error)
            raise
    follower = Follower(fail if rank == 1 else runner_maker(KVLayout(2, 1, 2), None), Link(distributed.group.WORLD, 0))
    list(follower.follow())


def test_a_pool_that_one_rank_cannot_make_is_an_error_on_all():
    errors = run_on_ranks(3, fail_on_one_rank, expect_errors=True)
    assert all(isinstance(error, ValueError) and "no memory for the pool here" in str(error) for error in errors), (
        errors
    )


def end_in_the_middle(rank, world):
    from torch import distributed

    if rank == 0:
        engine = make_engine(group=distributed.group.WORLD)
        for _ in range(2):
            engine.add([request(0, [1], 4)])
            engine.step()
            engine.plan()
            engine.end()
            engine.end()  # nothing more to do
            engine.clear()
        engine.add([request(0, [1], 4)])
        engine.runner.step = lambda batch: torch.full((1, 5), torch.nan)
        with pytest.raises(ValueError, match="NaN"):
            engine.step()
        engine.fail(ValueError("they know"))
        return None
    follower = Follower(runner_maker(KVLayout(2, 1, 2), None), Link(distributed.group.WORLD, 0))
    lengths = [len(list(follower.follow())) for _ in range(2)]
    with pytest.raises(ValueError, match="logits of prompt 0 hold NaN or infinity after 1 tokens"):
        list(follower.follow())
    return lengths


def test_a_run_ends_where_the_driver_ends_it():
    assert run_on_ranks(2, end_in_the_middle) == [None, [4, 3]]  # pool, two steps, end; then the pool is there
