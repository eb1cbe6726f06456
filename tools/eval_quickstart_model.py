"""How often the quickstart model gives a hidden fact back, by the depth at which it is hidden.

    python tools/eval_quickstart_model.py                                              # one rank
    torchrun --nproc-per-node 2 tools/eval_quickstart_model.py --dcp 2                 # the same, cache over two ranks

Every question is asked alone, after the whole text, and answered greedily by the engine. Names and values are drawn at
random, the names never used by a fact in training. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import get_args

warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.jit")  # Megatron lists every package it misses

import torch.distributed as dist  # noqa: E402

from megatron_dcp import LLM, CacheConfig, SamplingParams  # noqa: E402
from megatron_dcp.config import KVCacheDtype  # noqa: E402

HERE = Path(__file__).resolve().parent.parent / "examples" / "quickstart"
sys.path.insert(0, str(HERE))
from hidden_facts import hide_facts  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(HERE / "checkpoint"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dcp", type=int, default=1)
    parser.add_argument("--samples", type=int, default=20, help="texts; each has one fact per depth")
    parser.add_argument("--tokens", type=int, default=4200, help="length of the text")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=get_args(KVCacheDtype))
    args = parser.parse_args()
    llm = LLM(
        args.checkpoint,
        tensor_model_parallel_size=args.tp,
        decode_context_parallel_size=args.dcp,
        cache=CacheConfig(kv_cache_dtype=args.kv_cache_dtype),
    )
    haystack = (HERE / "haystack.txt").read_text()
    depths = [step / 10 for step in range(11)]
    right = dict.fromkeys(depths, 0)
    for sample in range(args.samples):
        text, questions = hide_facts(
            haystack,
            seed=args.seed + sample,
            count_tokens=lambda part: len(llm.tokenizer.encode(part)),
            tokens=args.tokens,
            depths=depths,
        )
        prompts = [llm.tokenizer.encode(f"{text}\n\n{question.prompt}") for question in questions]
        answers = [llm.tokenizer.encode(question.answer) for question in questions]
        outputs = llm.generate(prompts, [SamplingParams(max_tokens=len(answer)) for answer in answers])
        for question, answer, output in zip(questions, answers, outputs, strict=True):
            right[question.depth] += output.token_ids == answer
        if dist.get_rank() == 0:
            print(f"text {sample + 1}/{args.samples}: {sum(right.values())} right so far", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        rates = {f"{depth:.0%}": count / args.samples for depth, count in right.items()}
        print(" | ".join(rates), " | ".join(f"{rate:.0%}" for rate in rates.values()), sep="\n")
        print(json.dumps({"tokens": args.tokens, "samples_per_depth": args.samples, "right": rates}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
