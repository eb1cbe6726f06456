import math

import pytest
import torch
from fake_engine import request
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dcp.engine.request import SamplingParams
from megatron_dcp.engine.sampler import Sampler, choose
from workers import run_on_ranks


class Alone:
    """A process group of one rank."""

    def size(self):
        return 1

    def rank(self):
        return 0


def reference_distribution(logits, params) -> list[float]:
    """Probability of every token, written out in plain Python."""
    peak = max(logits)
    weights = [math.exp((x - peak) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        if kept and reached >= params.top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6).map(lambda x: x / 2), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.85, 0.4, 1e-9]),
)
def test_an_even_comb_of_draws_gives_the_distribution(logits, temperature, top_k, top_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    teeth = 400
    counts = [0] * len(logits)
    for tooth in range(teeth):
        counts[int(choose(torch.tensor(logits), params, (tooth + 0.5) / teeth))] += 1
    expected = reference_distribution(logits, params)
    for count, probability in zip(counts, expected, strict=True):
        assert abs(count - probability * teeth) <= 1 + 1e-6
        assert probability > 0 or count == 0


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.5}])
def test_ends_of_the_draw_never_pick_an_impossible_token(draw, params):
    logits = torch.full((50,), -torch.inf)
    logits[[7, 11]] = torch.tensor([1.0, 1.0])
    assert int(choose(logits, SamplingParams(temperature=1.0, **params), draw)) in (7, 11)


def test_top_k_keeps_the_lowest_ids_of_equals():
    logits = torch.tensor([0.0, 5.0, 3.0, 3.0, 3.0])
    params = SamplingParams(temperature=100.0, top_k=3)
    drawn = {int(choose(logits, params, u / 100)) for u in range(100)}
    assert drawn == {1, 2, 3}


def test_equals_are_drawn_in_the_order_of_their_ids():
    params = SamplingParams(temperature=1.0, top_p=0.5)
    for draw in (0.0, 0.25, 0.9):
        assert int(choose(torch.zeros(40_000), params, draw)) == pytest.approx(draw * 20_000, abs=1)


def test_tiny_temperature_is_greedy_and_finite():
    logits = torch.tensor([1.0, 2.0, 2.0 - 1e-3, -torch.inf]) * 1e4
    for temperature in (1e-306, 1e-8):
        assert int(choose(logits, SamplingParams(temperature=temperature), 0.99)) == 1


def test_greedy_takes_the_lowest_id_of_equals():
    logits = torch.zeros(3, 1000)
    logits[1, [400, 900]] = 1.0
    logits[2, 999] = 1.0
    tokens, logprobs = Sampler(Alone()).sample(logits, [request(i, [1]) for i in range(3)])
    assert tokens == [0, 400, 999]
    assert all(math.isnan(x) for x in logprobs)


def test_logprobs_are_those_of_the_unmodified_logits():
    torch.manual_seed(0)
    logits = torch.randn(4, 33) * 4
    requests = [
        request(0, [1], logprobs=True),
        request(1, [1]),
        request(2, [1], logprobs=True, temperature=0.1, top_k=2, seed=1),
        request(3, [1], logprobs=True, temperature=5.0, top_p=0.5, seed=1),
    ]
    tokens, logprobs = Sampler(Alone()).sample(logits, requests)
    expected = logits.double().log_softmax(1)
    for row in (0, 2, 3):
        assert logprobs[row] == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
    assert math.isnan(logprobs[1])


def drawn_by(seed, neighbours: int, steps: int = 20) -> list[int]:
    """Tokens of one seeded request among others that draw too, leave early and come late."""
    sampler = Sampler(Alone())
    mine = request(neighbours, [1], temperature=1.0, seed=seed)
    others = [request(i, [1], temperature=1.0, seed=seed) for i in range(neighbours)]
    tokens = []
    for step in range(steps):
        present = others[: step % (neighbours + 1)]
        row = torch.randn(1, 50, generator=torch.Generator().manual_seed(step))
        batch = [*present, mine]
        tokens.append(sampler.sample(row.expand(len(batch), 50), batch)[0][-1])
    return tokens


def test_a_seed_draws_the_same_tokens_alone_and_in_any_batch():
    alone = drawn_by(5, 0)
    assert drawn_by(5, 1) == alone
    assert drawn_by(5, 4) == alone
    assert drawn_by(6, 0) != alone


def test_without_a_seed_two_requests_draw_differently():
    logits = torch.zeros(1, 10**6)
    tokens = {Sampler(Alone()).sample(logits, [request(0, [1], temperature=1.0)])[0][0] for _ in range(3)}
    assert len(tokens) > 1


def test_a_forgotten_request_starts_anew():
    sampler = Sampler(Alone())
    mine = request(0, [1], temperature=1.0, seed=3)
    logits = torch.zeros(1, 10**6)
    first = sampler.sample(logits, [mine])
    assert sampler.sample(logits, [mine]) != first
    sampler.forget(mine)
    assert sampler.sample(logits, [mine])[0] == first[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    requests = [request(i, [1, 2, 3], temperature=temperature) for i in range(3)]
    with pytest.raises(ValueError, match="logits of prompt 1 hold NaN or infinity after 3 tokens"):
        Sampler(Alone()).sample(logits, requests)


def sample_with_unequal_logits(rank, world):
    """Logits that favour another token on every rank, as rounding might; and no seed, so that draws differ too."""
    from torch import distributed

    sampler = Sampler(distributed.group.WORLD)
    logits = torch.zeros(2, 64)
    logits[0, rank] = 1.0
    requests = [request(0, [1], logprobs=True), request(1, [1], temperature=1.0)]
    return [sampler.sample(logits, requests)[0] for _ in range(8)]


def sample_in_the_second_group(rank, world):
    from torch import distributed

    groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    sampler = Sampler(groups[rank // 2])
    logits = torch.zeros(1, 8)
    logits[0, rank] = 1.0
    return sampler.sample(logits, [request(0, [1])])[0]


def sample_nan(rank, world):
    from torch import distributed

    logits = torch.full((1, 8), math.nan if rank == 0 else 0.0)
    Sampler(distributed.group.WORLD).sample(logits, [request(0, [1])])


def test_all_ranks_get_what_the_first_one_chose():
    results = run_on_ranks(3, sample_with_unequal_logits)
    assert results[1] == results[0] and results[2] == results[0]
    assert all(tokens[0] == 0 for tokens in results[0])


def test_the_first_rank_is_that_of_the_group():
    assert run_on_ranks(4, sample_in_the_second_group) == [[0], [0], [2], [2]]


def test_every_rank_hears_of_broken_logits():
    errors = run_on_ranks(2, sample_nan, expect_errors=True)
    assert all(isinstance(error, ValueError) and "NaN" in str(error) for error in errors)
