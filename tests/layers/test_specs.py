"""How a model comes by its decode path: by spec, or in place; and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron_models import (
    forced_logits,
    make_runner,
    random_state,
    sharded_model,
    tiny_config,
    training_logits,
    whole_model,
)

from megatron_dcp import CacheConfig, parallel_state
from megatron_dcp._cpu import megatron_on_cpu
from megatron_dcp._mcore import build_model, local_layer_spec
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line

TEXT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


def spec_case(rank, world):
    from megatron_dcp.layers import DCPSelfAttention, dcp_layer_spec

    parallel_state.initialize_model_parallel(decode_context_parallel_size=world)
    config = tiny_config()
    state = random_state(config)
    stock = local_layer_spec(config)
    model = sharded_model(config, state, layer_spec=dcp_layer_spec(stock))
    assert stock.submodules.self_attention.module is not DCPSelfAttention, "the spec that was given is left alone"
    assert all(type(layer.self_attention) is DCPSelfAttention for layer in model.decoder.layers)
    want = training_logits(whole_model(config, state), TEXT)
    assert torch.equal(training_logits(model, TEXT), want), "the training forward is Megatron's"
    runner = make_runner(model, config, cache=CacheConfig(block_size=4, num_blocks=8))
    (got,) = forced_logits(runner, [TEXT], [3])
    return float((got - want[2:, : config.vocab_size]).abs().max() / (want.max() - want.min()))


def test_a_model_built_from_a_dcp_spec_trains_as_before_and_decodes():
    assert max(run_on_ranks(2, spec_case)) < 1e-5


def live_case(rank, world):
    from megatron_dcp.layers import enable_dcp

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = tiny_config(add_qkv_bias=True)
    model = sharded_model(config, random_state(config))
    before = training_logits(model, TEXT)
    names, pointers = list(model.state_dict()), [p.data_ptr() for p in model.parameters()]
    assert enable_dcp(Wrapper(Wrapper(model))) is model
    assert enable_dcp(model) is model, "twice is once"
    assert list(model.state_dict()) == names
    assert [p.data_ptr() for p in model.parameters()] == pointers, "no second copy of the weights"
    assert torch.equal(training_logits(model, TEXT), before)
    runner = make_runner(model, config, cache=CacheConfig(block_size=4, num_blocks=8))
    (first,) = forced_logits(runner, [TEXT], [1])
    # Train a step between two generations: the decode path reads the weights of now.
    model.train()
    with megatron_on_cpu():
        mask = torch.ones(len(TEXT) - 1, len(TEXT) - 1, dtype=torch.bool).triu(1)[None, None]
        positions = torch.arange(len(TEXT) - 1)[None]
        model(torch.tensor([TEXT[:-1]]), positions, mask, labels=torch.tensor([TEXT[1:]])).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
    model.eval()
    (second,) = forced_logits(runner, [TEXT], [1])
    logits = training_logits(model, TEXT)
    want = torch.cat([gather(logits, rank, world)], dim=-1)[:, : config.vocab_size]
    assert float((first - second).abs().max()) > 1e-3, "the step changed something"
    return float((second - want).abs().max() / (want.max() - want.min()))


def gather(logits, rank, world):
    parts = [torch.empty_like(logits) for _ in range(world)]
    torch.distributed.all_gather(parts, logits.contiguous())
    return torch.cat(parts, dim=-1)


def test_a_live_model_trains_and_decodes_in_turn_on_one_set_of_weights():
    assert max(run_on_ranks(2, live_case)) < 1e-5


def refusal_case(rank, world, field, value):
    from megatron_dcp.layers import enable_dcp

    parallel_state.initialize_model_parallel()
    model = build_model(tiny_config(), parallel_state.get_process_group_collection())
    classes = [type(module) for module in model.modules()]
    setattr(model.config, field, value)
    with pytest.raises(ValueError, match=field):
        enable_dcp(model)
    assert [type(module) for module in model.modules()] == classes, "a refused model is left as it was"


@pytest.mark.parametrize(
    "field,value",
    [
        ("window_size", (128, 128)),
        ("sequence_parallel", True),
        ("context_parallel_size", 2),
        ("virtual_pipeline_model_parallel_size", 2),
    ],
)
def test_what_the_decode_path_does_not_know_is_refused_by_name(field, value):
    run_on_ranks(1, refusal_case, field, value)


def foreign_case(rank, world):
    from megatron_dcp.layers import dcp_layer_spec, enable_dcp

    with pytest.raises(ValueError, match="no Megatron GPTModel"):
        enable_dcp(torch.nn.Linear(2, 2))
    spec = local_layer_spec(tiny_config())
    bare = dataclasses.replace(spec.submodules.self_attention, module=torch.nn.Identity)
    spec.submodules.self_attention = bare
    with pytest.raises(ValueError, match="has no DCP form"):
        dcp_layer_spec(spec)


def test_what_is_no_gpt_model_is_refused():
    run_on_ranks(1, foreign_case)
