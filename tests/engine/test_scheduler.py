import random
from itertools import count

import pytest
import torch
from fake_engine import FakeRunner, greedy_alone, greedy_results, logits_after, request
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dcp.cache import KVLayout
from megatron_dcp.engine.batch import Window
from megatron_dcp.engine.scheduler import MAX_PREFILLS, Scheduler


class Driver:
    """A scheduler over a fake runner with greedy sampling, which holds every step to the rules."""

    def __init__(
        self,
        num_blocks=8,
        *,
        dcp=2,
        interleave=1,
        block_size=2,
        max_num_seqs=64,
        chunk=16,
        window=None,
        window_spare=0,
        **options,
    ):
        self.layout = KVLayout(dcp, interleave, block_size)
        self.chunk, self.max_num_seqs = chunk, max_num_seqs
        if window is not None:
            window = Window(window, min(num_blocks, self.layout.window_blocks(window, 1) + window_spare))
        self.scheduler = Scheduler(
            self.layout, num_blocks, max_num_seqs=max_num_seqs, prefill_chunk_size=chunk, window=window, **options
        )
        self.runner = FakeRunner(self.layout, num_blocks, chunk, window)
        self.steps = []
        self.finished = []

    def add(self, *args, **params):
        made = request(*args, **params)
        self.scheduler.add(made)
        return made

    def step(self):
        step = self.plan()
        self.commit(step)
        return step

    def plan(self):
        scheduler = self.scheduler
        decoding = [r for r in scheduler.running if r.token_ids and r.num_computed == r.num_tokens - 1]
        step = scheduler.schedule()
        self.check(step, decoding)
        scheduler.check_integrity()
        self.steps.append(
            [(r.index, s.start, len(s.token_ids)) for r, s in zip(step.requests, step.batch.seqs, strict=True)]
        )
        return step

    def commit(self, step):
        logits = self.runner.step(step.batch)
        self.finished += self.scheduler.commit(step, greedy_results(step.entries, logits))
        self.scheduler.check_integrity()

    def run(self):
        while self.scheduler.has_work:
            self.step()
        self.check_empty()

    def check(self, step, decoding):
        scheduler, budget = self.scheduler, 0
        assert len(step.requests) == len(set(step.requests)) == len(step.batch.seqs) <= self.max_num_seqs
        entries = iter(step.entries)
        for r, seq in zip(step.requests, step.batch.seqs, strict=True):
            entry = next(entries) if seq.num_logits else None
            assert entry is None or (entry.request is r and entry.num_logits == seq.num_logits)
            drafted = len(entry.draft) if entry else 0
            assert seq.start == r.num_computed
            assert list(seq.token_ids) == r.tokens[seq.start :][: len(seq.token_ids) - drafted] + list(
                entry.draft if entry else []
            )
            budget += 0 if r in decoding else len(seq.token_ids)
            # What is shared or cached is never written to.
            for block in seq.block_table[seq.start // self.layout.logical_block_tokens :]:
                assert scheduler.pool.holders(block) == 1 and block not in scheduler.pool.kept
        assert next(entries, None) is None
        assert budget <= self.chunk
        assert all(r in step.requests for r in decoding if r in scheduler.running)

    def check_empty(self):
        scheduler = self.scheduler
        assert (scheduler.num_waiting, scheduler.num_running, scheduler.used_tokens) == (0, 0, 0)
        if scheduler.window is None:
            assert scheduler.cache.num_available == scheduler.pool.num_blocks
        else:
            assert scheduler.window.num_available == scheduler.window.pool.num_blocks
        assert scheduler.pool.num_free + scheduler.cache.num_cached == scheduler.pool.num_blocks

    def tables(self, *requests):
        return [self.scheduler.pool.table(r.index) for r in requests]


def clumsy_drafter(length, wrong):
    """Proposes what comes, but one token in ``wrong`` is not it."""
    rng = random.Random(3)

    def draft(r):
        comes = greedy_alone(r.tokens, length)
        return [token if rng.randrange(wrong) else (token + 1) % 97 for token in comes]

    return draft


prefixes = [[p * 7 + i % 5 for i in range(24)] for p in range(3)]
prompts = st.one_of(
    st.lists(st.integers(0, 96), min_size=1, max_size=20),
    st.builds(
        lambda prefix, cut, tail: prefix[:cut] + tail,
        st.sampled_from(prefixes),
        st.integers(1, 24),
        st.lists(st.integers(0, 96), max_size=4),
    ),
)


@settings(max_examples=200, deadline=None)
@given(
    asked=st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(0, 15)), min_size=1, max_size=10),
    aborted=st.dictionaries(st.integers(0, 9), st.integers(0, 25), max_size=3),
    dcp=st.integers(1, 4),
    cut=st.sampled_from([(1, 1), (1, 2), (2, 2), (2, 4), (3, 3)]),
    chunk=st.integers(1, 30),
    max_num_seqs=st.integers(1, 9),
    spare=st.integers(0, 12),
    prefix_caching=st.booleans(),
    drafter=st.sampled_from([None, (1, 2), (3, 2), (5, 4), (3, 1)]),
    window=st.sampled_from([None, None, 1, 3, 8, 100]),
    window_spare=st.integers(0, 9),
    data=st.data(),
)
def test_every_request_yields_what_it_yields_alone(
    asked, aborted, dcp, cut, chunk, max_num_seqs, spare, prefix_caching, drafter, window, window_spare, data
):
    layout = KVLayout(dcp, *cut)
    requests = [
        request(i, prompt, n, prompt_logprobs=data.draw(st.integers(0, 5)) == 0)
        for i, (prompt, n, _) in enumerate(asked)
    ]
    for previous, r in zip(requests, requests[1:], strict=False):
        if data.draw(st.integers(0, 3)) == 0:
            r.leader = previous.leader or previous
            r.prompt, r.params = list(r.leader.prompt), r.leader.params
    # From a pool that only just holds the largest of them, so that others wait and are preempted.
    driver = Driver(
        max(layout.blocks_for(r.cached_tokens) for r in requests) + spare,
        dcp=dcp,
        interleave=cut[0],
        block_size=cut[1],
        chunk=chunk,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
        drafter=clumsy_drafter(*drafter) if drafter else None,
        window=window,
        window_spare=window_spare,
    )
    due, arrival = [], 0
    for r, (_, _, pause) in zip(requests, asked, strict=True):
        arrival += max(0, pause - 8)
        due.append((arrival, r))
    for now in count():
        while due and due[0][0] <= now:
            driver.scheduler.add(due.pop(0)[1])
        if not due and not driver.scheduler.has_work:
            break
        for index in (i for i, when in aborted.items() if when == now):
            gone = driver.scheduler.abort(index)
            assert gone is None or (gone is requests[index] and gone.finish_reason == "abort")
            driver.scheduler.check_integrity()
        if driver.scheduler.has_work:
            driver.step()
        assert now < 5000
    driver.check_empty()
    for r in requests:
        alone = greedy_alone(r.prompt, r.max_tokens)
        if r.finish_reason == "abort":
            assert r.token_ids == alone[: len(r.token_ids)] and r.index in aborted
            continue
        assert r.finish_reason == "length" and r in driver.finished
        assert r.token_ids == alone
        if r.params.prompt_logprobs:
            assert r.prompt_logprobs == pytest.approx(prompt_logprobs(r.prompt), abs=1e-5)


def prompt_logprobs(prompt):
    return [float(logits_after(prompt[:i]).log_softmax(-1)[prompt[i]]) for i in range(1, len(prompt))]


@pytest.mark.parametrize(("num_blocks", "window"), [(24, None), (200, None), (24, 6), (200, 6)])
def test_a_soak_leaves_the_pool_empty(num_blocks, window):
    rng = random.Random(num_blocks)
    driver = Driver(
        num_blocks, max_num_seqs=16, chunk=32, drafter=lambda r: r.prompt[:2], window=window, window_spare=6
    )
    scheduler, live, made = driver.scheduler, {}, 0
    while made < 1500 or scheduler.has_work:
        while made < 1500 and len(live) < 24:
            prefix = rng.choice(prefixes)[: rng.randrange(25)]
            prompt = prefix + [rng.randrange(97) for _ in range(rng.choice([1, 1, 5, 40]))]
            live[made] = driver.add(made, prompt, rng.randrange(1, 8))
            made += 1
        step = scheduler.schedule()
        logits = driver.runner.step(step.batch)
        driver.runner.batches.clear()
        for r in scheduler.commit(step, greedy_results(step.entries, logits)):
            assert r.token_ids == greedy_alone(r.prompt, r.max_tokens)
            del live[r.index]
        if rng.random() < 0.02:
            gone = rng.choice([*live, -1])
            assert (scheduler.abort(gone) is None) == (gone == -1)
            live.pop(gone, None)
        if rng.random() < 0.1:
            scheduler.check_integrity()
    assert not live
    scheduler.check_integrity()
    driver.check_empty()
    assert (scheduler.num_preemptions > 100) == (num_blocks == 24 or window is not None)
    assert 0 < scheduler.prefix_hit_tokens < scheduler.prefix_query_tokens
    scheduler.weights_changed()
    assert scheduler.pool.num_free == num_blocks


def test_capacity_is_that_of_the_group_to_the_token():
    # 3 blocks x 2 tokens x 4 ranks = 24 tokens; the last generated token needs no place.
    driver = Driver(3, dcp=4)
    assert driver.scheduler.capacity_tokens == 24
    driver.add(0, [1] * 20, 5)
    driver.run()
    with pytest.raises(
        ValueError, match=r"prompt 7 needs 25 tokens.*prompt 20 \+ max_tokens 6.*holds 24 \(3 blocks x 8"
    ):
        driver.add(7, [1] * 20, 6)
    assert not driver.scheduler.has_work


def test_prefill_and_decode_share_a_step_within_the_budget():
    driver = Driver(40, chunk=4)
    driver.add(0, [1, 2], 6)
    driver.add(1, list(range(10)), 3)
    driver.run()
    assert driver.steps[:4] == [
        [(0, 0, 2), (1, 0, 2)],
        [(0, 2, 1), (1, 2, 4)],
        [(0, 3, 1), (1, 6, 4)],
        [(0, 4, 1), (1, 10, 1)],
    ]


def test_long_prompts_leave_half_of_the_budget_to_short_ones():
    driver = Driver(400, chunk=16)
    driver.add(0, [1] * 200, 2)
    driver.step()
    assert driver.steps[-1] == [(0, 0, 16)]  # nobody else wants any
    for i in range(1, 4):
        driver.add(i, [i + 1] * 200, 2)
    driver.step()
    assert driver.steps[-1] == [(0, 16, 8), (1, 0, 8)]
    short = driver.add(4, [9, 8, 7], 2)
    driver.step()
    assert driver.steps[-1] == [(0, 24, 8), (1, 8, 5), (4, 0, 3)]
    assert len(short.token_ids) == 1
    driver.run()


def test_the_oldest_of_many_prompts_gets_half_while_short_ones_keep_coming():
    driver = Driver(400, chunk=8)
    driver.add(0, [1] * 80, 1)
    for i in range(1, 21):
        driver.add(i, [i + 1] * 6, 1)
        driver.step()
        assert driver.steps[-1][0][2] == (8 if i == 0 else 4)
    assert driver.scheduler.running[0].index != 0


def test_prompts_in_prefill_are_bounded_unless_they_end_at_once():
    driver = Driver(400, chunk=40)
    for i in range(30):
        driver.add(i, [i] * 100, 1)
    driver.step()
    assert driver.scheduler.num_running == MAX_PREFILLS
    driver = Driver(400, chunk=40)
    for i in range(30):
        driver.add(i, [i, i], 2)
    driver.step()
    assert driver.scheduler.num_running == 20
    driver.step()
    assert driver.scheduler.num_running == 10  # two tokens each: the first twenty have ended


def test_a_large_request_at_the_head_is_not_overtaken():
    driver = Driver(8, dcp=1, block_size=1)
    first = driver.add(0, [1, 2], 6)
    driver.step()
    driver.add(1, [1, 2, 3, 4, 5, 6, 7], 1)
    driver.add(2, [5], 1)
    while first.finish_reason is None:
        driver.step()
        assert [index for index, _, _ in driver.steps[-1]] == [0]
    driver.run()
    assert [r.index for r in driver.finished] == [0, 1, 2]


def test_the_newest_is_preempted_and_resumes_from_what_is_left_of_it():
    driver = Driver(8, dcp=1, block_size=2, chunk=8)
    old, new = driver.add(0, [1, 2, 3, 4], 10), driver.add(1, [5, 6, 7, 8], 8)
    while not driver.scheduler.num_preemptions:
        driver.step()
    assert driver.scheduler.running == [old] and driver.scheduler.waiting == [new]
    assert new.num_computed == 0 and new.token_ids and new.finish_reason is None
    driver.run()
    assert driver.scheduler.num_preemptions == 1
    again = next(step for step in driver.steps[::-1] if step[0][0] == 1 and step[0][2] > 1)
    assert 0 < again[0][1] < 8  # its first blocks were still there
    for r in (old, new):
        assert r.token_ids == greedy_alone(r.prompt, r.max_tokens) and r.num_cached_tokens == 0


def test_a_prompt_in_prefill_waits_for_room_before_it_preempts():
    driver = Driver(6, dcp=1, block_size=2, chunk=4, prefix_caching=False)
    long = driver.add(0, list(range(12)), 1)
    driver.step()
    new = driver.add(1, [50, 51], 6)
    driver.step()
    assert new.token_ids
    driver.run()
    assert long.token_ids == greedy_alone(long.prompt, 1) and new.token_ids == greedy_alone(new.prompt, 6)
    assert driver.finished == [long, new] and driver.scheduler.num_preemptions == 1


def test_a_stop_token_frees_the_blocks_at_once():
    prompt = [3, 4]
    alone = greedy_alone(prompt, 8)
    driver = Driver(4, prefix_caching=False)
    r = driver.add(0, prompt, 8, stop_token_ids=[alone[3]])
    driver.run()
    assert r.token_ids == alone[: alone.index(alone[3]) + 1]
    assert r.finish_reason == "stop"
    assert driver.scheduler.pool.num_free == 4


def test_prefixes_are_reused_in_whole_blocks_and_one_token_is_always_computed():
    driver = Driver(40)  # blocks of 4 tokens
    prompt = list(range(12))
    for index, (asked, hit) in enumerate(
        [(prompt, 0), (prompt, 8), ([*prompt, 50], 12), (prompt[:11], 8), (prompt[:7] + [60], 4), ([9, *prompt], 0)]
    ):
        r = driver.add(index, asked, 3)
        driver.run()
        assert r.num_cached_tokens == hit
        assert r.token_ids == greedy_alone(asked, 3)
    assert driver.scheduler.prefix_query_tokens == 12 + 12 + 13 + 11 + 8 + 13
    assert driver.scheduler.prefix_hit_tokens == 8 + 12 + 8 + 4


def test_a_prefix_is_computed_once_for_those_that_come_together():
    driver = Driver(num_blocks=64, dcp=1, block_size=2, chunk=100)
    prefix = list(range(10, 18))
    same = [driver.add(i, [*prefix, 50 + i, 60 + i], max_tokens=2) for i in range(4)]
    other = driver.add(4, [7, *prefix], max_tokens=2)
    tiny = driver.add(5, prefix[:2], max_tokens=2)  # its only block has to be computed for its logits
    driver.step()
    assert driver.steps[-1] == [(0, 0, 10), (4, 0, 9), (5, 0, 2)]
    driver.step()
    assert [(index, start) for index, start, _ in driver.steps[-1]] == [(0, 10), (1, 8), (2, 8), (3, 8), (4, 9), (5, 2)]
    driver.run()
    assert [r.num_cached_tokens for r in [*same, other, tiny]] == [0, 8, 8, 8, 0, 0]
    assert all(r.token_ids == greedy_alone(r.prompt, 2) for r in [*same, other, tiny])


def test_those_that_wait_for_a_prefix_go_on_when_it_is_aborted_or_preempted():
    driver = Driver(num_blocks=64, dcp=1, block_size=2, chunk=4)
    first, second = (driver.add(i, [*range(30), 50 + i], max_tokens=1) for i in range(2))
    driver.step()
    driver.step()
    assert first.num_computed == 8 and not second.admitted
    driver.scheduler.abort(0)
    driver.step()
    assert second.num_cached_tokens == 8 and second.num_computed == 12
    driver.run()
    assert second.token_ids == greedy_alone(second.prompt, 1)


def test_generated_tokens_are_a_prefix_too():
    driver = Driver(40)
    first = driver.add(0, list(range(6)), 8)
    driver.run()
    second = driver.add(1, first.tokens + [4, 4], 3)
    driver.run()
    assert second.num_cached_tokens == 12  # of 13 computed ones: the last token is never fed
    assert second.token_ids == greedy_alone(second.prompt, 3)


def test_drafts_that_were_rejected_are_never_found():
    driver = Driver(40, drafter=lambda r: [96, 96, 96, 96, 96])
    first = driver.add(0, list(range(6)), 8)
    driver.run()
    assert first.token_ids == greedy_alone(first.prompt, 8)
    second = driver.add(1, [*first.prompt, first.token_ids[0], 96, 96, 96, 96, 96], 2)
    driver.run()
    assert second.num_cached_tokens == 4


def test_without_prefix_caching_nothing_is_reused_or_counted():
    driver = Driver(40, prefix_caching=False)
    for index in range(2):
        assert driver.add(index, list(range(12)), 3).num_cached_tokens == 0
        driver.run()
    assert driver.scheduler.prefix_query_tokens == driver.scheduler.prefix_hit_tokens == 0
    assert driver.scheduler.pool.num_free == 40


def test_samples_wait_for_their_leader_and_share_its_blocks():
    driver = Driver(40, chunk=6)
    prompt = list(range(14))
    leader = driver.add(0, prompt, 6, n=3)
    samples = [driver.add(i, prompt, 6, n=3, leader=leader) for i in (1, 2)]
    other = driver.add(3, [90, 91], 6)  # is not held back by samples that wait
    while not leader.token_ids:
        driver.step()
        assert not any(r.admitted for r in samples)
    assert other.token_ids
    driver.step()
    tables = driver.tables(leader, *samples)
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]  # of 4 tokens each
    assert len({table[3] for table in tables}) == 3
    assert [r.num_cached_tokens for r in samples] == [12, 12]
    used = len({block for table in driver.tables(*driver.scheduler.running) for block in table})
    assert driver.scheduler.used_tokens == 4 * used
    driver.run()
    assert all(r.token_ids == greedy_alone(prompt, 6) for r in (leader, *samples))


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_samples_go_on_without_their_leader(steps):
    driver = Driver(40, chunk=6)
    leader = driver.add(0, list(range(14)), 6, n=2, prompt_logprobs=True)
    sample = driver.add(1, list(range(14)), 6, leader=leader, n=2, prompt_logprobs=True)
    for _ in range(steps):
        driver.step()
    driver.scheduler.abort(0)
    driver.run()
    assert sample.token_ids == greedy_alone(sample.prompt, 6)
    assert sample.prompt_logprobs == pytest.approx(prompt_logprobs(sample.prompt), abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 5, 100])
def test_prompt_logprobs_are_asked_for_once_whatever_the_chunks(chunk):
    driver = Driver(10, chunk=chunk)
    prompt = [5, 3, 8, 1, 9, 2, 7, 7, 4]
    driver.add(0, prompt, 1)
    driver.run()
    leader = driver.add(1, prompt, 2, prompt_logprobs=True, n=2)
    sample = driver.add(2, prompt, 2, prompt_logprobs=True, n=2, leader=leader)
    asked = []
    while driver.scheduler.has_work:
        for r, targets in [(e.request, e.prompt_targets) for e in driver.step().entries]:
            assert r is leader or not targets
            asked += targets
    assert asked == prompt[1:]
    assert leader.num_cached_tokens == 0 and sample.num_cached_tokens == 8
    assert leader.prompt_logprobs == sample.prompt_logprobs == pytest.approx(prompt_logprobs(prompt), abs=1e-5)


def test_prompt_logprobs_survive_a_preemption_in_the_middle():
    driver = Driver(6, dcp=1, block_size=2, chunk=3)
    old = driver.add(0, [1, 2], 10)
    driver.step()
    new = driver.add(1, [5, 6, 7, 8, 9, 10, 11], 2, prompt_logprobs=True)
    asked = []
    while driver.scheduler.has_work:
        asked += [t for e in driver.step().entries for t in e.prompt_targets]
        if driver.scheduler.num_preemptions == 0 and new.num_computed == 3:
            driver.scheduler._preempt(new)
    driver.check_empty()
    assert asked == new.prompt[1:]
    assert new.prompt_logprobs == pytest.approx(prompt_logprobs(new.prompt), abs=1e-5)
    assert new.token_ids == greedy_alone(new.prompt, 2) and old.token_ids == greedy_alone(old.prompt, 10)


def test_right_drafts_save_steps_and_never_pass_max_tokens():
    driver = Driver(40, drafter=lambda r: greedy_alone(r.tokens, 3))
    r = driver.add(0, [1, 2, 3], 10)
    driver.run()
    assert r.token_ids == greedy_alone(r.prompt, 10) and len(r.logprobs) == 10
    # One token at the prompt, four, four, and the last alone: nothing is drafted after it.
    assert driver.steps == [[(0, 0, 3)], [(0, 3, 4)], [(0, 7, 4)], [(0, 11, 1)]]


def test_a_stop_token_among_accepted_drafts_ends_the_sequence_there():
    prompt = [1, 2, 3]
    alone = greedy_alone(prompt, 5)
    driver = Driver(40, drafter=lambda r: greedy_alone(r.tokens, 4))
    r = driver.add(0, prompt, 30, stop_token_ids=[alone[2]])
    driver.run()
    assert r.token_ids == alone[:3] and r.finish_reason == "stop" and len(r.logprobs) == 3


def test_drafts_preempt_nobody_and_take_what_is_left():
    driver = Driver(6, dcp=1, block_size=2, chunk=8, drafter=lambda r: [96] * 5)
    driver.add(0, [1, 2, 3], 6)
    driver.add(1, [4, 5], 1 + 2)
    driver.step()
    step = driver.step()
    # Of 6 blocks the watermark and the two sequences leave one: the first gets it, the other what its last one holds.
    assert [len(seq.token_ids) for seq in step.batch.seqs] == [3, 2]
    assert driver.scheduler.num_preemptions == 0
    driver.run()


def test_clear_in_the_middle_keeps_what_is_computed():
    driver = Driver(12, max_num_seqs=2, chunk=6)
    for i in range(4):
        driver.add(i, list(range(9)), 5)
    for _ in range(3):
        driver.step()
    driver.plan()  # never computed: as after an error in the runner
    driver.scheduler.clear()
    driver.scheduler.check_integrity()
    assert not driver.scheduler.has_work
    driver.check_empty()
    again = driver.add(0, [*range(9), 9], 4)
    driver.run()
    assert again.num_cached_tokens == 8 and again.token_ids == greedy_alone(again.prompt, 4)


def test_prefixes_are_shared_inside_a_salt():
    driver = Driver(num_blocks=64, dcp=1, block_size=2, chunk=100)
    prompt = list(range(10, 19))
    salts = ["", "one", "two", "one", "", "on"]
    together = [driver.add(i, prompt, max_tokens=1, cache_salt=salt) for i, salt in enumerate(salts)]
    driver.run()
    assert [r.num_cached_tokens for r in together] == [0, 0, 0, 8, 8, 0]
    later = [driver.add(10 + i, prompt, max_tokens=1, cache_salt=salt) for i, salt in enumerate(["two", "three"])]
    driver.run()
    assert [r.num_cached_tokens for r in later] == [8, 0]


def test_nothing_is_reused_across_a_change_of_weights():
    driver = Driver(12)
    driver.add(0, list(range(9)), 5)
    with pytest.raises(AssertionError, match="weights"):
        driver.scheduler.weights_changed()
    driver.run()
    driver.scheduler.weights_changed()
    driver.scheduler.check_integrity()
    assert driver.scheduler.pool.num_free == 12
    again = driver.add(1, list(range(9)), 5)
    driver.run()
    assert again.num_cached_tokens == 0


def test_abort_in_every_state():
    driver = Driver(40, chunk=4, max_num_seqs=2)
    prefilling, decoding, waiting = (driver.add(i, p, 9) for i, p in enumerate(([1] * 30, [2, 3], [4])))
    driver.step()
    driver.step()
    scheduler = driver.scheduler
    assert 0 < prefilling.num_computed < 30 and decoding.token_ids and not waiting.admitted
    step = driver.plan()
    for r in (waiting, decoding, prefilling):
        assert scheduler.abort(r.index, "stop" if r is decoding else "abort") is r
        assert scheduler.abort(r.index) is None
        scheduler.check_integrity()
    before = [r.tokens for r in (prefilling, decoding, waiting)]
    again = driver.add(1, [2, 3], 2)  # the number is free again while the step is on its way
    driver.commit(step)
    assert [r.tokens for r in (prefilling, decoding, waiting)] == before and not driver.finished
    assert [r.finish_reason for r in (prefilling, decoding, waiting)] == ["abort", "stop", "abort"]
    driver.run()
    assert again.token_ids == greedy_alone([2, 3], 2)
    assert scheduler.abort(77) is None


def test_a_preempted_request_can_be_aborted():
    driver = Driver(8, dcp=1, block_size=2, chunk=8)
    old, new = driver.add(0, [1, 2, 3, 4], 10), driver.add(1, [5, 6, 7, 8], 8)
    while not driver.scheduler.num_preemptions:
        driver.step()
    assert driver.scheduler.abort(1) is new
    driver.run()
    assert driver.finished == [old] and driver.scheduler.waiting == []


def test_integrity_check_sees_a_leak():
    driver = Driver()
    driver.add(0, [1], 1)
    driver.plan()
    driver.scheduler.running.clear()
    with pytest.raises(AssertionError, match="held"):
        driver.scheduler.check_integrity()


def test_logits_and_rows_of_the_fake_engine_agree():
    driver = Driver(10)
    driver.add(0, [1, 2, 3], 1, prompt_logprobs=True)
    step = driver.plan()
    logits = driver.runner.step(step.batch)
    assert torch.equal(logits, torch.stack([logits_after([1]), logits_after([1, 2]), logits_after([1, 2, 3])]))
