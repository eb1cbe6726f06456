"""Sinks: in the training forward against plain fp64 math and Megatron's own core attention, and over a sharded cache.

Shapes: ``s`` tokens, ``b`` sequences, ``N`` query heads, ``K`` KV heads, ``H`` head dim.
"""

from __future__ import annotations

import pytest
import torch
from layer_cases import sharded_errors
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron_models import single_rank_groups, tiny_config

from megatron_dcp import parallel_state
from megatron_dcp._cpu import megatron_on_cpu
from megatron_dcp._mcore import transformer_config
from megatron_dcp.core_attention import SDPACoreAttention
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line

WINDOW = 5


def by_hand(q_sbNH, k_sbKH, v_sbKH, sinks_N, window):
    """``[s, b, N * H]`` in fp64, every score written out."""
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (q_sbNH, k_sbKH, v_sbKH))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    age = torch.arange(len(q_sbNH))[:, None] - torch.arange(len(q_sbNH))
    scores = scores.masked_fill((age < 0) | (age >= window), -torch.inf)
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks_N.double().exp().view(1, -1, 1, 1))
    return (weights @ v).permute(2, 0, 1, 3).flatten(2)


def core_case(rank, world, kind):
    """Largest differences in outputs and gradients. Megatron's own window needs a GPU."""
    parallel_state.initialize_model_parallel()
    generator = torch.Generator().manual_seed(0)
    s, b, heads, kv_heads, head = 17, 2, 4, 2, 16
    q, k, v = (torch.randn(s, b, n, head, generator=generator) for n in (heads, kv_heads, kv_heads))
    sinks = 2 * torch.randn(heads, generator=generator) if kind == "learnable" else torch.zeros(heads)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # Megatron's dropout asks for one
    config = tiny_config(softmax_type=kind, window_size=WINDOW, window_attn_skip_freq=(1, 0))
    arguments = dict(attn_mask_type=AttnMaskType.causal, attention_type="self", pg_collection=single_rank_groups())
    later = torch.ones(s, s, dtype=torch.bool).triu(1)[None, None]
    errors = {}
    for layer, window in ((1, WINDOW), (2, s)):
        with megatron_on_cpu():
            ours, theirs = (
                core(config=transformer_config(config, tp=1, dtype=torch.float32), layer_number=layer, **arguments)
                for core in (SDPACoreAttention, DotProductAttention)
            )
            assert ours.state_dict().keys() == theirs.state_dict().keys()
            for each in (ours, theirs):
                each.load_state_dict({"softmax_offset": sinks} if kind == "learnable" else {})
            want, got = by_hand(q, k, v, sinks, window), ours(q, k, v)
            errors[window] = float((got - want).abs().max())
            if window == s:
                errors["Megatron"] = float((got - theirs(q, k, v, later)).abs().max())
            if kind == "learnable":
                leaf = sinks.double().requires_grad_()
                by_hand(q, k, v, leaf, window).square().sum().backward()
                got.square().sum().backward()
                errors[window, "gradient"] = float((ours.softmax_offset.grad - leaf.grad).abs().max())
            half = ours.bfloat16()(*(x.bfloat16() for x in (q, k, v)))
            assert half.dtype == torch.bfloat16 and float((half - want).abs().max()) < 0.03
    return errors


@pytest.mark.parametrize("kind", ["learnable", "off-by-one"])
def test_the_training_forward_is_that_of_the_equation_and_of_megatron(kind):
    (errors,) = run_on_ranks(1, core_case, kind)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(
    "world,tp,dcp,layout,kind",
    [
        (2, 1, 2, "orthogonal", "learnable"),
        (2, 1, 2, "orthogonal", "off-by-one"),
        (4, 2, 2, "orthogonal", "learnable"),
        (4, 4, 2, "within_tp", "learnable"),
        (4, 4, 2, "within_tp", "off-by-one"),
    ],
)
def test_a_sink_counts_once_whatever_attends(world, tp, dcp, layout, kind):
    settings = [(1, None, 10**9), (4, "a2a", 10)]
    if layout == "orthogonal":
        settings += [(4, None, 10**9, "pass_kv"), (1, None, 20, "pass_q"), (1, "ag_rs", 7, "replicated")]
    changes = dict(softmax_type=kind)
    for errors in run_on_ranks(world, sharded_errors, tp, dcp, layout, changes, settings):
        assert max(errors.values()) < 1e-5, errors
