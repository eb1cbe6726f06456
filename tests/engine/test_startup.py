"""What a run tells about itself once: on one rank, with the groups and sizes that it really has."""

from __future__ import annotations

import logging

import pytest

from megatron_dcp import LLM, CacheConfig, SamplingParams
from megatron_dcp import parallel_state as dcp
from models import tiny_model
from workers import run_on_ranks


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines += record.getMessage().splitlines()


def said(rank, world, path, sizes, cache):
    logger, kept = logging.getLogger("megatron_dcp.startup"), Kept()
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        llm = LLM(path, **sizes, cache=CacheConfig(**cache))
        for _ in range(2):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    finally:
        logger.removeHandler(kept)
        dcp.destroy_model_parallel()
    return kept.lines, llm.runner.kv_bytes


CASES = {
    "orthogonal": (
        "llama",
        4,
        dict(tensor_model_parallel_size=2, decode_context_parallel_size=2),
        [
            "megatron_dcp: tp 2 x dcp 2 (orthogonal), pp 1",
            "  ranks      dcp [0 2] [1 3]; tp [0 1] [2 3]; pp [0] [1] [2] [3]",
            "  KV cache   64 tokens of the group: 8 x 4 on each of 2 dcp ranks, int8, interleave 2; {} MiB per rank",
            "  attention  sdpa: chosen",
            "  exchange   fold, 8 bytes sent per rank, decoded token and layer; prefill auto; CUDA graphs none",
        ],
    ),
    "replicas": (
        "gemma3_text",
        4,
        dict(pipeline_model_parallel_size=2),
        [
            "megatron_dcp: tp 1 x dcp 1 (orthogonal), pp 2",
            "  ranks      dcp [0] [2]; tp [0] [2]; pp [0 2]",
            "  KV cache   32 tokens of the group: 8 x 4 on each of 1 dcp ranks, int8, interleave 2; {} MiB per rank",
            "             beside them 8 x 4 for the layers with a window of 9 tokens",
            "  attention  sdpa: chosen",
            "  exchange   none: one rank has every key; prefill auto; CUDA graphs none",
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_rank_says_it_once(name):
    family, ranks, sizes, wanted = CASES[name]
    cache = dict(block_size=4, kv_interleave_size=2, num_blocks=8, kv_cache_dtype="int8")
    by_rank = run_on_ranks(ranks, said, str(tiny_model(family)), sizes, cache)
    spoke = [lines for lines, _ in by_rank if lines]
    most = max(kv_bytes for _, kv_bytes in by_rank)
    assert spoke == [[line.format(f"{most / 2**20:.2f}") for line in wanted]]
