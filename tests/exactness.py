"""A sharded cache against ``transformers`` and Megatron's own forward on the same weights, as exactness tests run it.

Shapes of the comparison: for every prompt, the logits that chose each of its greedy tokens.
"""

from __future__ import annotations

import contextlib
import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron_models import everywhere, single_rank_groups, training_logits

from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams, load_model
from megatron_dcp import parallel_state as dcp
from megatron_dcp.config import PrefillName
from megatron_dcp.engine.runner import ModelRunner
from models import hf_model, tiny_model
from workers import run_on_ranks

BLOCK, DECODE, VOCAB = 8, 48, 100
TOLERANCE = 1e-4
PREFILLS: tuple[PrefillName, ...] = ("pass_kv", "pass_q", "replicated")


def prompts_for(dcp_size: int, few: bool = False) -> list[list[int]]:
    """Of 1 token, around dcp and around the edges of physical and logical blocks, all in one batch; ``few``: half."""
    rng = random.Random(dcp_size)
    logical = BLOCK * dcp_size
    lens = {1, dcp_size, BLOCK + 1, logical - 1, logical + 1}
    if not few:
        lens |= {dcp_size - 1, BLOCK - 1, BLOCK, logical, 2 * logical} - {0}
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in sorted(lens)]


@dataclass(frozen=True)
class Reference:
    """A model and what ``transformers`` says to the prompts: greedy tokens, and the logits that chose them."""

    path: str
    prompts: list[list[int]]
    decode: int
    tokens: list[list[int]]
    logits: list[Any]


@functools.cache
def reference(family: str, dcp_size: int, few: bool = False, decode: int = DECODE, **model: Any) -> Reference:
    """Of ``tiny_model(family, **model)`` for :func:`prompts_for`, ``decode`` tokens each."""
    path = tiny_model(family, **model)
    hf, prompts, tokens, logits = hf_model(path), prompts_for(dcp_size, few), [], []
    for prompt in prompts:
        text = list(prompt)
        with torch.no_grad():
            for _ in range(decode):  # not model.generate: it would stop at the model's end-of-text token
                rows = hf(torch.tensor([text])).logits[0, len(prompt) - 1 :]
                text.append(int(rows[-1].argmax()))
        tokens.append(text[len(prompt) :])
        logits.append(rows.float().numpy())
    assert len({tuple(each) for each in tokens}) > len(tokens) // 2, "the model says the same to every prompt"
    return Reference(str(path), prompts, decode, tokens, logits)


def sharded_errors(rank, world, references, tp, dcp_size, layout, settings, experts=None):
    """Largest logit difference of every model and setting, as a share of the logit range; tokens are compared here.

    A setting is an interleave and an exchange; the ways to share a prompt's tokens take turns with them. ``experts``:
    expert parallel sizes.
    """
    errors = {}
    for number, theirs in enumerate(references):
        prompts = theirs.prompts
        texts = [prompt + new[:-1] for prompt, new in zip(prompts, theirs.tokens, strict=True)]
        megatron, groups = None, single_rank_groups()
        for turn, (interleave, exchange) in enumerate(settings, number + dcp_size):
            llm = LLM(
                theirs.path,
                tensor_model_parallel_size=tp,
                decode_context_parallel_size=dcp_size,
                dcp_layout=layout,
                cache=CacheConfig(block_size=BLOCK, kv_interleave_size=interleave),
                engine=EngineConfig(exchange=exchange, prefill_chunk_size=50, prefill=PREFILLS[turn % 3]),
                **(experts or {}),
            )
            with recorded_logits() as ours:
                outputs = llm.generate(prompts, SamplingParams(max_tokens=theirs.decode, ignore_eos=True))
            for output, want in zip(outputs, theirs.tokens, strict=True):
                assert output.token_ids == want, (number, interleave, exchange, output, want)
            key = number, interleave, exchange
            errors[*key, "transformers"] = worst(ours, [torch.from_numpy(each) for each in theirs.logits])
            if rank == 0:  # all ranks have recorded the same
                megatron = megatron or megatron_rows(theirs.path, prompts, texts, "float32", groups)
                errors[*key, "megatron"] = worst(ours, megatron)
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
        known = everywhere(self, logits, batch.num_logits)
        sampled = [seq for seq in batch.seqs if seq.num_logits]
        for seq, row in zip(sampled, known, strict=True):
            rows.setdefault(seq.block_table[0], []).append(row.clone())
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "step", recording)
        yield ours
    ours += [torch.stack(each) for each in rows.values()]


def megatron_rows(path, prompts, texts, dtype, groups=None):
    """Logits of Megatron's own forward of the whole model on this rank, for every token after each prompt.

    ``groups``: from `single_rank_groups`; ``None``: made here, which all ranks must call.
    """
    model, _ = load_model(path, groups or single_rank_groups(), dtype=getattr(torch, dtype))
    return [training_logits(model, text)[len(p) - 1 :, :VOCAB] for p, text in zip(prompts, texts, strict=True)]


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Largest difference over all rows, as a share of the largest logit range."""
    assert all(a.shape == b.shape for a, b in zip(ours, theirs, strict=True))
    span = max(float(each.max() - each.min()) for each in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / span


def check(references, tp, dcp_size, layout, settings, experts=None):
    """Run every model with every setting on as many ranks as the sizes take."""
    world = tp * dcp_size if layout == "orthogonal" else tp
    args = (references, tp, dcp_size, layout, settings, experts)
    for errors in run_on_ranks(world, sharded_errors, *args, timeout=300):
        assert errors and max(errors.values()) <= TOLERANCE, errors
