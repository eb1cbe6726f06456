"""Models with sliding windows in the engine: what their pools take, prefixes that are reused, pipeline stages."""

from __future__ import annotations

import pytest
import torch

from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams
from megatron_dcp import parallel_state as dcp
from models import hf_model, tiny_model
from workers import run_on_ranks

BLOCK, WINDOW, HEAD, KV_HEADS = 4, 9, 12, 2
SHARED = [(11 * i * i + i) % 100 for i in range(150)]
PROMPTS = [[*SHARED, 1, 2, 3], [*SHARED, 7], SHARED[:70] + [5] * 3]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def expected(path) -> list[list[int]]:
    hf, answers = hf_model(path), []
    for prompt in PROMPTS:
        text = list(prompt)
        with torch.no_grad():
            for _ in range(PARAMS.max_tokens):
                text.append(int(hf(torch.tensor([text])).logits[0, -1].argmax()))
        answers.append(text[len(prompt) :])
    return answers


def generate(rank, world, path, sizes, pools):
    """Tokens, sizes of the pools, bytes and prefix hits for every pool's configuration."""
    results = []
    for cache, engine in pools:
        llm = LLM(path, cache=CacheConfig(block_size=BLOCK, **cache), engine=EngineConfig(**engine), **sizes)
        tokens = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
        again = [output.token_ids for output in llm.generate(PROMPTS[:2], PARAMS)]
        assert again == tokens[:2]
        hits = llm.stats().prefix_hit_tokens if llm.is_driver else None
        runner = llm.runner
        in_window = None if runner.window is None else runner.window.num_blocks
        results.append((tokens, runner.num_blocks, in_window, runner.windows, runner.kv_bytes, hits))
        dcp.destroy_model_parallel()
    return results


ENGINE = dict(max_num_seqs=2, prefill_chunk_size=16)
# Each of 2 sequences sees 9 + 16 - 1 tokens, which touch up to 4 blocks of 8 tokens over 2 ranks.
LIMIT = 2 * 4
BYTES = 2 * BLOCK * KV_HEADS * HEAD * 4  # of a block in one layer


@pytest.mark.mcore_line
def test_the_window_s_pool_is_small_and_the_tokens_are_the_same():
    path = tiny_model("gemma3_text", layers=3)
    pools = [
        (dict(num_blocks=60), ENGINE),
        (dict(bytes_per_rank=40 * BYTES + 2 * LIMIT * BYTES + 5), ENGINE),
        # half of the memory is for windows: not all that 64 sequences could use
        (dict(bytes_per_rank=60 * BYTES), dict(prefill_chunk_size=16)),
        (dict(num_blocks=21), dict(ENGINE, max_num_seqs=3)),  # the longest takes 21: others wait and are preempted
    ]
    want = expected(path)
    for rank, results in enumerate(run_on_ranks(2, generate, path, dict(decode_context_parallel_size=2), pools)):
        for tokens, _, _, windows, _, hits in results:
            assert tokens == want and windows == [None, WINDOW]
            assert rank or hits >= 2 * 144  # the driver is rank 0 here
        sizes = [(num_blocks, in_window, kv_bytes) for _, num_blocks, in_window, _, kv_bytes, _ in results]
        assert sizes[0] == (60, LIMIT, 60 * BYTES + LIMIT * 2 * BYTES)
        assert sizes[1] == (40, LIMIT, 40 * BYTES + LIMIT * 2 * BYTES)
        assert sizes[2] == (30, 15, 60 * BYTES)
        assert sizes[3] == (21, 3 * 4, 21 * BYTES + 3 * 4 * 2 * BYTES)


def test_stages_with_other_kinds_of_layers_agree_on_the_pool():
    """Of two stages one has only windows, the other only layers that see everything."""
    path = tiny_model("gemma3_text", layers=2)
    sizes = dict(decode_context_parallel_size=2, pipeline_model_parallel_size=2)
    pools = [(dict(bytes_per_rank=50 * BYTES), ENGINE)]
    want = expected(path)
    stages = run_on_ranks(4, generate, path, sizes, pools)
    for (result,) in stages:
        assert result[:3] == (want, 50, LIMIT)
    assert [result[3:5] for (result,) in stages] == [([WINDOW], LIMIT * BYTES)] * 2 + [([None], 50 * BYTES)] * 2


def test_a_model_of_windows_only_takes_no_more_than_they_do():
    path = tiny_model("mistral", head_dim=HEAD)
    pools = [(dict(bytes_per_rank=10**9), ENGINE), (dict(bytes_per_rank=2 * 3 * BYTES), ENGINE)]
    want = expected(path)
    ((large, small),) = run_on_ranks(1, generate, path, {}, pools)
    longest = -(-512 // BLOCK) * 2
    assert large[0] == want and large[1] == longest and large[4] == large[2] * 2 * BYTES
    assert large[2] == 2 * ((WINDOW + 16 - 3) // BLOCK + 2)
    assert small[0] == want and small[2] == 3 and small[4] == 2 * 3 * BYTES  # one window, and no room for a second


def too_small(rank, world, path):
    llm = LLM(path, cache=CacheConfig(block_size=BLOCK, bytes_per_rank=2 * 2 * BYTES))
    with pytest.raises(ValueError, match="prompt 0 needs 3 blocks x 4 tokens .* sliding window of 9.* has 2; raise"):
        llm.generate(PROMPTS, PARAMS)


def test_a_pool_that_cannot_hold_one_window_is_refused():
    run_on_ranks(1, too_small, tiny_model("mistral", head_dim=HEAD))
