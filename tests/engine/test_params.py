import dataclasses
import math

import pytest

from megatron_dcp.engine.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 129),  # more than the default of max_tokens
        ("n", 0),
        ("n", 2.0),
        ("n", 2**16 + 1),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2.1),
        ("presence_penalty", None),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", True),
        ("logit_bias", 5),
        ("logit_bias", "ab"),
        ("logit_bias", {-1: 0.5}),
        ("logit_bias", {"7": 0.5}),
        ("logit_bias", {7: -math.inf}),
        ("logit_bias", {7: math.nan}),
        ("logit_bias", {7: "1"}),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [5]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", b"5"),
        ("stop_token_ids", {5: 1}),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("logprobs", 5),
        ("logprobs", 0),
        ("prompt_logprobs", 3),
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field.removesuffix("_ids").replace("_", ".")):
        SamplingParams(**{field: value})


def test_most_samples_may_be_asked_for():
    assert SamplingParams(n=2**16).n == 2**16


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_the_top_k_log_probabilities_are_not_there(field):
    with pytest.raises(ValueError, match=rf"^{field}=5 must be True or False; there are no .* of the top k tokens"):
        SamplingParams(**{field: 5})


def test_defaults_are_greedy_and_positional_arguments_are_not_taken():
    assert SamplingParams().greedy and not SamplingParams().penalises
    assert not SamplingParams(temperature=0.5).greedy
    with pytest.raises(TypeError):
        SamplingParams(5)


@pytest.mark.parametrize("params", [{"repetition_penalty": 0.9}, {"presence_penalty": -1}, {"frequency_penalty": 0.1}])
def test_each_penalty_counts(params):
    assert SamplingParams(**params).penalises


def test_what_is_kept_does_not_change_with_what_was_given():
    tokens, stop, bias = [1, 2], ["a"], {9: 1, 3: -2.5}
    params = SamplingParams(stop_token_ids=tokens, stop=stop, logit_bias=bias)
    tokens.append(3), stop.append("b"), bias.update({1: 1})
    assert params.stop_token_ids == (1, 2)
    assert params.stop == ("a",)
    assert params.logit_bias == ((3, -2.5), (9, 1.0))


def test_equal_params_print_and_hash_the_same_and_can_be_replaced():
    one = SamplingParams(logit_bias={9: 1, 3: 2}, stop="end")
    other = SamplingParams(logit_bias={3: 2.0, 9: 1.0}, stop=["end"])
    assert one == other and repr(one) == repr(other) and hash(one) == hash(other)
    assert dataclasses.replace(one, n=1) == one


def test_a_string_is_one_stop_string():
    assert SamplingParams(stop="end").stop == ("end",)
