"""Finds facts hidden in a long text with a KV cache that no rank holds whole. Run it by ``examples/quickstart.sh``.

Four ranks, tp 2 x dcp 2: two TP ranks halve the KV heads, two DCP ranks halve the positions. The same questions then go
to the same model without dcp, and the tokens are compared.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch.distributed as dist
from hidden_facts import Question, evaluation_prompt

from megatron_dcp import LLM, CacheConfig, RequestOutput, SamplingParams
from megatron_dcp import parallel_state as dcp

HERE = Path(__file__).parent


def hide_facts(llm: LLM, tokens: int, count: int, seed: int) -> tuple[str, list[Question]]:
    """The chronicle of ``tokens`` tokens with ``count`` facts hidden at even depths, and the questions about them."""
    haystack = (HERE / "haystack.txt").read_text()
    depths = [i / (count - 1) for i in range(count)]
    text, questions = evaluation_prompt(seed, lambda t: len(llm.tokenizer.encode(t)), tokens, haystack, depths)
    return text, sorted(questions, key=lambda question: question.depth)


def ask(llm: LLM, prompts: list[str], questions: list[Question], say) -> tuple[list[list[int]], float]:
    """Ask one question after the other, streaming the answers. Returns tokens of each answer and decoded tokens/s."""
    stop = llm.tokenizer.encode(".")
    answers, decoding = [], 0.0
    for prompt, question in zip(prompts, questions, strict=True):
        say(f"\n  {question.prompt.split('?')[0]}?  ", end="")
        tokens, text = [], ""
        for event in llm.stream([prompt], SamplingParams(max_tokens=12, stop_token_ids=stop)):
            if tokens:
                decoding += time.perf_counter() - before
            before = time.perf_counter()
            tokens.append(event.token_id)
            text += event.text
            say(event.text, end="")
        answers.append(tokens)
        right = text.strip().rstrip(".") == question.answer.strip().rstrip(".")
        say(f"   {'right' if right else 'WRONG, it is' + question.answer}  (hidden at {question.depth:.0%})", end="")
    say("")
    return answers, sum(len(a) - 1 for a in answers) / decoding
