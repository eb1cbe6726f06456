import math

import pytest

from megatron_dcp.engine.request import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field.removesuffix("_ids").replace("_", ".")):
        SamplingParams(**{field: value})


def test_defaults_are_greedy_and_positional_arguments_are_not_taken():
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.5).greedy
    with pytest.raises(TypeError):
        SamplingParams(5)


def test_stop_tokens_are_kept_immutable():
    tokens = [1, 2]
    params = SamplingParams(stop_token_ids=tokens)
    tokens.append(3)
    assert params.stop_token_ids == (1, 2)
