"""A model over a sharded cache, against Megatron's own training forward on one rank; for every kind of attention."""

from __future__ import annotations

import random
from typing import Any

import torch
from megatron_models import (
    forced_logits,
    make_runner,
    random_state,
    sharded_model,
    tiny_config,
    training_logits,
    whole_model,
)

from megatron_dcp import parallel_state
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.model_config import MLAConfig

BLOCK = 4


def texts_for(dcp: int, decode: int, vocab: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 token, around dcp, around every kind of block edge, and one long."""
    rng = random.Random(dcp)
    edges = {1, dcp - 1, dcp, dcp + 1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK * dcp - 1, BLOCK * dcp, BLOCK * dcp + 1, 41}
    lens = sorted(edge for edge in edges if edge > 0)
    return [[rng.randrange(vocab) for _ in range(n + decode)] for n in lens], lens


def wanted_logits(oracle, texts, lens):
    """Of the oracle's own forward, for every token after each prompt."""
    return [training_logits(oracle, text)[n - 1 :] for text, n in zip(texts, lens, strict=True)]


def largest_error(runner, wanted, texts, lens, chunk=10**9):
    """Largest logit difference, as a share of the wanted logits' range, over all texts and steps."""
    return largest_share(forced_logits(runner, texts, lens, chunk), wanted)


def largest_share(logits, wanted):
    """The same of logits that are there."""
    worst = 0.0
    for got, want in zip(logits, wanted, strict=True):
        want = want[:, : got.shape[1]]
        assert got.shape == want.shape
        worst = max(worst, float((got - want).abs().max() / (want.max() - want.min())))
    return worst


def sharded_errors(rank, world, tp, dcp, layout, changes, settings, experts=None):
    """Largest error of every ``(interleave, exchange, chunk, prefill)``; slots hold NaN until they are written."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, decode_context_parallel_size=dcp, dcp_layout=layout, **(experts or {})
    )
    config = tiny_config(**changes)
    state = random_state(config)
    model = sharded_model(config, state)
    texts, lens = texts_for(dcp, 6, config.vocab_size)
    wanted = wanted_logits(whole_model(config, state), texts, lens)
    errors = {}
    for setting in settings:
        interleave, exchange, chunk, prefill = (*setting, "auto")[:4]
        cache = CacheConfig(block_size=BLOCK, kv_interleave_size=interleave, num_blocks=300)
        runner = make_runner(model, config, cache=cache, engine=EngineConfig(exchange=exchange, prefill=prefill))
        for k_SKH, v_SKH, *_ in map(runner.pools[0].layer, range(config.num_layers)):
            k_SKH.fill_(torch.nan), v_SKH.fill_(torch.nan)
        errors[setting] = largest_error(runner, wanted, texts, lens, chunk)
    return errors


WITHIN_TP = [(i, None, 10**9) for i in (1, 2, BLOCK)] + [(1, None, 5)] + [(1, e, 7) for e in ("all_reduce", "ag_rs")]
ORTHOGONAL = [
    *((i, None, 10**9, "replicated") for i in (1, 2, BLOCK)),
    *((i, None, 10**9, prefill) for i in (1, 2) for prefill in ("pass_kv", "pass_q")),
    *((1, e, 7, "replicated") for e in ("all_reduce", "ag_rs", "a2a")),
    (BLOCK, None, 23, "pass_kv"),
    (1, "a2a", 13, "pass_q"),
    (1, None, 10**9, "auto"),
]


def orthogonal_settings(tp: int, dcp: int) -> list[tuple[Any, ...]]:
    """All of them, or on many ranks, where a step takes long, every second: even ones at tp 2, odd ones at tp 4."""
    return ORTHOGONAL if tp * dcp < 6 else ORTHOGONAL[tp // 4 :: 2]


SIZES: dict[str, Any] = dict(q_lora_rank=24, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.6,
}


def mla(rope_scaling: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Fields of a ``ModelConfig`` with latent attention of four heads."""
    return dict(num_query_groups=4, mla=MLAConfig(**{**SIZES, **changes}), rope_scaling=rope_scaling)
