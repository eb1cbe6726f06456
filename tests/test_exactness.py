"""Exactness is the product: a sharded cache gives the tokens and logits of ``transformers`` and of Megatron itself.

Greedy tokens for 48 steps are identical, and the largest logit difference is at most 1e-4 of the logit range, in fp32,
for every family, tp, dcp, layout and every interleave; every rank ends with the same tokens.
"""

from __future__ import annotations

import pytest
import torch
from exactness import BLOCK, check, megatron_rows, reference, worst
from megatron_models import forced_logits, make_runner

from megatron_dcp import CacheConfig, load_model
from megatron_dcp import parallel_state as dcp
from models import FAMILIES
from workers import run_on_ranks

INTERLEAVES = [(1, None), (4, None), (BLOCK, None)]


def interleaves(family: str, dcp_size: int) -> list[tuple[int, None]]:
    """All of them for Llama; the others differ from it in bias and norm, and get one for each dcp size."""
    return INTERLEAVES if family == "llama" else [INTERLEAVES[dcp_size % 3]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_orthogonal(family, tp, dcp_size):
    every = family == "llama" and (tp, dcp_size) in ((1, 3), (2, 2))  # tests/layers holds all of them, everywhere
    others = [(4, exchange) for exchange in ("all_reduce", "ag_rs", "a2a")] if every else []
    check([reference(family, dcp_size)], tp, dcp_size, "orthogonal", interleaves(family, dcp_size) + others)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp,dcp_size,kv_heads", [(1, 1, 2), (2, 1, 2), (2, 2, 1), (4, 2, 2), (4, 4, 1)])
def test_within_tp(family, tp, dcp_size, kv_heads):
    every = (family, tp, dcp_size) == ("llama", 4, 2)
    others = [(4, exchange) for exchange in ("all_reduce", "ag_rs")] if every else []
    models = [reference(family, dcp_size, kv_heads=kv_heads)]
    check(models, tp, dcp_size, "within_tp", interleaves(family, dcp_size) + others)


@pytest.mark.parametrize("tp,dcp_size,layout", [(1, 2, "orthogonal"), (2, 2, "orthogonal"), (2, 2, "within_tp")])
def test_bf16_stays_within_the_spread_of_bf16(tp, dcp_size, layout):
    """Against fp32, dcp in bf16 is no further off than twice what one rank in bf16 without dcp is."""
    kv_heads = 1 if layout == "within_tp" else 2
    theirs, world = reference("llama", dcp_size, kv_heads=kv_heads), tp * dcp_size if layout == "orthogonal" else tp
    alone = run_on_ranks(1, bf16_alone, theirs)[0]
    assert 1e-4 < alone < 0.1, alone
    for errors in run_on_ranks(world, bf16_sharded, theirs, tp, dcp_size, layout):
        assert max(errors) <= 2 * alone, (errors, alone)


def bf16_alone(rank, world, theirs):
    """The spread: Megatron's own forward in bf16 on one rank against ``transformers`` in fp32."""
    dcp.initialize_model_parallel()
    prompts = theirs.prompts
    texts = [prompt + new[:-1] for prompt, new in zip(prompts, theirs.tokens, strict=True)]
    return worst(
        megatron_rows(theirs.path, prompts, texts, "bfloat16"), [torch.from_numpy(each) for each in theirs.logits]
    )


def bf16_sharded(rank, world, theirs, tp, dcp_size, layout):
    """The same tokens fed to a sharded cache in bf16, for every interleave."""
    dcp.initialize_model_parallel(tp, decode_context_parallel_size=dcp_size, dcp_layout=layout)
    prompts = theirs.prompts
    texts = [prompt + new[:-1] for prompt, new in zip(prompts, theirs.tokens, strict=True)]
    model, config = load_model(theirs.path, dcp.get_process_group_collection(), dtype=torch.bfloat16)
    errors = []
    for interleave, _ in INTERLEAVES:
        cache = CacheConfig(block_size=BLOCK, kv_interleave_size=interleave, num_blocks=200)
        ours = forced_logits(make_runner(model, config, cache=cache), texts, [len(prompt) for prompt in prompts])
        errors.append(worst(ours, [torch.from_numpy(each) for each in theirs.logits]))
    return errors
