"""Exactness is the product: a sharded cache gives the tokens and logits of ``transformers`` and of Megatron itself.

Greedy tokens for 48 steps are identical, and the largest logit difference is at most 1e-4 of the logit range, in fp32,
for every family, tp, dcp, layout and interleave; every rank ends with the same tokens.
"""

from __future__ import annotations

import contextlib
import functools
import random
from typing import Any

import pytest
import torch
from megatron_models import forced_logits, make_runner, single_rank_groups, training_logits

from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams, load_model
from megatron_dcp import parallel_state as dcp
from megatron_dcp.engine.runner import ModelRunner
from models import FAMILIES, hf_model, tiny_model
from workers import run_on_ranks

BLOCK, DECODE, VOCAB = 8, 48, 100
TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=DECODE, ignore_eos=True)


def prompts_for(dcp_size: int) -> list[list[int]]:
    """Of 1 token, around dcp and around the edges of physical and logical blocks, all in one batch."""
    rng = random.Random(dcp_size)
    logical = BLOCK * dcp_size
    lens = {1, dcp_size - 1, dcp_size, BLOCK - 1, BLOCK, BLOCK + 1, logical - 1, logical, logical + 1, 2 * logical} - {
        0
    }
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in sorted(lens)]


@functools.cache
def reference(family: str, kv_heads: int, dcp_size: int) -> tuple[list[list[int]], list[Any]]:
    """What ``transformers`` says: greedy tokens after each prompt, and the logits that chose them."""
    model = hf_model(tiny_model(family, kv_heads=kv_heads))
    tokens, logits = [], []
    for prompt in prompts_for(dcp_size):
        text = list(prompt)
        with torch.no_grad():
            for _ in range(DECODE):  # not model.generate: it would stop at the model's end-of-text token
                rows = model(torch.tensor([text])).logits[0, len(prompt) - 1 :]
                text.append(int(rows[-1].argmax()))
        tokens.append(text[len(prompt) :])
        logits.append(rows.float().numpy())
    return tokens, logits


def case(rank, world, path, tp, dcp_size, layout, settings, tokens, logits):
    """Largest logit difference of every setting, as a share of the logit range; tokens are compared here."""
    prompts = prompts_for(dcp_size)
    texts = [prompt + new[:-1] for prompt, new in zip(prompts, tokens, strict=True)]
    errors, megatron = {}, None
    for interleave, exchange in settings:
        llm = LLM(
            path,
            tensor_model_parallel_size=tp,
            decode_context_parallel_size=dcp_size,
            dcp_layout=layout,
            cache=CacheConfig(block_size=BLOCK, kv_interleave_size=interleave),
            engine=EngineConfig(exchange=exchange, prefill_chunk_size=50),
        )
        with recorded_logits() as ours:
            outputs = llm.generate(prompts, GREEDY)
        for output, want in zip(outputs, tokens, strict=True):
            assert output.token_ids == want, (interleave, exchange, output, want)
        megatron = megatron or megatron_rows(path, prompts, texts, "float32")
        errors[interleave, exchange, "transformers"] = worst(ours, [torch.from_numpy(each) for each in logits])
        errors[interleave, exchange, "megatron"] = worst(ours, megatron)
        dcp.destroy_model_parallel()
    return errors


@contextlib.contextmanager
def recorded_logits():
    """Fills a list, for every sequence in the order of admission, with the logits that chose its tokens."""
    rows: dict[int, list[torch.Tensor]] = {}
    ours: list[torch.Tensor] = []
    step = ModelRunner.step

    def recording(self, batch):
        logits = step(self, batch)
        sampled = [seq for seq in batch.seqs if seq.sample]
        for seq, row in zip(sampled, logits, strict=True):
            rows.setdefault(seq.block_table[0], []).append(row.clone())
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "step", recording)
        yield ours
    ours += [torch.stack(each) for each in rows.values()]


def megatron_rows(path, prompts, texts, dtype):
    """Logits of Megatron's own forward of the whole model on this rank, for every token after each prompt."""
    model, _ = load_model(path, single_rank_groups(), dtype=getattr(torch, dtype))
    return [training_logits(model, text)[len(p) - 1 :, :VOCAB] for p, text in zip(prompts, texts, strict=True)]


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Largest difference over all rows, as a share of the largest logit range."""
    assert all(a.shape == b.shape for a, b in zip(ours, theirs, strict=True))
    span = max(float(each.max() - each.min()) for each in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / span


def check(family, tp, dcp_size, layout, settings, kv_heads=2):
    tokens, logits = reference(family, kv_heads, dcp_size)
    assert len({tuple(each) for each in tokens}) > len(tokens) // 2, "the model says the same to every prompt"
    path = str(tiny_model(family, kv_heads=kv_heads))
    world = tp * dcp_size if layout == "orthogonal" else tp
    for errors in run_on_ranks(world, case, path, tp, dcp_size, layout, settings, tokens, logits, timeout=300):
        assert max(errors.values()) <= TOLERANCE, errors


INTERLEAVES = [(1, None), (4, None), (BLOCK, None)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_orthogonal(family, tp, dcp_size):
    every = family == "llama" and (tp, dcp_size) in ((1, 3), (2, 2))  # tests/layers holds all of them, everywhere
    others = [(4, exchange) for exchange in ("all_reduce", "ag_rs", "a2a")] if every else []
    check(family, tp, dcp_size, "orthogonal", INTERLEAVES + others)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp,dcp_size,kv_heads", [(1, 1, 2), (2, 1, 2), (2, 2, 1), (4, 2, 2), (4, 4, 1)])
def test_within_tp(family, tp, dcp_size, kv_heads):
    others = [(4, exchange) for exchange in ("all_reduce", "ag_rs")] if (family, tp) == ("llama", 4) else []
    check(family, tp, dcp_size, "within_tp", INTERLEAVES + others, kv_heads)


@pytest.mark.parametrize("tp,dcp_size,layout", [(1, 2, "orthogonal"), (2, 2, "orthogonal"), (2, 2, "within_tp")])
def test_bf16_stays_within_the_spread_of_bf16(tp, dcp_size, layout):
    """Against fp32, dcp in bf16 is no further off than twice what one rank in bf16 without dcp is."""
    kv_heads = 1 if layout == "within_tp" else 2
    tokens, logits = reference("llama", kv_heads, dcp_size)
    path, world = str(tiny_model("llama", kv_heads=kv_heads)), tp * dcp_size if layout == "orthogonal" else tp
    alone = run_on_ranks(1, bf16_alone, path, dcp_size, tokens, logits)[0]
    assert 1e-4 < alone < 0.1, alone
    for errors in run_on_ranks(world, bf16_sharded, path, tp, dcp_size, layout, tokens, logits):
        assert max(errors) <= 2 * alone, (errors, alone)


def bf16_alone(rank, world, path, dcp_size, tokens, logits):
    """The spread: Megatron's own forward in bf16 on one rank against ``transformers`` in fp32."""
    dcp.initialize_model_parallel()
    prompts = prompts_for(dcp_size)
    texts = [prompt + new[:-1] for prompt, new in zip(prompts, tokens, strict=True)]
    return worst(megatron_rows(path, prompts, texts, "bfloat16"), [torch.from_numpy(each) for each in logits])


def bf16_sharded(rank, world, path, tp, dcp_size, layout, tokens, logits):
    """The same tokens fed to a sharded cache in bf16, for every interleave."""
    dcp.initialize_model_parallel(tp, decode_context_parallel_size=dcp_size, dcp_layout=layout)
    prompts = prompts_for(dcp_size)
    texts = [prompt + new[:-1] for prompt, new in zip(prompts, tokens, strict=True)]
    model, config = load_model(path, dcp.get_process_group_collection(), dtype=torch.bfloat16)
    errors = []
    for interleave, _ in INTERLEAVES:
        cache = CacheConfig(block_size=BLOCK, kv_interleave_size=interleave, num_blocks=200)
        ours = forced_logits(make_runner(model, config, cache=cache), texts, [len(prompt) for prompt in prompts])
        errors.append(worst(ours, [torch.from_numpy(each) for each in logits]))
    return errors
