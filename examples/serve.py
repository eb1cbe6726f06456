"""Serve requests that come at different times, and print each as it grows. Every rank runs this same script:

torchrun --nproc-per-node 2 examples/serve.py --dcp 2 "The harbour was" "At dawn" "Nobody knew"
"""

import argparse
import asyncio
from pathlib import Path

from megatron_dcp import AsyncLLM, CacheConfig, SamplingParams

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompts", nargs="+")
parser.add_argument("--checkpoint", default=Path(__file__).parent / "quickstart" / "checkpoint", type=Path)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--dcp", type=int, default=1)
parser.add_argument("--pause", type=float, default=0.1, help="seconds between two requests")


async def serve(llm: AsyncLLM, prompts: list[str], pause_s: float) -> None:
    async def request(number: int, prompt: str) -> None:
        await asyncio.sleep(number * pause_s)
        async for piece in llm.generate(prompt, SamplingParams(max_tokens=16), request_id=str(number)):
            print(f"[{piece.request_id}] {piece.text!r}", flush=True)
            if piece.output is not None:
                print(f"[{piece.request_id}] {prompt + piece.output.text!r} ({piece.output.finish_reason})", flush=True)

    async with llm:  # at the end the followers are let go
        await asyncio.gather(*(request(number, prompt) for number, prompt in enumerate(prompts)))
        stats = llm.stats()
        print(
            f"{sum(stats.finished.values())} requests, {stats.generated_tokens} tokens; KV cache of the group: "
            f"{stats.kv_capacity_tokens} tokens, {stats.prefix_hit_tokens} prompt tokens found in it"
        )


def main() -> None:
    args = parser.parse_args()
    llm = AsyncLLM(
        args.checkpoint,
        tensor_model_parallel_size=args.tp,
        decode_context_parallel_size=args.dcp,
        cache=CacheConfig(num_blocks=64),
    )
    if llm.is_driver:
        asyncio.run(serve(llm, args.prompts, args.pause))
    else:
        llm.follow()


if __name__ == "__main__":
    main()
