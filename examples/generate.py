"""Continue prompts on several ranks, streaming the first one. Every rank runs this same script:

torchrun --nproc-per-node 4 examples/generate.py --tp 2 --dcp 2 "The harbour was" "At dawn"
"""

import argparse
from pathlib import Path

import torch.distributed as dist

from megatron_dcp import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompts", nargs="+")
parser.add_argument("--checkpoint", default=Path(__file__).parent / "quickstart" / "checkpoint", type=Path)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--dcp", type=int, default=1)


def main() -> None:
    args = parser.parse_args()
    llm = LLM(args.checkpoint, tensor_model_parallel_size=args.tp, decode_context_parallel_size=args.dcp)
    first = dist.get_rank() == 0

    # Token by token. All ranks iterate, one prints.
    params = SamplingParams(max_tokens=32, temperature=0.7, top_p=0.9, seed=0)
    if first:
        print(args.prompts[0], end="", flush=True)
    for token in llm.stream(args.prompts[0], params):
        if first:
            print(token.text, end="", flush=True)
    if first:
        print("\n")

    # All prompts as one batch, greedily.
    outputs = llm.generate(args.prompts, SamplingParams(max_tokens=32, logprobs=True))
    if first:
        for output in outputs:
            mean = sum(output.logprobs) / len(output.logprobs)
            print(f"[{output.index}] {output.text!r} ({output.finish_reason}, mean log-probability {mean:.2f})")
        print(f"KV cache: {llm.runner.kv_bytes:,} bytes on each rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
