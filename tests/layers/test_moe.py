"""Experts over tp, dcp and ep give what Megatron's own layer gives on one rank, with one all-reduce per layer.

Shapes: ``T`` tokens, ``h`` hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron_models import (
    MOE_KINDS,
    forced_logits,
    make_runner,
    moe_config,
    random_state,
    sharded_model,
    tiny_config,
    training_logits,
    whole_model,
)

from megatron_dcp import parallel_state
from megatron_dcp._cpu import megatron_on_cpu
from megatron_dcp.config import CacheConfig
from megatron_dcp.layers import enable_dcp
from megatron_dcp.layers.moe import DCPMoELayer, experts_over_dcp
from megatron_dcp.metrics import Metrics
from megatron_dcp.model_config import ModelConfig
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line


def inputs(tokens: int, hidden: int) -> torch.Tensor:
    return torch.randn(tokens, 1, hidden, generator=torch.Generator().manual_seed(tokens))


def decode(layer: DCPMoELayer, x_T1h: torch.Tensor, groups: Any, metrics: Metrics | None = None) -> torch.Tensor:
    with torch.inference_mode():
        return layer.decode(x_T1h, SimpleNamespace(groups=groups, metrics=metrics, plan=None))


def by_megatron(layer: Any, x_T1h: torch.Tensor) -> torch.Tensor:
    with megatron_on_cpu(), torch.no_grad():
        return layer(x_T1h)[0]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference as a share of the largest value; more than any tolerance where a shape or dtype differs."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return 1e9
    return float((got - want).abs().max() / want.abs().max())


def init(tp: int, dcp: int, layout: str, ep: int, expert_tp: int) -> Any:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expert_tp,
        decode_context_parallel_size=dcp,
        dcp_layout=layout,
    )
    return parallel_state.get_process_group_collection()


def layer_case(rank, world, kinds, *sizes):
    """Largest error per kind, and whether all went as it should on this rank."""
    groups = init(*sizes)
    ranks = groups.tp_ep.size()
    errors = {}
    for kind in kinds:
        config = moe_config(kind)
        state = random_state(config)
        oracle = whole_model(config, state)
        model = enable_dcp(sharded_model(config, state))
        worst = 0.0
        for number, (layer, whole) in enumerate(zip(model.decoder.layers, oracle.decoder.layers, strict=True)):
            assert isinstance(layer.mlp, DCPMoELayer) == config.is_moe_layer(number)
            if not config.is_moe_layer(number):
                continue
            for tokens in (1, 2, 40):
                x_T1h, metrics = inputs(tokens, config.hidden_size), Metrics()
                kept = x_T1h.clone()
                worst = max(worst, error(decode(layer.mlp, x_T1h, groups, metrics), by_megatron(whole.mlp, x_T1h)))
                assert torch.equal(x_T1h, kept)
                sent = 2 * (ranks - 1) * 4 * tokens * config.hidden_size // ranks
                assert metrics.collectives == ({"all_reduce": (1, sent)} if ranks > 1 else {})
        errors[kind] = worst
    return errors


@pytest.mark.parametrize(
    "tp,dcp,layout,ep,expert_tp",
    [
        (1, 1, "orthogonal", 1, 1),
        (1, 2, "orthogonal", 1, 1),
        (1, 2, "orthogonal", 2, 1),
        (1, 2, "orthogonal", 1, 2),
        (1, 3, "orthogonal", 1, 3),
        (2, 1, "orthogonal", 1, 2),
        (2, 1, "orthogonal", 2, 1),
        (2, 2, "within_tp", 2, 1),
        (2, 2, "orthogonal", 1, 1),
        (2, 2, "orthogonal", 1, 2),
        (2, 2, "orthogonal", 2, 2),
        (2, 2, "orthogonal", 4, 1),
        (1, 4, "orthogonal", 2, 1),
        (4, 2, "within_tp", 2, 2),
    ],
)
def test_layer(tp, dcp, layout, ep, expert_tp):
    world = tp * dcp if layout == "orthogonal" else tp
    for errors in run_on_ranks(world, layer_case, list(MOE_KINDS), tp, dcp, layout, ep, expert_tp):
        assert len(errors) == len(MOE_KINDS) and max(errors.values()) < 2e-6, errors


def test_two_replicas_decode_each_their_own():
    """Experts are shared inside a replica (tp 1 x dcp 2) only; the ranks of the other one hold copies."""
    for errors in run_on_ranks(4, layer_case, ["deepseek-v3"], 1, 2, "orthogonal", 2, 1):
        assert errors["deepseek-v3"] < 2e-6


def striped_case(rank, world, tp, dcp, ep, expert_tp):
    """A step of two tokens that all ranks have and some that are dealt out, not evenly."""
    groups = init(tp, dcp, "orthogonal", ep, expert_tp)
    counts = [3 + 2 * number for number in range(dcp)]
    before = 2 + sum(counts[: groups.dcp.rank()])
    own = [0, 1, *range(before, before + counts[groups.dcp.rank()])]
    plan = SimpleNamespace(replicated=2, striped_counts=counts)
    ctx = SimpleNamespace(groups=groups, metrics=None, plan=plan, experts_over_dcp=experts_over_dcp(groups))
    errors = {}
    for kind in MOE_KINDS:
        config = moe_config(kind)
        state = random_state(config)
        number = max(number for number in range(config.num_layers) if config.is_moe_layer(number))
        layer = enable_dcp(sharded_model(config, state)).decoder.layers[number].mlp
        x_T1h = inputs(2 + sum(counts), config.hidden_size)
        with torch.inference_mode():
            got = layer.decode(x_T1h[own], ctx)
        errors[kind] = error(got, by_megatron(whole_model(config, state).decoder.layers[number].mlp, x_T1h)[own])
    return ctx.experts_over_dcp, errors


@pytest.mark.parametrize(
    "tp,dcp,ep,expert_tp,over_dcp",
    [(1, 3, 1, 3, True), (2, 2, 4, 1, True), (1, 4, 2, 1, True), (2, 2, 2, 1, False), (1, 2, 1, 1, False)],
)
def test_tokens_that_are_dealt_out(tp, dcp, ep, expert_tp, over_dcp):
    for over, errors in run_on_ranks(tp * dcp, striped_case, tp, dcp, ep, expert_tp):
        assert over == over_dcp
        assert len(errors) == len(MOE_KINDS) and max(errors.values()) < 2e-6, errors


def by_definition(config: ModelConfig, state: dict[str, torch.Tensor], x_T1h: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V2's layer 1, token by token and expert by expert, in fp64."""
    moe = config.moe
    weights = {name.removeprefix("decoder.layers.1.mlp."): value.double() for name, value in state.items()}

    def ffn(name: str, x_h: torch.Tensor) -> torch.Tensor:
        gate, up = (weights[f"{name}.linear_fc1.weight"] @ x_h).chunk(2)
        return weights[f"{name}.linear_fc2.weight"] @ (F.silu(gate) * up)

    rows = []
    for x_h in x_T1h.squeeze(1).double():
        shares = (weights["router.weight"] @ x_h).softmax(0).tolist()
        size = moe.num_experts // moe.moe_router_num_groups
        groups = [range(first, first + size) for first in range(0, moe.num_experts, size)]
        groups.sort(key=lambda group: max(shares[e] for e in group), reverse=True)
        allowed = [e for group in groups[: moe.moe_router_group_topk] for e in group]
        chosen = sorted(allowed, key=lambda e: shares[e], reverse=True)[: moe.moe_router_topk]
        routed = sum(shares[e] * ffn(f"experts.local_experts.{e}", x_h) for e in chosen)
        rows.append(moe.moe_router_topk_scaling_factor * routed + ffn("shared_experts", x_h))
    return torch.stack(rows).unsqueeze(1)


def definition_case(rank, world):
    groups = init(1, 2, "orthogonal", 2, 1)
    # three experts in a group: its best one and its best two often disagree
    config = moe_config("deepseek-v2", num_experts=12)
    state = random_state(config)
    x_T1h = inputs(60, config.hidden_size)
    want = by_definition(config, state, x_T1h).float()

    def megatrons(config: ModelConfig) -> Any:
        return whole_model(config, state).decoder.layers[1].mlp

    layer = enable_dcp(sharded_model(config, state)).decoder.layers[1].mlp
    megatrons_rule = tiny_config(moe=replace(config.moe, moe_router_group_score_topk=None))
    return [
        error(got, want)
        for got in (
            decode(layer, x_T1h, groups),
            by_megatron(megatrons(config), x_T1h),
            by_megatron(megatrons(megatrons_rule), x_T1h),
        )
    ]


def test_group_of_the_best_expert():
    """DeepSeek-V2's rule, which Megatron lacks, in decoding and in the forward without a cache; it is another rule."""
    for decoded, forward, megatrons_rule in run_on_ranks(2, definition_case):
        assert decoded < 2e-6 and forward < 2e-6
        assert megatrons_rule > 0.1


def silent_case(rank, world, tokens):
    """All tokens go to the first half of the experts: no other rank than the first has any."""
    groups = init(1, 2, "orthogonal", 2, 1)
    config = moe_config("deepseek-v3")
    state = random_state(config)
    state["decoder.layers.1.mlp.router.expert_bias"] = torch.tensor([9.0] * 4 + [0.0] * 4)
    oracle = whole_model(config, state).decoder.layers[1].mlp
    layer = enable_dcp(sharded_model(config, state)).decoder.layers[1].mlp
    x_T1h, calls = inputs(tokens, config.hidden_size), []
    for expert in layer.experts.local_experts:
        expert.register_forward_hook(lambda *_: calls.append(1))
    return error(decode(layer, x_T1h, groups), by_megatron(oracle, x_T1h)), len(calls)


def test_rank_without_tokens():
    for tokens in (1, 7):
        (busy_error, busy_calls), (idle_error, idle_calls) = run_on_ranks(2, silent_case, tokens)
        assert max(busy_error, idle_error) < 2e-6
        assert (busy_calls, idle_calls) == (4, 0)


class Together(torch.nn.Module):
    """Stands for experts that compute all their tokens in one kernel: they are called as Megatron calls them."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts, self.calls = experts, []

    def forward(self, x_th, counts, weights_t):
        assert counts.device.type == "cpu" and int(counts.sum()) == len(x_th) == len(weights_t) > 0
        self.calls.append(counts.tolist())
        return self.experts(x_th, counts, weights_t)


def together_case(rank, world):
    groups = init(1, 2, "orthogonal", 2, 1)
    config = moe_config("mixtral")
    state = random_state(config)
    layer = enable_dcp(sharded_model(config, state)).decoder.layers[0].mlp
    layer.experts = Together(layer.experts)
    x_T1h = inputs(30, config.hidden_size)
    got = decode(layer, x_T1h, groups)
    (counts,) = layer.experts.calls
    return error(got, by_megatron(whole_model(config, state).decoder.layers[0].mlp, x_T1h)), counts


def test_experts_of_one_kernel():
    results = run_on_ranks(2, together_case)
    assert max(worst for worst, _ in results) < 2e-6
    assert sum(sum(counts) for _, counts in results) == 30 * 2


def bf16_case(rank, world, router_dtype):
    groups = init(2, 1, "orthogonal", 2, 1)
    errors = []
    for kind in ("mixtral", "qwen", "deepseek-v3"):
        config = moe_config(kind)
        state = random_state(config)
        whole = whole_model(config, state, torch.bfloat16, moe_router_dtype=router_dtype)
        model = enable_dcp(sharded_model(config, state, torch.bfloat16, moe_router_dtype=router_dtype))
        x_T1h = inputs(40, config.hidden_size).bfloat16()
        want = by_megatron(whole.decoder.layers[1].mlp, x_T1h)
        errors.append(error(decode(model.decoder.layers[1].mlp, x_T1h, groups), want))
    return errors


@pytest.mark.parametrize("router_dtype", [None, "fp32"])
def test_bf16(router_dtype):
    """The choice is that of Megatron's forward in bf16; only roundings where sums of ranks meet differ."""
    for errors in run_on_ranks(2, bf16_case, router_dtype):
        assert max(errors) < 1e-2


def gate_case(rank, world):
    groups = init(1, 1, "orthogonal", 1, 1)
    config = moe_config("deepseek-v3")
    state = random_state(config)
    gate = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(3))
    state["decoder.layers.1.mlp.shared_experts.gate_weight"] = gate
    model = whole_model(config, state, moe_shared_expert_gate=True)
    x_T1h = inputs(9, config.hidden_size)
    want = by_megatron(model.decoder.layers[1].mlp, x_T1h)
    return error(decode(enable_dcp(model).decoder.layers[1].mlp, x_T1h, groups), want)


def test_shared_expert_with_a_gate():
    assert max(run_on_ranks(1, gate_case)) < 2e-6


def model_case(rank, world, kinds, *sizes):
    """Largest logit difference, as a share of the oracle's range, over prefill and decode of two texts."""
    init(*sizes)
    worst = 0.0
    for kind in kinds:
        config = moe_config(kind)
        state = random_state(config)
        oracle = whole_model(config, state)
        cache = CacheConfig(block_size=4, num_blocks=64)
        runner = make_runner(sharded_model(config, state), config, cache=cache)
        texts, lens = [[(7 * i + 3) % 100 for i in range(n)] for n in (5, 21)], [1, 14]
        for got, text, n in zip(forced_logits(runner, texts, lens), texts, lens, strict=True):
            want = training_logits(oracle, text)[n - 1 :, : got.shape[1]]
            worst = max(worst, float((got - want).abs().max() / (want.max() - want.min())))
    return worst


@pytest.mark.parametrize(
    "tp,dcp,layout,ep,expert_tp",
    [
        (1, 1, "orthogonal", 1, 1),
        (1, 2, "orthogonal", 2, 1),
        (2, 2, "orthogonal", 2, 2),
        (2, 2, "orthogonal", 4, 1),
        (4, 2, "within_tp", 4, 1),
    ],
)
def test_whole_model(tp, dcp, layout, ep, expert_tp):
    world = tp * dcp if layout == "orthogonal" else tp
    assert max(run_on_ranks(world, model_case, list(MOE_KINDS), tp, dcp, layout, ep, expert_tp)) < 1e-5
