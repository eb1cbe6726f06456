"""Exactness of latent attention and of mixtures of experts, as in test_exactness.py, with expert parallelism."""

from __future__ import annotations

from typing import Any

import pytest
from exactness import BLOCK, check, reference

from models import YARN

GROUPED = dict(topk_method="group_limited_greedy", n_group=4, topk_group=2)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v2, no q_lora": ("deepseek_v2", dict(q_lora_rank=None)),
    "deepseek_v2, groups, yarn": ("deepseek_v2", dict(rope_scaling=YARN, **GROUPED)),
    "deepseek_v3, yarn": ("deepseek_v3", dict(rope_scaling=YARN)),
    "deepseek_v3, no q_lora": ("deepseek_v3", dict(q_lora_rank=None)),
}
LATENT = [name for name in MODELS if name.startswith("deepseek")]


def references(names: Any, dcp_size: int) -> list[Any]:
    return [reference(MODELS[name][0], dcp_size, few=True, decode=24, **MODELS[name][1]) for name in names]


def experts(ep: int, expert_tp: int = 1) -> dict[str, int]:
    return dict(expert_model_parallel_size=ep, expert_tensor_parallel_size=expert_tp)


def some_of(names: Any, case: int) -> list[str]:
    """Every second model, which ones by the case: each meets every tp, dcp and ep, not all of their combinations."""
    return list(names)[case % 2 :: 2]


# ep must divide the ranks: with an odd number of them it is 1.
@pytest.mark.parametrize(
    "tp,dcp_size,ep",
    [(1, 1, 1), (1, 2, 1), (1, 2, 2), (1, 3, 1), (1, 4, 1), (1, 4, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2),
     (2, 3, 1), (2, 3, 2), (2, 4, 1), (2, 4, 2)],
)  # fmt: skip
def test_orthogonal(tp, dcp_size, ep):
    interleave = {1: 1, 2: BLOCK, 3: 4, 4: 2}[dcp_size]
    names = MODELS if (tp, dcp_size, ep) == (2, 2, 2) else some_of(MODELS, tp + dcp_size + ep)
    check(references(names, dcp_size), tp, dcp_size, "orthogonal", [(interleave, None)], experts(ep))


@pytest.mark.parametrize("tp,dcp_size,ep", [(2, 2, 1), (2, 2, 2), (4, 2, 2), (4, 4, 1), (4, 4, 4)])
def test_within_tp(tp, dcp_size, ep):
    """The latent counts as one KV head, so dcp goes up to tp; tiny Mixtral and Qwen3-MoE have two."""
    names = MODELS if tp // dcp_size >= 2 else LATENT
    check(
        references(some_of(names, tp // dcp_size + ep), dcp_size), tp, dcp_size, "within_tp", [(1, None)], experts(ep)
    )


@pytest.mark.parametrize("half,exchange", [(0, "all_reduce"), (1, "ag_rs"), (0, "a2a")])
def test_exchanges_and_experts_that_are_split(half, exchange):
    check(references(some_of(MODELS, half), 2), 2, 2, "orthogonal", [(4, exchange)], experts(2, expert_tp=2))
