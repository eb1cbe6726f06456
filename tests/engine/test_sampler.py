import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron_dcp.engine import sampler as sampler_module
from megatron_dcp.engine.batch import Entry
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.request import Request
from megatron_dcp.engine.sampler import Sampler, choose, uniform

VOCAB = 50


def request(index=0, prompt=(1,), *, sample=0, output=(), **params) -> Request:
    own = SamplingParams(**{"max_tokens": 64, **params})
    stop = frozenset(own.stop_token_ids)
    made = Request(
        index=index, place=index, prompt=list(prompt), params=own, max_tokens=64, stop_ids=stop, sample=sample
    )
    made.token_ids += output
    return made


def plain(one: Request) -> Entry:
    return Entry(one, (), (), True)


def tokens_of(sampler, logits, requests) -> list[int]:
    results = sampler.sample(logits, [plain(one) for one in requests])
    assert all(len(result.tokens) == 1 for result in results)
    return [result.tokens[0] for result in results]


def reference_logits(logits, prompt, output, params) -> np.ndarray:
    """Bias and penalties, token by token in fp64."""
    shaped = np.array(logits, dtype=np.float64)
    for token, bias in dict(params.logit_bias).items():
        shaped[token] += bias
    for token in range(len(shaped)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            shaped[token] = shaped[token] / factor if shaped[token] > 0 else shaped[token] * factor
        count = list(output).count(token)
        shaped[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if len(output) < params.min_tokens:
        shaped[list(params.stop_token_ids)] = -np.inf
    return shaped


def reference_distribution(logits, params) -> np.ndarray:
    """Probability of every token, written out."""
    weights = np.exp((np.asarray(logits, dtype=np.float64) - np.max(logits)) / params.temperature)
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
    kept = [i for i in kept if weights[i] >= params.min_p]  # the largest weight is 1
    answer = np.zeros(len(logits))
    answer[kept] = weights[kept] / weights[kept].sum()
    return answer


def comb(logits, params, teeth) -> np.ndarray:
    """How many of an even comb of draws each token gets: within 1 of its probability times the number of draws."""
    drawn = [int(choose(torch.as_tensor(logits), params, (tooth + 0.5) / teeth)) for tooth in range(teeth)]
    return np.bincount(drawn, minlength=len(logits))


def chi_square_bound(classes: int) -> float:
    """What a chi-square of ``classes - 1`` degrees of freedom exceeds once in a million (Wilson and Hilferty 1931)."""
    free = classes - 1
    return free * (1 - 2 / (9 * free) + 4.7534 * math.sqrt(2 / (9 * free))) ** 3


# Distribution of one draw


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6).map(lambda x: x / 2), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.85, 0.4, 1e-9]),
    min_p=st.sampled_from([0.0, 1e-3, 0.21, 0.9, 1.0]),
)
def test_an_even_comb_of_draws_gives_the_distribution(logits, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    counts = comb(torch.tensor(logits), params, 400)
    expected = reference_distribution(logits, params)
    assert (abs(counts - expected * 400) <= 1 + 1e-6).all()
    assert (counts[expected == 0] == 0).all()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"top_k": 7},
        {"top_k": VOCAB + 5},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"temperature": 1.6, "top_k": 20, "top_p": 0.7, "min_p": 0.12},
        {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.4, "temperature": 0.9, "top_p": 0.9},
        {"min_tokens": 5, "stop_token_ids": [1, 2, 30]},
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_distribution_is_that_of_transformers(params, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, VOCAB, generator=generator) * 2
    one = request(0, [3, 4, 5], output=[5, 6, 7], **{"temperature": 1.0, **params})
    own = one.params
    steps = [RepetitionPenaltyLogitsProcessor(own.repetition_penalty)]
    if own.min_tokens:
        stops = list(own.stop_token_ids)
        steps.append(MinNewTokensLengthLogitsProcessor(len(one.prompt), own.min_tokens, stops, device="cpu"))
    steps.append(TemperatureLogitsWarper(own.temperature))
    if own.top_k:
        steps.append(TopKLogitsWarper(own.top_k))
    if own.top_p < 1:
        steps.append(TopPLogitsWarper(own.top_p))
    if own.min_p:
        steps.append(MinPLogitsWarper(own.min_p))
    expected = LogitsProcessorList(steps)(torch.tensor([one.prompt + one.token_ids]), logits.clone()).softmax(-1)[0]
    shaper = Sampler(VOCAB)._shaper(one, logits.device)
    counts = comb(shaper.shape(logits[0], len(one.token_ids)), own, 3000)
    assert (abs(counts - expected.numpy() * 3000) <= 1 + 1e-3).all()
    assert (counts[expected.numpy() == 0] == 0).all()


@pytest.mark.parametrize("top_p", [0.5, 0.999, 1 - 1e-12])
@pytest.mark.parametrize("shape", ["peaked", "flat", "equal"])
def test_a_shortlist_changes_nothing(top_p, shape, monkeypatch):
    logits = (
        torch.randn(3000, generator=torch.Generator().manual_seed(0)) * {"peaked": 6, "flat": 0.1, "equal": 0}[shape]
    )
    params = SamplingParams(temperature=1.0, top_p=top_p)
    draws = [i / 97 for i in range(97)]
    with_shortlist = [int(choose(logits, params, draw)) for draw in draws]
    monkeypatch.setattr(sampler_module, "SHORTLIST", 3000)
    assert with_shortlist == [int(choose(logits, params, draw)) for draw in draws]


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 1e-300}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}]
)
def test_ends_of_the_draw_never_pick_an_impossible_token(draw, params):
    logits = torch.full((50,), -torch.inf)
    logits[[7, 11]] = torch.tensor([1.0, 1.0])
    assert int(choose(logits, SamplingParams(temperature=1.0, **params), draw)) in (7, 11)


def test_top_k_keeps_the_lowest_ids_of_equals():
    logits = torch.tensor([0.0, 5.0, 3.0, 3.0, 3.0])
    params = SamplingParams(temperature=100.0, top_k=3)
    assert {int(choose(logits, params, u / 100)) for u in range(100)} == {1, 2, 3}


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.99}])
def test_a_min_p_of_1_keeps_the_equals_of_the_likeliest(params):
    logits = torch.tensor([0.0, 5.0, 4.9, 5.0, 3.0])
    params = SamplingParams(temperature=10.0, min_p=1.0, **params)
    assert {int(choose(logits, params, u / 100)) for u in range(100)} == {1, 3}


def test_equals_are_drawn_in_the_order_of_their_ids():
    params = SamplingParams(temperature=1.0, top_p=0.5)
    for draw in (0.0, 0.25, 0.9):
        assert int(choose(torch.zeros(40_000), params, draw)) == pytest.approx(draw * 20_000, abs=1)


def test_tiny_temperature_is_greedy_and_finite():
    logits = torch.tensor([1.0, 2.0, 2.0 - 1e-3, -torch.inf]) * 1e4
    for temperature in (1e-306, 1e-8):
        assert int(choose(logits, SamplingParams(temperature=temperature), 0.99)) == 1


# Random numbers


def test_random_numbers_are_even_and_differ_in_every_argument():
    numbers = np.array([uniform(seed, sample, i) for seed in range(10) for sample in range(10) for i in range(200)])
    assert len(set(numbers)) == len(numbers) and (numbers >= 0).all() and (numbers < 1).all()
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < chi_square_bound(50)
    following = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(following) < 4 / math.sqrt(len(numbers))


def test_random_numbers_stay_the_same():
    """A seed's tokens must not change from one release to the next."""
    assert uniform(0, 0, 0) == 0.156742553465558
    assert uniform(2**63 - 1, 3, 10**6) == 0.2803726285499104


@pytest.mark.parametrize("vary", ["position", "seed", "sample"])
def test_sampled_tokens_follow_the_distribution(vary):
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(7)) * 1.5
    params = {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    count, draws = np.zeros(12), 4000
    sampler = Sampler(12)
    for i in range(draws):
        own = {"seed": i} if vary == "seed" else {"seed": 5}
        output = [2, 3] if vary != "position" else [2, 3] * (1 + i)
        one = request(0, [1, 4], sample=i if vary == "sample" else 0, output=output, **params, **own)
        count[tokens_of(sampler, logits, [one])[0]] += 1
        sampler.forget(one)
    expected = (
        reference_distribution(reference_logits(logits[0].numpy(), [1, 4], [2, 3], one.params), one.params) * draws
    )
    possible = expected > 0
    assert (count[~possible] == 0).all()
    statistic = ((count - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < chi_square_bound(int(possible.sum()))


def drawn_by(neighbours: int, steps: int = 20, **params) -> list[int]:
    """Tokens of one request among others that draw too, leave early and come late."""
    sampler = Sampler(VOCAB)
    mine = request(neighbours, [1, 2], **params)
    others = [request(i, [1], temperature=1.0, seed=i) for i in range(neighbours)]
    for step in range(steps):
        present = others[: step % (neighbours + 1)]
        row = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(step))
        chosen = tokens_of(sampler, row.expand(len(present) + 1, VOCAB), [*present, mine])
        for one, token in zip([*present, mine], chosen, strict=True):
            one.append(token, math.nan)
    return mine.token_ids


PENALTIES = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {3: 2.0, 4: -1},
}


@pytest.mark.parametrize("params", [{}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01}, PENALTIES])
def test_a_seed_draws_the_same_tokens_alone_and_in_any_batch(params):
    params = {"temperature": 1.0, "seed": 5, **params}
    alone = drawn_by(0, **params)
    assert drawn_by(1, **params) == alone
    assert drawn_by(4, **params) == alone
    assert drawn_by(0, **{**params, "seed": 6}) != alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_goes_on_with_the_same_tokens_in_another_sampler(temperature):
    """As after a preemption or on another machine: nothing but the request's tokens matters."""
    rows = torch.randn(16, 1, VOCAB, generator=torch.Generator().manual_seed(0))
    params = {"temperature": temperature, "seed": 3, **PENALTIES}
    one, moved = request(0, [1, 2], **params), request(0, [1, 2], **params)
    kept = Sampler(VOCAB)
    for row in rows:
        one.append(tokens_of(kept, row, [one])[0], math.nan)
        moved.append(tokens_of(Sampler(VOCAB), row, [moved])[0], math.nan)
    assert moved.token_ids == one.token_ids


def test_samples_of_a_prompt_draw_differently():
    logits = torch.zeros(1, 10**5)
    drawn = {tokens_of(Sampler(10**5), logits, [request(temperature=1.0, seed=1, sample=i)])[0] for i in range(8)}
    assert len(drawn) == 8


def test_without_a_seed_two_requests_draw_differently_and_each_keeps_its_seed():
    logits = torch.zeros(1, 10**6)
    sampler = Sampler(10**6)
    requests = [request(i, temperature=1.0) for i in range(3)]
    first = [tokens_of(sampler, logits, [one]) for one in requests]
    assert len(set(map(tuple, first))) > 1
    assert [tokens_of(sampler, logits, [one]) for one in requests] == first
    sampler.forget(requests[0])
    assert tokens_of(sampler, logits, [requests[0]]) != first[0]


# Greedy, bias, penalties, min_tokens


def test_greedy_takes_the_lowest_id_of_equals():
    logits = torch.zeros(4, 1000)
    logits[1, [400, 900]] = 1.0
    logits[2, 999] = 1.0
    requests = [request(0), request(1), request(2), request(3, logit_bias={0: -1, 7: 0})]
    assert tokens_of(Sampler(1000), logits, requests) == [0, 400, 999, 1]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 7), max_size=8),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.6, -0.4]),
    frequency=st.sampled_from([0.0, 0.25, -0.3]),
    bias=st.dictionaries(st.integers(0, 7), st.sampled_from([-2.0, 0.5, 1e9, -1e9]), max_size=3),
    min_tokens=st.integers(0, 8),
)
def test_logits_are_shaped_as_written_out(seed, prompt, output, repetition, presence, frequency, bias, min_tokens):
    one = request(
        0,
        prompt,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        min_tokens=min_tokens,
        stop_token_ids=[2, 5],
    )
    logits = torch.randn(8, generator=torch.Generator().manual_seed(seed)) * 3
    sampler = Sampler(8)
    sampler._shaper(one, logits.device)
    one.token_ids += output  # counted later than the request was first seen
    shaped = sampler._shaper(one, logits.device).shape(logits, len(output)).numpy()
    expected = reference_logits(logits.numpy(), prompt, output, one.params)
    np.testing.assert_allclose(shaped, expected, rtol=1e-12)
    assert tokens_of(sampler, logits[None], [one]) == [int(expected.argmax())]


def test_the_prompt_counts_for_repetition_alone():
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    assert tokens_of(Sampler(3), logits, [request(0, [0], repetition_penalty=1.5)]) == [1]
    assert tokens_of(Sampler(3), logits, [request(0, [0], presence_penalty=2, frequency_penalty=2)]) == [0]


def test_stop_tokens_wait_for_min_tokens():
    logits = torch.tensor([[0.0, 2.0, 1.0, 3.0]])
    sampler = Sampler(4)
    one = request(0, [0], min_tokens=2, stop_token_ids=[1, 3, 9])  # 9 is no token of the vocabulary
    for _ in range(3):
        one.append(tokens_of(sampler, logits, [one])[0], math.nan)
    assert one.token_ids == [2, 2, 3]


def test_a_request_without_any_allowed_token_is_an_error_of_its_own():
    logits = torch.full((2, 4), -math.inf)
    logits[:, 1] = 1.0
    entries = [plain(request(6, [0], min_tokens=1, stop_token_ids=[1])), plain(request(7, [0], logprobs=True))]
    failed, other = Sampler(4).sample(logits, entries)
    assert "min_tokens=1 of prompt 6 forbids every token" in str(failed.error) and not failed.tokens
    assert other == ([1], [0.0], [], None)


def test_a_bias_of_no_token_is_refused():
    Sampler(4).check(SamplingParams(logit_bias={3: 1}))
    with pytest.raises(ValueError, match="logit_bias names token 4; the vocabulary ends at 3"):
        Sampler(4).check(SamplingParams(logit_bias={4: 1}))


# Drafts


def logits_after(tokens) -> torch.Tensor:
    """A model: random logits, a function of all tokens."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**32)
    return torch.randn(VOCAB, generator=generator) * 2


def decode(one: Request, sampler: Sampler, draft) -> list[int]:
    """Output of a request whose drafts are ``draft(request)``."""
    while one.finish_reason is None:
        drafted = tuple(draft(one))[: one.max_tokens - len(one.token_ids) - 1]
        tokens = one.prompt + one.token_ids
        rows = [logits_after([*tokens, *drafted[:i]]) for i in range(len(drafted) + 1)]
        (result,) = sampler.sample(torch.stack(rows), [Entry(one, (), drafted, True)])
        assert result.tokens[:-1] == list(drafted[: len(result.tokens) - 1])
        assert len(result.tokens) > len(drafted) or result.tokens[-1] != drafted[len(result.tokens) - 1]
        for token, logprob in zip(result.tokens, result.logprobs, strict=True):
            if one.finish_reason is None:
                expected = logits_after(one.prompt + one.token_ids).double().log_softmax(0)[token]
                assert logprob == pytest.approx(float(expected), abs=1e-5)
                one.append(token, logprob)
    return one.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shaping", [{}, PENALTIES, {"min_tokens": 30, "stop_token_ids": range(25)}, {"top_p": 0.7}])
@pytest.mark.parametrize("right", [0, 1, 3, 7])
def test_drafted_output_is_that_of_plain_decoding(temperature, shaping, right):
    """Drafts of 7 tokens, of which so many are right."""
    params = {"temperature": temperature, "seed": 11, "logprobs": True, **shaping}
    expected = decode(request(0, [1, 2], **params), Sampler(VOCAB), lambda _: ())
    calls = []

    def draft(one):
        calls.append(len(one.token_ids))
        future = expected[len(one.token_ids) :][:7]
        return [token if i < right else (token + 1) % VOCAB for i, token in enumerate(future)]

    assert decode(request(0, [1, 2], **params), Sampler(VOCAB), draft) == expected
    assert len(calls) == math.ceil(len(expected) / (right + 1))


def test_drafted_and_plain_entries_share_a_batch():
    rows = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    best = rows.argmax(1).tolist()
    entries = [
        plain(request(0)),
        Entry(request(1), (), (best[1], best[2] + 1), True),
        plain(request(2)),
        Entry(request(3), (), (), True),
    ]
    results = Sampler(VOCAB).sample(rows, entries)
    assert [result.tokens for result in results] == [[best[0]], [best[1], best[2]], [best[4]], [best[5]]]


# Log-probabilities


def test_logprobs_are_those_of_the_unmodified_logits():
    torch.manual_seed(0)
    logits = torch.randn(5, 33) * 4
    requests = [
        request(0, logprobs=True),
        request(1),
        request(2, logprobs=True, temperature=0.1, top_k=2, seed=1),
        request(3, logprobs=True, temperature=5.0, top_p=0.5, seed=1),
        request(4, logprobs=True, logit_bias={5: 50}, repetition_penalty=3),
    ]
    results = Sampler(33).sample(logits, [plain(one) for one in requests])
    expected = logits.double().log_softmax(1)
    for row in (0, 2, 3, 4):
        assert results[row].logprobs == [pytest.approx(float(expected[row, results[row].tokens[0]]), abs=1e-5)]
    assert results[4].tokens == [5]
    assert math.isnan(results[1].logprobs[0])


@pytest.mark.parametrize("scored_rows", [1, 4, 256])
def test_prompt_logprobs_come_with_and_without_a_token(scored_rows, monkeypatch):
    monkeypatch.setattr(sampler_module, "SCORED_ROWS", scored_rows)
    logits = torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
    best = logits.argmax(1).tolist()
    entries = [
        Entry(request(0, prompt_logprobs=True), (4, 5, 6), (), False),  # a chunk that is not the prompt's last
        plain(request(1, logprobs=True)),
        Entry(request(2, prompt_logprobs=True, logprobs=True), (7, 8), (), True),
        Entry(request(3, logprobs=True), (), (best[7], best[8], best[9] + 1), True),
    ]
    results = Sampler(VOCAB).sample(logits, entries)
    assert [result.tokens for result in results] == [[], [best[3]], [best[6]], best[7:10]]
    score = logits.double().log_softmax(1).numpy()
    assert results[0].prompt_logprobs == pytest.approx([score[i, t] for i, t in enumerate((4, 5, 6))], abs=1e-5)
    assert results[2].prompt_logprobs == pytest.approx([score[4, 7], score[5, 8]], abs=1e-5)
    assert results[0].logprobs == [] and results[1].prompt_logprobs == [] and results[3].prompt_logprobs == []
    for result, rows in ((results[1], [3]), (results[2], [6]), (results[3], [7, 8, 9])):
        assert result.logprobs == pytest.approx([score[row, best[row]] for row in rows], abs=1e-5)


# What is refused


def test_nothing_sampled_is_nothing():
    assert Sampler(8).sample(torch.empty(0, 8), []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_of_their_request(bad, temperature):
    logits = torch.zeros(5, 8)
    logits[3, 5] = bad
    requests = [request(i, [1, 2, 3], temperature=temperature) for i in range(3)]
    entries = [plain(requests[0]), Entry(requests[1], (4, 5), (), True), plain(requests[2])]
    first, broken, last = Sampler(8).sample(logits, entries)
    assert "logits of prompt 1 hold NaN or infinity after 3 tokens" in str(broken.error)
    assert (broken.tokens, broken.logprobs, broken.prompt_logprobs) == ([], [], [])
    assert first.error is last.error is None and len(first.tokens) == len(last.tokens) == 1


def test_a_row_without_any_token_is_an_error():
    (result,) = Sampler(8).sample(torch.full((1, 8), -math.inf), [plain(request(0))])
    assert "logits of prompt 0 hold NaN or infinity" in str(result.error)
