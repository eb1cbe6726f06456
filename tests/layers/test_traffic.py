"""Collectives and bytes of a decode step, counted by ``metrics``, are those of the formulas: per layer and token."""

from __future__ import annotations

import pytest
from megatron_models import make_runner, random_state, sharded_model, tiny_config

from megatron_dcp import CacheConfig, EngineConfig, parallel_state
from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.metrics import Metrics
from megatron_dcp.traffic import expected_traffic
from workers import run_on_ranks


def case(rank, world, tp, dcp, layout, exchange, kv_heads, tokens):
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, decode_context_parallel_size=dcp, dcp_layout=layout
    )
    config, metrics = tiny_config(num_query_groups=kv_heads), Metrics()
    model = sharded_model(config, random_state(config))
    runner = make_runner(
        model,
        config,
        cache=CacheConfig(block_size=4, num_blocks=64),
        engine=EngineConfig(exchange=exchange),
        metrics=metrics,
    )
    metrics.reset()
    runner.step(StepBatch([SeqStep([7], 0, [i], 1) for i in range(tokens)]))
    return parallel_state.get_decode_context_parallel_rank(), metrics.collectives


def expected(config, tp, dcp, layout, exchange, tokens, dcp_rank):
    """What this package sends in one step. Megatron's own all-reduces (embedding, FFN, output) are not counted."""
    total: dict[str, tuple[int, int]] = {}

    def add(op: str, calls: int, sent: int) -> None:
        total[op] = (total.get(op, (0, 0))[0] + calls, total.get(op, (0, 0))[1] + sent)

    heads, per_head = config.num_attention_heads // tp, config.kv_channels
    for _ in range(config.num_layers):
        if layout == "within_tp":
            own = 4 * tokens * heads * per_head
            add("all_gather", 1, (dcp - 1) * own)  # query heads of the group
            if config.num_query_groups < tp:  # rows of one KV group lie on several ranks
                width = (config.num_attention_heads + 2 * config.num_query_groups) * per_head // tp
                add("all_gather", 1, (tp - 1) * 4 * tokens * width)
            ours = expected_traffic(exchange, tokens, heads * dcp, per_head, dcp, dcp_rank)
        else:
            ours = expected_traffic(exchange, tokens, heads, per_head, dcp, dcp_rank)
            if exchange != "all_reduce":
                ranks = tp * dcp
                add("all_reduce", 1, 2 * (ranks - 1) * 4 * tokens * config.hidden_size // ranks)
        for op, (calls, sent) in ours.items():
            add(op, calls, sent)
    if tp > 1 and (layout == "within_tp" or dcp_rank == 0):  # only the first DCP rank's TP group makes logits
        add("all_gather", 1, (tp - 1) * 4 * tokens * config.padded_vocab_size // tp)  # logits
    return total


@pytest.mark.parametrize("exchange", ["fold", "all_reduce", "ag_rs", "a2a"])
@pytest.mark.parametrize("tp,dcp", [(1, 2), (1, 3), (2, 2)])
def test_orthogonal(tp, dcp, exchange):
    for tokens in (1, 5):
        for rank, counted in run_on_ranks(tp * dcp, case, tp, dcp, "orthogonal", exchange, 2, tokens):
            assert counted == expected(tiny_config(), tp, dcp, "orthogonal", exchange, tokens, rank)


@pytest.mark.parametrize("exchange", ["all_reduce", "ag_rs", "a2a"])
def test_within_tp(exchange):
    config = tiny_config(num_query_groups=1)
    for rank, counted in run_on_ranks(4, case, 4, 2, "within_tp", exchange, 1, 3):
        assert counted == expected(config, 4, 2, "within_tp", exchange, 3, rank)


def test_without_dcp_nothing_is_exchanged():
    assert run_on_ranks(1, case, 1, 1, "orthogonal", None, 2, 3) == [(0, {})]
