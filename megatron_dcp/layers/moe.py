"""Megatron's mixture-of-experts layer with a way through a decode step.

All ranks that share a layer hold the same tokens, so nothing is dispatched: every rank routes all tokens, computes the
experts that it holds, and one all-reduce adds up. Which tokens an expert gets changes no collective. Where a prompt's
tokens are dealt out over ranks that share experts, they are gathered first.

Shapes: ``T`` tokens, ``h`` hidden size, ``E`` experts of the model, ``k`` experts of a token, ``t`` (token, expert)
pairs of this rank's experts, sorted by expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_dcp.capture import on_host
from megatron_dcp.comm.exchange import all_reduce_sum
from megatron_dcp.config import divisors
from megatron_dcp.layers.context import DCPContext
from megatron_dcp.layers.linear import product
from megatron_dcp.layers.prefill import gather_tokens
from megatron_dcp.router import GroupedTopKRouter, choose

_ROUTER_DTYPE = {"fp32": torch.float32, "fp64": torch.float64}


class DCPMoELayer(MoELayer):
    """``MoELayer`` plus a decode path. Same parameters, same names; ``forward`` stays Megatron's.

    An instance of ``MoELayer`` becomes one by a change of class (:func:`~megatron_dcp.layers.enable_dcp`).
    """

    def decode(self, x_T1h: Tensor, ctx: DCPContext) -> Tensor:
        """``[T, 1, h]`` → ``[T, 1, h]``: the sum over each token's experts, and the shared expert's output.

        What is routed has the same bits on all ranks of ``ctx.groups.tp_ep`` (it comes out of an all-reduce, or is
        gathered), so all of them take the same decisions. What they add up is in the router's dtype, as in Megatron.
        """
        x_Th = _gathered(x_T1h.squeeze(1), ctx)
        dtype = _ROUTER_DTYPE.get(self.config.moe_router_dtype, x_Th.dtype)
        logits_TE = product(x_Th.to(dtype), self.router.weight.to(dtype))
        if self.router.bias is not None:
            logits_TE = logits_TE + self.router.bias.to(dtype)
        weights_Tk, experts_Tk = choose(self.router, logits_TE)
        out_Th = on_host(lambda: self._own_experts(x_Th, weights_Tk, experts_Tk))
        out_Th = all_reduce_sum(out_Th, ctx.groups.tp_ep, metrics=ctx.metrics)
        out_T1h = _own(out_Th, ctx).to(x_T1h.dtype).unsqueeze(1)
        return out_T1h if self.shared_experts is None else out_T1h + self.shared_experts(x_T1h)

    def _own_experts(self, x_Th: Tensor, weights_Tk: Tensor, experts_Tk: Tensor) -> Tensor:
        """What this rank's experts add to every token, ``[T, h]`` in the dtype of the weights."""
        local = experts_Tk.flatten() - self.local_expert_indices[0]
        here = ((local >= 0) & (local < self.num_local_experts)).nonzero().squeeze(1)
        pairs_t = here[local[here].argsort(stable=True)]
        tokens_t = pairs_t // experts_Tk.shape[1]
        out_Th = weights_Tk.new_zeros(x_Th.shape)
        if len(pairs_t):
            counts = local[pairs_t].bincount(minlength=self.num_local_experts).cpu()
            out_th = self._compute(x_Th[tokens_t], counts, weights_Tk.flatten()[pairs_t])
            out_Th.index_add_(0, tokens_t, out_th.to(out_Th.dtype))
        return out_Th

    def _compute(self, x_th: Tensor, counts: Tensor, weights_t: Tensor) -> Tensor:
        """Weighted outputs ``[t, h]`` of the local experts, of which each gets the next ``counts[expert]`` rows."""
        if not isinstance(self.experts, SequentialMLP):
            return self.experts(x_th, counts, weights_t)[0]
        rows = counts.tolist()
        parts = zip(self.experts.local_experts, x_th.split(rows), weights_t.split(rows), strict=True)
        return torch.cat([expert(x, weights)[0] for expert, x, weights in parts if len(x)])  # most have no token


def _gathered(x_Th: Tensor, ctx: DCPContext) -> Tensor:
    """The replicated tokens, and the striped ones of all ranks where those share experts."""
    plan = ctx.plan
    if plan is None or not plan.striped_counts or not ctx.experts_over_dcp:
        return x_Th
    striped = gather_tokens(x_Th[plan.replicated :], plan.striped_counts, ctx)
    return torch.cat((x_Th[: plan.replicated], striped))


def _own(out_Th: Tensor, ctx: DCPContext) -> Tensor:
    """Of :func:`_gathered` tokens those of this rank."""
    plan = ctx.plan
    if plan is None or not plan.striped_counts or not ctx.experts_over_dcp:
        return out_Th
    rank = ctx.groups.dcp.rank()
    first = plan.replicated + sum(plan.striped_counts[:rank])
    return torch.cat((out_Th[: plan.replicated], out_Th[first : first + plan.striped_counts[rank]]))


def experts_over_dcp(groups: Any) -> bool:
    """Whether ranks of several DCP ranks share experts, so that an expert's rank needs tokens of all of them."""
    return not set(dist.get_process_group_ranks(groups.tp_ep)) <= set(dist.get_process_group_ranks(groups.tp))


def unsupported_experts(config: Any) -> Iterator[tuple[str, Any, str]]:
    """``(field, value, why)`` of every MoE setting of a ``TransformerConfig`` that the decode path does not know."""
    if not config.num_moe_experts:
        return
    simple = {
        "moe_expert_capacity_factor": "whether a token is dropped would depend on what else is decoded; use None",
        "moe_latent_size": "experts in a latent space are not there yet",
        "moe_shared_expert_overlap": "it leaves the shared expert's sum to the dispatcher; use False",
        "moe_apply_probs_on_input": "weights go onto the experts' outputs; use False",
        "moe_router_force_load_balancing": "it replaces the router's decisions by random ones; use False",
        "moe_router_force_biased": "it replaces the router's decisions by random ones; use None",
        "moe_enable_routing_replay": "decoding neither records nor replays decisions; use False",
    }
    for field, why in simple.items():
        if getattr(config, field, None):
            yield field, getattr(config, field), why
    balancing = config.moe_router_load_balancing_type
    for kind in [balancing] if isinstance(balancing, str) else balancing:
        if kind in ("sinkhorn", "quantile_balancing"):
            yield "moe_router_load_balancing_type", balancing, f"{kind} is another way to choose experts than top-k"
    if config.moe_router_score_function not in ("softmax", "sigmoid"):
        yield "moe_router_score_function", config.moe_router_score_function, "use 'softmax' or 'sigmoid'"


def check_router(layer: MoELayer) -> None:
    """Raise ``ValueError`` unless :func:`~megatron_dcp.router.choose` decides as the layer's router does."""
    if type(layer.router).routing not in (TopKRouter.routing, GroupedTopKRouter.routing):
        raise ValueError(
            f"layer {layer.layer_number} has router {type(layer.router).__name__}, which has a routing of its own that "
            "DCP decoding does not know; use Megatron's TopKRouter"
        )


def check_expert_groups(groups: Any) -> None:
    """Raise ``ValueError`` unless the ranks that share the experts decode one batch together.

    Args:
        groups: Process groups with ``.tp_ep``, ``.ep``, ``.expt_tp`` and ``.tp_dcp``.
    """
    sharing = dist.get_process_group_ranks(groups.tp_ep)
    together = dist.get_process_group_ranks(groups.tp_dcp)
    if not set(sharing) <= set(together):
        expert_tp = groups.expt_tp.size()
        legal = divisors(len(together) // expert_tp) if len(together) % expert_tp == 0 else "1"
        raise ValueError(
            f"expert_model_parallel_size={groups.ep.size()} (x expert_tensor_parallel_size={expert_tp}) shares experts "
            f"over ranks {sharing}, but only ranks {together} (tp x dcp) decode one batch; replicas that share experts "
            f"would have to step together. Use an expert_model_parallel_size among {legal}, or a larger "
            "decode_context_parallel_size"
        )
