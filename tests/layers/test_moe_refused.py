"""Models with experts that decoding does not know, and groups that it cannot run on, are refused by name."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron_models import moe_config, random_state, whole_model

from megatron_dcp import parallel_state
from megatron_dcp._cpu import megatron_on_cpu
from megatron_dcp._mcore import build_model
from megatron_dcp.layers import enable_dcp
from megatron_dcp.layers.moe import DCPMoELayer, check_expert_groups, unsupported_experts
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line


def groups_case(rank, world, tp, dcp, layout, ep, expert_tp):
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expert_tp,
        decode_context_parallel_size=dcp,
        dcp_layout=layout,
    )
    check_expert_groups(parallel_state.get_process_group_collection())


def test_replicas_cannot_share_experts():
    run_on_ranks(4, groups_case, 1, 2, "orthogonal", 2, 1)
    for sizes in [(1, 2, "orthogonal", 4, 1), (2, 1, "orthogonal", 2, 2), (2, 2, "within_tp", 4, 1)]:
        for raised in run_on_ranks(4, groups_case, *sizes, expect_errors=True):
            assert isinstance(raised, ValueError)
            assert f"expert_model_parallel_size={sizes[3]} (x expert_tensor_parallel_size={sizes[4]})" in str(raised)
            legal = "1, 2" if sizes[4] == 1 else "1"
            assert "step together" in str(raised) and f"among {legal}, or" in str(raised)


def refusal_case(rank, world):
    """What each setting is refused with."""
    parallel_state.initialize_model_parallel()
    config = moe_config("mixtral")
    model = build_model(config, parallel_state.get_process_group_collection())
    assert list(unsupported_experts(model.config)) == []
    messages = {}
    for field, value in REFUSED.items():
        kept = getattr(model.config, field, None)
        setattr(model.config, field, value)
        try:
            enable_dcp(model)
        except ValueError as raised:
            messages[field] = str(raised)
        setattr(model.config, field, kept)
    assert not any(isinstance(module, DCPMoELayer) for module in model.modules())
    router = model.decoder.layers[1].mlp.router
    router.__class__ = OwnRouter
    try:
        enable_dcp(model)
    except ValueError as raised:
        messages["router"] = str(raised)
    assert not any(isinstance(module, DCPMoELayer) for module in model.modules())
    router.__class__ = TopKRouter
    enable_dcp(model)
    return messages


class OwnRouter(TopKRouter):
    def routing(self, logits, padding_mask=None):
        raise AssertionError("never asked")


REFUSED = {
    "moe_expert_capacity_factor": 1.0,
    "moe_latent_size": 16,
    "moe_shared_expert_overlap": True,
    "moe_apply_probs_on_input": True,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 0.1,
    "moe_enable_routing_replay": True,
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_router_score_function": "sqrtsoftplus",
}


def test_unknown_settings_are_refused_by_name():
    (messages,) = run_on_ranks(1, refusal_case)
    assert messages.pop("router").startswith("layer 2 has router OwnRouter")
    assert set(messages) == set(REFUSED)
    for field, message in messages.items():
        assert message.startswith(f"{field}={REFUSED[field]!r} is not supported")


def training_case(rank, world):
    parallel_state.initialize_model_parallel()
    config = moe_config("deepseek-v2")
    model = whole_model(config, random_state(config)).train()
    with megatron_on_cpu(), torch.no_grad():
        model.decoder.layers[1].mlp(torch.ones(3, 1, config.hidden_size))


def test_group_rule_that_megatron_cannot_train():
    (raised,) = run_on_ranks(1, training_case, expect_errors=True)
    assert isinstance(raised, ValueError)
    assert "moe_router_group_score_topk=1" in str(raised) and "model.eval()" in str(raised)
