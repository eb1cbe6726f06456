import pytest
from fake_engine import FakeRunner, greedy_alone, request
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dcp.cache import KVLayout
from megatron_dcp.engine.scheduler import Scheduler


def run(scheduler: Scheduler, runner: FakeRunner) -> list:
    """All steps until nothing is left, with greedy sampling; the steps."""
    steps = []
    while scheduler.has_work:
        step = scheduler.schedule()
        logits = runner.step(step.batch)
        scheduler.commit(step, [int(row.argmax()) for row in logits], [0.0] * len(logits))
        scheduler.check_integrity()
        steps.append(step)
    return steps


def make(num_blocks=8, *, dcp=2, interleave=1, block_size=2, max_num_seqs=64, chunk=16):
    layout = KVLayout(dcp, interleave, block_size)
    scheduler = Scheduler(layout, num_blocks, max_num_seqs=max_num_seqs, prefill_chunk_size=chunk)
    return scheduler, FakeRunner(layout, num_blocks, chunk)


prompts_strategy = st.lists(
    st.tuples(st.lists(st.integers(0, 96), min_size=1, max_size=20), st.integers(1, 12)), min_size=1, max_size=8
)


@settings(max_examples=150, deadline=None)
@given(
    prompts=prompts_strategy,
    dcp=st.integers(1, 4),
    cut=st.sampled_from([(1, 1), (1, 2), (2, 2), (2, 4), (3, 3)]),
    chunk=st.integers(1, 30),
    max_num_seqs=st.integers(1, 9),
    spare=st.integers(0, 10),
)
def test_every_request_yields_what_it_yields_alone(prompts, dcp, cut, chunk, max_num_seqs, spare):
    layout = KVLayout(dcp, *cut)
    requests = [request(i, prompt, max_tokens) for i, (prompt, max_tokens) in enumerate(prompts)]
    # From a pool that only just holds the largest of them, so that others have to wait.
    num_blocks = max(layout.blocks_for(r.cached_tokens) for r in requests) + spare
    scheduler, runner = make(
        num_blocks, dcp=dcp, interleave=cut[0], block_size=cut[1], chunk=chunk, max_num_seqs=max_num_seqs
    )
    for r in requests:
        scheduler.add(r)
    steps = run(scheduler, runner)
    assert [r.token_ids for r in requests] == [greedy_alone(prompt, n) for prompt, n in prompts]
    assert all(r.finish_reason == "length" for r in requests)
    assert scheduler.blocks.num_free == num_blocks
    assert max(len(step.requests) for step in steps) <= max_num_seqs
    for step in steps:
        prefill = sum(len(s.token_ids) for s in step.batch.seqs if s.start < len(_prompt(step, s)))
        assert prefill <= chunk


def _prompt(step, seq):
    return step.requests[step.batch.seqs.index(seq)].prompt


def test_capacity_is_that_of_the_group_to_the_token():
    # 3 blocks x 2 tokens x 4 ranks = 24 tokens; the last generated token needs no place.
    scheduler, runner = make(3, dcp=4)
    assert scheduler.capacity_tokens == 24
    scheduler.add(request(0, [1] * 20, 5))
    run(scheduler, runner)
    with pytest.raises(
        ValueError, match=r"prompt 7 needs 25 tokens.*prompt 20 \+ max_tokens 6.*holds 24 \(3 blocks x 8"
    ):
        scheduler.add(request(7, [1] * 20, 6))
    assert not scheduler.has_work


def test_prefill_and_decode_share_a_step_within_the_budget():
    scheduler, runner = make(40, chunk=4)
    scheduler.add(request(0, [1, 2], 6))
    scheduler.add(request(1, list(range(10)), 3))
    steps = run(scheduler, runner)
    shapes = [[(s.start, len(s.token_ids), s.sample) for s in step.batch.seqs] for step in steps]
    assert shapes[:4] == [
        [(0, 2, True), (0, 2, False)],
        [(2, 1, True), (2, 4, False)],
        [(3, 1, True), (6, 4, True)],
        [(4, 1, True), (10, 1, True)],
    ]


def test_a_large_request_at_the_head_is_not_overtaken():
    scheduler, runner = make(4, dcp=1, block_size=1)
    scheduler.add(request(0, [1, 2], 2))
    scheduler.add(request(1, [1, 2, 3], 2))
    scheduler.add(request(2, [5], 1))
    order = []
    for step in run(scheduler, runner):
        order += [r.index for r in step.requests if r.index not in order]
    assert order == [0, 1, 2]


def test_stop_token_frees_the_blocks_at_once():
    prompt = [3, 4]
    alone = greedy_alone(prompt, 8)
    scheduler, runner = make(4)
    r = request(0, prompt, 8, stop_token_ids=[alone[3]])
    scheduler.add(r)
    run(scheduler, runner)
    assert r.token_ids == alone[: alone.index(alone[3]) + 1]
    assert r.finish_reason == "stop"
    assert scheduler.blocks.num_free == 4


def test_clear_in_the_middle_leaves_an_empty_pool():
    scheduler, runner = make(6, max_num_seqs=2, chunk=3)
    for i in range(4):
        scheduler.add(request(i, [1] * 7, 5))
    for _ in range(3):
        step = scheduler.schedule()
        logits = runner.step(step.batch)
        scheduler.commit(step, [int(row.argmax()) for row in logits], [0.0] * len(logits))
    scheduler.schedule()  # planned, never computed: as after an error in the runner
    scheduler.clear()
    scheduler.check_integrity()
    assert not scheduler.has_work and scheduler.blocks.num_free == 6
    again = request(0, [9, 9, 9], 4)
    scheduler.add(again)
    run(scheduler, runner)
    assert again.token_ids == greedy_alone([9, 9, 9], 4)


def test_integrity_check_sees_a_leak():
    scheduler, _ = make()
    scheduler.add(request(0, [1], 1))
    scheduler.schedule()
    scheduler.running.clear()
    with pytest.raises(AssertionError, match="held"):
        scheduler.check_integrity()
