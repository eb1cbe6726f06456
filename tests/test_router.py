"""Experts and weights of `route` are those of the routers of transformers; of a router, those of Megatron."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from megatron_dcp.router import route

pytestmark = pytest.mark.mcore_line

TOKENS, EXPERTS, HIDDEN = 200, 16, 32
DEEPSEEK_V2 = dict(n_routed_experts=EXPERTS, routed_scaling_factor=3.0, hidden_size=HIDDEN)
CASES = {
    "mixtral": (
        MixtralTopKRouter,
        MixtralConfig(num_local_experts=EXPERTS, num_experts_per_tok=2, hidden_size=HIDDEN),
        dict(topk=2),
    ),
    "qwen3": (
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig(num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=True, hidden_size=HIDDEN),
        dict(topk=4),
    ),
    "qwen3, shares not scaled": (
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig(num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=False, hidden_size=HIDDEN),
        dict(topk=4, pre_softmax=True),
    ),
    "deepseek-v2, lite": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(topk_method="greedy", num_experts_per_tok=6, **DEEPSEEK_V2),
        dict(topk=6, pre_softmax=True, scaling_factor=3.0),
    ),
    "deepseek-v2": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(
            topk_method="group_limited_greedy", num_experts_per_tok=6, n_group=4, topk_group=2, **DEEPSEEK_V2
        ),
        dict(topk=6, pre_softmax=True, scaling_factor=3.0, num_groups=4, group_topk=2, group_score_topk=1),
    ),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(
            n_routed_experts=EXPERTS, num_experts_per_tok=5, n_group=4, topk_group=2, hidden_size=HIDDEN,
            routed_scaling_factor=2.5,
        ),
        dict(
            topk=5, score_function="sigmoid", scaling_factor=2.5, num_groups=4, group_topk=2, group_score_topk=2,
        ),
    ),
}  # fmt: skip


def spread(weights_Tk: torch.Tensor, experts_Tk: torch.Tensor) -> torch.Tensor:
    """``[T, E]``: the weight where an expert is chosen, NaN elsewhere."""
    return torch.full((len(weights_Tk), EXPERTS), torch.nan).scatter(1, experts_Tk, weights_Tk.float())


@pytest.mark.parametrize("name", CASES)
def test_as_transformers(name):
    router_class, config, settings = CASES[name]
    torch.manual_seed(0)
    router = router_class(config)
    router.weight.data.normal_()
    if "sigmoid" in settings.values():
        router.e_score_correction_bias.normal_()
        settings = settings | dict(bias_E=router.e_score_correction_bias)
    with torch.no_grad():
        logits_TE, weights_Tk, experts_Tk = router(torch.randn(TOKENS, HIDDEN) / HIDDEN**0.5)
    torch.testing.assert_close(
        spread(*route(logits_TE, **settings)), spread(weights_Tk, experts_Tk), rtol=1e-6, atol=1e-7, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        dict(topk=2),
        dict(topk=1, pre_softmax=True),
        dict(topk=3, pre_softmax=True, scaling_factor=2.0),
        dict(topk=4, num_groups=4, group_topk=2, group_score_topk=2),
        dict(topk=1, score_function="sigmoid"),
        dict(topk=4, score_function="sigmoid", scaling_factor=2.0),
        dict(topk=6, score_function="sigmoid", num_groups=4, group_topk=2, group_score_topk=3, bias=True),
    ],
    ids=str,
)
def test_as_megatron(settings, dtype):
    """In bf16 too, where many scores of a token are equal after rounding."""
    torch.manual_seed(0)
    logits_TE = torch.randn(TOKENS, EXPERTS).to(dtype)
    settings = dict(settings)
    bias_E = torch.randn(EXPERTS) if settings.pop("bias", False) else None
    weights_Tk, experts_Tk = route(logits_TE, bias_E=bias_E, **settings)
    assert weights_Tk.dtype == dtype
    settings.pop("group_score_topk", None)
    want_TE, chosen_TE = topk_routing_with_score_function(
        logits_TE, expert_bias=bias_E, use_pre_softmax=settings.pop("pre_softmax", False), **settings
    )
    torch.testing.assert_close(
        spread(weights_Tk, experts_Tk),
        want_TE.float().masked_fill(~chosen_TE, torch.nan),
        rtol=1e-6 if dtype == torch.float32 else 0.01,
        atol=0,
        equal_nan=True,
    )


def test_scores_of_zero_give_weights_of_zero():
    """As Megatron: no division by zero where every chosen score vanishes."""
    weights_Tk, _ = route(torch.full((3, EXPERTS), -200.0), topk=4, score_function="sigmoid")
    assert torch.equal(weights_Tk, torch.zeros(3, 4))
