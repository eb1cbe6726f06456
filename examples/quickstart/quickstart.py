"""Finds facts hidden in a long text, with a KV cache that no rank holds whole. Run it by ``examples/quickstart.sh``.

Four ranks, tp 2 x dcp 2: the two TP ranks halve the KV heads, the two DCP ranks halve the positions. The same questions
then go to the same model without dcp, and the tokens are compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from hidden_facts import Question, hide_facts
from megatron.core import parallel_state as mpu

from megatron_dcp import LLM, CacheConfig, SamplingParams
from megatron_dcp import parallel_state as dcp

HERE = Path(__file__).parent
CACHE = CacheConfig(block_size=32)


@dataclass
class Run:
    """What one pass over the questions gave.

    Attributes:
        answers: Tokens of each answer.
        kv_bytes: KV cache of this rank.
        prompt_tokens: Computed; on the driver.
        cached_tokens: Prompt tokens that were in the cache already, from the question before; on the driver.
        prefill_s, decode_s: Seconds spent on prompts and on answers.
    """

    answers: list[list[int]]
    kv_bytes: int
    prompt_tokens: int
    cached_tokens: int
    prefill_s: float
    decode_s: float


def say(text: str, end: str = "\n") -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, end=end, flush=True)


def ask(llm: LLM, text: str, questions: list[Question], say: Callable[..., None]) -> Run:
    """Ask about the text, one question after the other; answers are streamed as they are decoded."""
    (full_stop,) = llm.tokenizer.encode(".")
    run = Run([], 0, 0, 0, 0.0, 0.0)
    for number, question in enumerate(questions, 1):
        prompt = llm.tokenizer.encode(f"{text}\n\n{question.prompt}")
        say(f"  [{number}/{len(questions)}] {question.prompt.split('?')[0]}? …", end="")
        answer, tokens, mark = "", [], time.perf_counter()
        for _, token, piece in llm.stream(prompt, SamplingParams(max_tokens=12, stop_token_ids=[full_stop])):
            now = time.perf_counter()
            if tokens:
                run.decode_s += now - mark
            else:
                run.prefill_s += now - mark
            tokens.append(token)
            answer += piece
            say(piece, end="")
            mark = time.perf_counter()
        right = answer.strip().rstrip(".") == question.answer.strip().rstrip(".")
        verdict = "right" if right else f"WRONG, the text says{question.answer}"
        say(f"   {verdict} (hidden at {question.depth:.0%} of the text)")
        run.answers.append(tokens)
    if llm.is_driver:
        stats = llm.stats()
        run.prompt_tokens, run.cached_tokens = stats.prompt_tokens, stats.prefix_hit_tokens
    run.kv_bytes = llm.runner.kv_bytes
    return run


def is_right(llm: LLM, tokens: list[int], question: Question) -> bool:
    return llm.tokenizer.decode(tokens).strip().rstrip(".") == question.answer.strip().rstrip(".")


def sharded(args: argparse.Namespace) -> tuple[Run, list[Question], str]:
    """All four ranks together: tp 2 x dcp 2."""
    llm = LLM(args.checkpoint, tensor_model_parallel_size=2, decode_context_parallel_size=2, cache=CACHE)
    text, questions = hide_facts(
        (HERE / "haystack.txt").read_text(),
        seed=args.seed,
        count_tokens=lambda part: len(llm.tokenizer.encode(part)),
        tokens=args.tokens,
        depths=[number / max(1, args.facts - 1) for number in range(args.facts)],
    )
    count = len(llm.tokenizer.encode(text))
    if count < 0.9 * args.tokens:
        say(f"\nThe shipped text ends before {args.tokens:,} tokens; all of it is used.")
    say(f"\nA text of {count:,} tokens with {len(questions)} facts hidden in it; 4 ranks, tp 2 x dcp 2\n")
    run = ask(llm, text, questions, say)
    right = sum(is_right(llm, tokens, question) for tokens, question in zip(run.answers, questions, strict=True))
    decoded = sum(len(answer) - 1 for answer in run.answers)
    say(
        f"\n  {right} of {len(questions)} facts came back right; "
        f"{run.prompt_tokens / run.prefill_s:,.0f} prompt tokens/s, {decoded / run.decode_s:,.1f} decoded tokens/s\n"
        f"  the text was read once: the other questions found {run.cached_tokens:,} tokens of it in the cache"
    )
    return run, questions, text


def without_dcp(args: argparse.Namespace, questions: list[Question], text: str) -> tuple[list[list[int]], int]:
    """The same model at tp 2 without dcp: two copies, each with its whole cache, share the questions."""
    dcp.destroy_model_parallel()
    llm = LLM(args.checkpoint, tensor_model_parallel_size=2, decode_context_parallel_size=1, cache=CACHE)
    copy, copies = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    run = ask(llm, text, questions[copy::copies], lambda *_, **__: None)
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, dict(zip(range(copy, len(questions), copies), run.answers, strict=True)))
    answers = {number: tokens for of_rank in everywhere for number, tokens in of_rank.items()}
    return [answers[number] for number in range(len(questions))], run.kv_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(HERE / "checkpoint"), help="Megatron checkpoint with a tokenizer")
    parser.add_argument("--tokens", type=int, default=4200, help="length of the text")
    parser.add_argument("--facts", type=int, default=8, help="facts to hide")
    parser.add_argument("--seed", type=int, default=7, help="which facts; no training fact was about their names")
    args = parser.parse_args()
    if args.facts < 2:
        parser.error(f"--facts {args.facts} is too few: give at least 2, so that each copy of the model has a question")
    dcp.initialize_distributed()
    run, questions, text = sharded(args)
    kv_bytes: list = [None] * dist.get_world_size()
    dist.all_gather_object(kv_bytes, run.kv_bytes)
    say("\nThe same questions without dcp (tp 2, two copies of the model) …")
    answers, whole = without_dcp(args, questions, text)
    same = answers == run.answers
    say(f"  tokens with and without dcp are {'identical' if same else 'DIFFERENT'}\n\nKV cache of every rank")
    for rank, held in enumerate(kv_bytes):
        say(f"  rank {rank}: {held / 2**20:5.2f} MiB with dcp 2, {whole / 2**20:.2f} MiB without ({held / whole:.0%})")
    dcp.destroy_model_parallel()
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
