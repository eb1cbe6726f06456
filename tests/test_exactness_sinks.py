"""Exactness of GPT-OSS, as in test_exactness.py: sinks count once, whatever attends; experts have biases."""

from __future__ import annotations

from typing import Any

import pytest
from exactness import BLOCK, check, reference

YARN = (("rope_type", "yarn"), ("factor", 8.0), ("original_max_position_embeddings", 32), ("truncate", False))


def references(dcp_size: int, **model: Any) -> list[Any]:
    return [reference("gpt_oss", dcp_size, few=True, decode=24, seed=3, rope_scaling=YARN, **model)]


def experts(ep: int) -> dict[str, int]:
    return dict(expert_model_parallel_size=ep)


# Every setting of a case takes another way to share a prompt's tokens.
@pytest.mark.parametrize(
    "tp,dcp_size,ep,settings",
    [
        (1, 1, 1, [(1, None)]),
        (1, 2, 1, [(1, None), (BLOCK, "a2a"), (4, "all_reduce")]),
        (1, 3, 1, [(1, None), (4, "ag_rs")]),
        (1, 4, 2, [(4, None), (1, "a2a")]),
        (2, 1, 2, [(1, None)]),
        pytest.param(2, 2, 2, [(BLOCK, None), (1, "ag_rs"), (4, None)], marks=pytest.mark.mcore_line),
    ],
)
def test_orthogonal(tp, dcp_size, ep, settings):
    check(references(dcp_size), tp, dcp_size, "orthogonal", settings, experts(ep))


@pytest.mark.parametrize(
    "tp,dcp_size,kv_heads,ep", [pytest.param(2, 2, 1, 1, marks=pytest.mark.mcore_line), (4, 2, 2, 2), (4, 4, 1, 1)]
)
def test_within_tp(tp, dcp_size, kv_heads, ep):
    check(references(dcp_size, kv_heads=kv_heads), tp, dcp_size, "within_tp", [(1, None)], experts(ep))
