"""Sizes that a model's shape allows: what does not fit is refused with those that do."""

from __future__ import annotations

import re

import pytest
from megatron_models import moe_config, tiny_config


@pytest.mark.parametrize("pp", [1, 2, 3, 6])
def test_stages_that_divide_the_layers(pp: int) -> None:
    tiny_config(num_layers=6).check_pipeline_parallel(pp)


@pytest.mark.parametrize("pp", [4, 5, 12])
def test_stages_that_do_not_divide_the_layers(pp: int) -> None:
    message = f"pipeline_model_parallel_size={pp} does not divide num_layers=6; use one of 1, 2, 3, 6"
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_config(num_layers=6).check_pipeline_parallel(pp)


@pytest.mark.parametrize(
    ("ep", "expert_tp", "ranks", "message"),
    [
        (3, 1, 12, "num_experts=8; use one of 1, 2, 4"),
        (3, 2, 12, "num_experts=8; use one of 1, 2"),
        (3, 4, 12, "num_experts=8; use one of 1"),
        (3, 1, 2, "num_experts=8; use one of 1, 2"),
        (1, 5, 20, "moe_ffn_hidden_size=24; use one of 1, 2, 4"),
        (4, 5, 24, "moe_ffn_hidden_size=24; use one of 1, 2, 3, 6"),
        (4, 5, 1, "moe_ffn_hidden_size=24; use one of 1"),
    ],
)
def test_expert_sizes_in_an_error_are_those_that_the_ranks_hold(
    ep: int, expert_tp: int, ranks: int, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        moe_config("mixtral").check_expert_parallel(ep, expert_tp, ranks=ranks)
    assert str(caught.value).endswith(f"does not divide {message}")
