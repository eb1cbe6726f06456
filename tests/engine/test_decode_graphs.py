"""Decode by recorded graphs, on a stand-in that freezes what Python decides: the tokens and logits of steps without."""

from __future__ import annotations

import random

import pytest
import torch
from recorded_ops import GatherBackend, StandInGraphs, store_slots

from megatron_dcp import LLM, CacheConfig, EngineConfig, SamplingParams, attention
from megatron_dcp import parallel_state as dcp
from megatron_dcp.cache import pool
from megatron_dcp.comm import collectives
from megatron_dcp.engine import decode_graphs
from megatron_dcp.engine.runner import ModelRunner
from models import tiny_model
from workers import run_on_ranks

PROMPTS = [[random.Random(n).randrange(100) for _ in range(n)] for n in (1, 9, 16, 17, 30)]
# They end one after the other: buckets are used with 4, 3, 2 and 1 sequences, and with padding.
SAMPLING = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 12, 9, 3, 7)]


def recorded_and_not(rank, world, path, mode, sizes, engine):
    """Tokens and logits without graphs and with them, how many graphs were recorded, and collectives of both."""
    results = []
    for graphs in ("none", mode):
        stand_in, rows = StandInGraphs(), []
        step = ModelRunner.step

        def recording(self, batch, step=step, rows=rows):
            rows.append(step(self, batch).clone())
            return rows[-1]

        def poisoned(*args, allocate=pool._allocate, **kwargs):
            held = allocate(*args, **kwargs)
            return held.fill_(torch.nan) if held.dtype.is_floating_point else held.fill_(77)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "BACKENDS", (GatherBackend,))
            patch.setattr(decode_graphs, "make_graphs", lambda device, stand_in=stand_in: stand_in)
            patch.setattr(collectives, "_guarded", stand_in.holding(collectives._guarded))
            patch.setattr(torch.distributed, "all_reduce", stand_in.holding(torch.distributed.all_reduce))
            patch.setattr(pool, "store_slots", store_slots)
            patch.setattr(pool, "_allocate", poisoned)
            patch.setattr(ModelRunner, "step", recording)
            llm = LLM(
                path,
                **sizes,
                cache=CacheConfig(block_size=4, kv_interleave_size=2, kv_cache_dtype=engine.get("kv", "auto")),
                engine=EngineConfig(cuda_graphs=graphs, max_num_seqs=4, exchange=engine.get("exchange")),
            )
            outputs = [llm.generate(PROMPTS, SAMPLING) for _ in range(2)][-1]
            results.append(([output.token_ids for output in outputs], rows, stand_in.recorded, stand_in.replayed))
        dcp.destroy_model_parallel()
    (tokens, rows, none, _), (own_tokens, own_rows, recorded, replayed) = results
    assert none == 0 and tokens == own_tokens
    worst = 0.0
    for one, other in zip(rows, own_rows, strict=True):
        assert one.shape == other.shape
        if one.numel():
            worst = max(worst, float((one - other).abs().max() / (one.max() - one.min())))
    return worst, recorded, replayed


CASES = {
    "llama": ("llama", 1, {}, {}),
    "dcp": ("llama", 2, dict(decode_context_parallel_size=2), {}),
    "a2a": ("llama", 2, dict(decode_context_parallel_size=2), dict(exchange="a2a")),
    "ag_rs": ("llama", 3, dict(decode_context_parallel_size=3), dict(exchange="ag_rs")),
    "tp": ("qwen3", 4, dict(tensor_model_parallel_size=2, decode_context_parallel_size=2), dict(kv="int8")),
    "windows": ("gemma3_text", 2, dict(decode_context_parallel_size=2), {}),
    "sinks": ("gpt_oss", 2, dict(decode_context_parallel_size=2), {}),
    "latent": ("deepseek_v3", 2, dict(decode_context_parallel_size=2), dict(kv="fp8_e4m3")),
    "stages": ("llama", 4, dict(pipeline_model_parallel_size=2, decode_context_parallel_size=2), {}),
}
EXPERTS = ("sinks", "latent")


@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.mcore_line if name in ("tp", "latent") else ()) for name in CASES]
)
def test_replayed_steps_are_the_steps(name, mode):
    family, ranks, sizes, engine = CASES[name]
    if mode == "full" and name in EXPERTS:
        with pytest.raises(ValueError, match="cuda_graphs='full' cannot hold experts"):
            run_on_ranks(ranks, recorded_and_not, str(tiny_model(family)), mode, sizes, engine)
        return
    for worst, recorded, replayed in run_on_ranks(
        ranks, recorded_and_not, str(tiny_model(family)), mode, sizes, engine
    ):
        assert worst < 1e-5
        buckets = 3  # 1, 2 and 4 sequences
        assert recorded == buckets if mode == "full" or ranks == 1 else recorded > 2 * buckets
        assert replayed > 10 * recorded / buckets


def test_without_a_gpu_or_a_back_end_that_can():
    path = str(tiny_model("llama"))
    with pytest.raises(ValueError, match="need a GPU, and this rank computes on cpu; use cuda_graphs='none'"):
        run_on_ranks(1, recorded_without, path, False)
    with pytest.raises(ValueError, match="'sdpa' cannot; use cuda_graphs='none' or another backend"):
        run_on_ranks(1, recorded_without, path, True)


def recorded_without(rank, world, path, on_gpu):
    with pytest.MonkeyPatch.context() as patch:
        if on_gpu:
            patch.setattr(decode_graphs, "make_graphs", lambda device: StandInGraphs())
        LLM(path, engine=EngineConfig(cuda_graphs="full")).generate([PROMPTS[0]])
