"""Every family over two pipeline stages, two DCP ranks each: the tokens of ``transformers``."""

from __future__ import annotations

from exactness import reference

from megatron_dcp import LLM, CacheConfig, SamplingParams
from megatron_dcp import parallel_state as dcp
from megatron_dcp.checkpoint.families import FAMILIES
from workers import run_on_ranks

TOKENS = 8


def generate(rank, world, models):
    tokens = []
    for path, prompts in models:
        llm = LLM(
            path,
            pipeline_model_parallel_size=2,
            decode_context_parallel_size=2,
            cache=CacheConfig(block_size=4),
        )
        outputs = llm.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        tokens.append([output.token_ids for output in outputs])
        dcp.destroy_model_parallel()
    return tokens


def test_tokens_are_those_of_transformers():
    references = {family: reference(family, 2, few=True, decode=TOKENS) for family in FAMILIES}
    models = [(each.path, each.prompts) for each in references.values()]
    for tokens in run_on_ranks(4, generate, models, timeout=300):
        for (family, each), got in zip(references.items(), tokens, strict=True):
            assert got == each.tokens, family
