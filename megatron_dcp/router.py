"""Which experts a token goes to, and how much each of them counts: plain math, and a router that Megatron lacks.

Shapes: ``T`` tokens, ``E`` experts of the model, ``k`` experts of a token, ``G`` groups of experts.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

# Megatron-Core 0.16 rounds scores to the dtype of the logits before it chooses, and in bf16 many are equal then; 0.19
# does not. A model decodes by the rule that it trains with.
_ROUNDS_SCORES = "dense_output" not in inspect.signature(topk_routing_with_score_function).parameters


def route(
    logits_TE: Tensor,
    *,
    topk: int,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    scaling_factor: float | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score_topk: int = 0,
    bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of every token and their weights, by the rules of Mixtral, Qwen3-MoE, DeepSeek-V2 and V3.

    The arguments are those of :class:`~megatron_dcp.model_config.MoEConfig` without their prefix. In fp32 all lines of
    Megatron-Core agree; logits of another dtype are treated as the installed line does.

    Args:
        score_function: ``softmax``: the chosen logits' softmax is their weight, or with ``pre_softmax`` their share of
            the softmax over all experts. ``sigmoid``: the weights are scaled to the sum 1 where ``topk > 1``.
        group_topk: Experts come from so many of ``num_groups`` groups, the ones with the largest sum of their best
            ``group_score_topk`` experts.
        bias_E: Takes part in the choice of groups and experts, not in the weights.

    Returns:
        Weights ``[T, k]`` in the dtype of the logits and experts ``[T, k]`` int64; the order inside ``k`` is open.
    """
    scores_TE = logits_TE.float()
    if score_function == "sigmoid":
        scores_TE = scores_TE.sigmoid()
    elif pre_softmax:
        scores_TE = scores_TE.softmax(-1)
    if _ROUNDS_SCORES:
        scores_TE = scores_TE.to(logits_TE.dtype)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if num_groups and group_topk:
        choice_TE = _only_best_groups(choice_TE, num_groups, group_topk, group_score_topk)
    experts_Tk = choice_TE.topk(topk, sorted=False).indices
    weights_Tk = scores_TE.gather(1, experts_Tk)
    if score_function == "softmax" and not pre_softmax:
        weights_Tk = weights_Tk.softmax(-1, dtype=torch.float32)
    elif score_function == "sigmoid" and topk > 1:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)  # scores may all be 0; as Megatron
    if scaling_factor:
        weights_Tk = weights_Tk * scaling_factor
    return weights_Tk.to(logits_TE.dtype), experts_Tk


def _only_best_groups(scores_TE: Tensor, num_groups: int, group_topk: int, group_score_topk: int) -> Tensor:
    """``scores_TE`` with ``-inf`` outside the ``group_topk`` best groups of every token."""
    grouped_TGE = scores_TE.unflatten(-1, (num_groups, -1))
    group_scores_TG = grouped_TGE.topk(group_score_topk).values.sum(-1)
    best = group_scores_TG.topk(group_topk, sorted=False).indices
    out_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter(-1, best, False)
    return grouped_TGE.masked_fill(out_TG.unsqueeze(-1), -torch.inf).flatten(1)


def choose(router: TopKRouter, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`route` with the settings of a Megatron router."""
    config, groups = router.config, router.config.moe_router_group_topk
    return route(
        logits_TE,
        topk=config.moe_router_topk,
        score_function=config.moe_router_score_function,
        pre_softmax=config.moe_router_pre_softmax,
        scaling_factor=config.moe_router_topk_scaling_factor,
        num_groups=config.moe_router_num_groups,
        group_topk=groups,
        group_score_topk=getattr(router, "group_score_topk", config.moe_router_topk // groups if groups else 0),
        bias_E=router.expert_bias,
    )


class GroupedTopKRouter(TopKRouter):
    """Megatron's router with another score of a group than the sum of its best ``topk // group_topk`` experts.

    DeepSeek-V2 takes a group's best expert. Megatron's ``TransformerConfig`` has no field for this, hence the
    argument. For inference and evaluation only.

    Args:
        group_score_topk: A group's score is the sum of so many of its best experts.
    """

    def __init__(self, *args: Any, group_score_topk: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group_score_topk = group_score_topk

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights ``[T, E]``, zero where not chosen, and the choice ``[T, E]`` bool.

        Raises:
            ValueError: The model is in training mode.
        """
        if self.training:
            raise ValueError(
                f"moe_router_group_score_topk={self.group_score_topk} is not the rule that Megatron trains with "
                f"(moe_router_topk // moe_router_group_topk = {self.topk // self.config.moe_router_group_topk}); "
                "call model.eval(), or build the model without moe_router_group_score_topk to train it"
            )
        logits_TE = logits.flatten(0, -2)
        weights_Tk, experts_Tk = choose(self, logits_TE)
        weights_TE = torch.zeros_like(logits_TE).scatter(1, experts_Tk, weights_Tk)
        return weights_TE, torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, experts_Tk, True)
