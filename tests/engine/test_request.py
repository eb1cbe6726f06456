import pytest

from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.request import Request


def make(prompt=(1, 2, 3), **params) -> Request:
    own = SamplingParams(**params)
    return Request(0, list(prompt), own, own.max_tokens, stop_ids=frozenset(own.stop_token_ids))


def append(request: Request, *tokens: int) -> None:
    for token in tokens:
        assert request.finish_reason is None
        request.append(token, -0.5)


def test_tokens_are_prompt_and_output():
    request = make()
    append(request, 7, 8)
    assert request.tokens == [1, 2, 3, 7, 8] and request.num_tokens == 5
    for start in range(6):
        for stop in range(start, 6):
            assert request.tokens_between(start, stop) == request.tokens[start:stop]
    request.tokens_between(0, 3).append(9)
    request.tokens.append(9)
    assert request.tokens == [1, 2, 3, 7, 8]


def test_a_sequence_ends_at_its_length():
    request = make(max_tokens=2)
    assert request.cached_tokens == 4
    append(request, 7)
    assert request.finish_reason is None
    append(request, 7)
    assert request.finish_reason == "length"
    assert request.logprobs == [-0.5, -0.5]


def test_a_stop_token_ends_it_even_at_its_length():
    request = make(max_tokens=2, stop_token_ids=[5])
    append(request, 4, 5)
    assert request.finish_reason == "stop"


@pytest.mark.parametrize("min_tokens", [0, 1, 2])
def test_the_first_min_tokens_do_not_stop(min_tokens):
    request = make(max_tokens=4, min_tokens=min_tokens, stop_token_ids=[5])
    append(request, *[5] * (min_tokens + 1))
    assert request.finish_reason == "stop" and request.token_ids == [5] * (min_tokens + 1)


def test_min_tokens_do_not_prolong():
    request = make(max_tokens=2, min_tokens=2, stop_token_ids=[5])
    append(request, 5, 5)
    assert request.finish_reason == "length"


def test_prompt_logprobs_are_complete_one_short_of_the_prompt():
    assert not make().wants_prompt_logprobs
    assert not make([1], prompt_logprobs=True).wants_prompt_logprobs
    request = make(prompt_logprobs=True)
    assert request.wants_prompt_logprobs
    request.prompt_logprobs += [-1.0, -2.0]
    assert not request.wants_prompt_logprobs


def test_requests_are_told_apart_by_identity():
    assert make() != make() and len({make(), make()}) == 2
