"""A real Hugging Face model, if ``MEGATRON_DCP_TEST_MODEL`` names its directory: the tokens of ``transformers``."""

from __future__ import annotations

import os

import pytest

from megatron_dcp import LLM, SamplingParams
from megatron_dcp import parallel_state as dcp
from workers import run_on_ranks

MODEL = os.environ.get("MEGATRON_DCP_TEST_MODEL")
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In the beginning the Universe was created. This has made a lot of people very angry and been widely regarded as",
]
TOKENS = 64

pytestmark = pytest.mark.skipif(MODEL is None, reason="MEGATRON_DCP_TEST_MODEL names no model's directory")


@pytest.fixture(scope="module")
def answers():
    """Prompts and what ``transformers`` continues them with, token ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    found = []
    for text in TEXTS:
        prompt = tokenizer(text).input_ids
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0
            )
        found.append((prompt, out[0, len(prompt) :].tolist()))
    return found


def generate(rank, world, tp, dcp_size, prompts):
    llm = LLM(MODEL, tensor_model_parallel_size=tp, decode_context_parallel_size=dcp_size)
    params = SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS)
    tokens = [output.token_ids for output in llm.generate(prompts, params)]
    dcp.destroy_model_parallel()
    return tokens


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dcp_size", [1, 2])
def test_greedy_tokens_are_those_of_transformers(answers, tp, dcp_size):
    prompts = [prompt for prompt, _ in answers]
    for tokens in run_on_ranks(tp * dcp_size, generate, tp, dcp_size, prompts, timeout=3600):
        assert tokens == [want for _, want in answers]
