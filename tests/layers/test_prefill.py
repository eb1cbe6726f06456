"""Striped prefill: which tokens are dealt out, what travels and how much; that the result is exact in many slabs."""

from __future__ import annotations

import random

import pytest
import torch
from layer_cases import BLOCK, largest_error, texts_for, wanted_logits
from megatron_models import (
    everywhere,
    make_runner,
    random_state,
    sharded_model,
    tiny_config,
    training_logits,
    whole_model,
)

from megatron_dcp import CacheConfig, EngineConfig, parallel_state
from megatron_dcp.attention import sdpa
from megatron_dcp.cache import KVLayout, sizes
from megatron_dcp.cache.sizes import StripeSizes, exchange_work_bytes
from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.engine.places import place_tokens
from megatron_dcp.layers import Chunk, is_striped, plan_striped
from megatron_dcp.metrics import Metrics
from megatron_dcp.model_config import MLAConfig
from workers import run_on_ranks

MLA = MLAConfig(q_lora_rank=None, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12)


def test_few_tokens_are_not_dealt_out() -> None:
    layout = KVLayout(dcp_size=2, interleave=1, block_size=8)
    assert is_striped([1, 200, 1], layout, "auto") == [False, True, False]
    assert is_striped([40, 30, 5], layout, "auto") == [True, True, False]
    assert is_striped([40, 23, 1], layout, "auto") == [False, False, False]  # 63 tokens
    assert is_striped([1, 200], layout, "replicated") == [False, False]
    assert is_striped([1, 2, 3], layout, "pass_kv") == [False, True, True]
    assert is_striped([200], KVLayout(dcp_size=1, interleave=1, block_size=8), "pass_kv") == [False]
    # fewer tokens than a turn of all ranks might leave a rank without any
    assert is_striped([95, 96], KVLayout(dcp_size=3, interleave=32, block_size=32), "auto") == [False, True]


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_computed_once_and_kept_by_its_owner(seed: int) -> None:
    rng = random.Random(seed)
    layout = KVLayout(dcp_size=rng.choice([2, 3, 4]), interleave=rng.choice([1, 2, 4]), block_size=4)
    seqs, striped, pool = [], [], iter(rng.sample(range(1000), 1000))
    for _ in range(rng.randint(1, 5)):
        start, count = rng.randrange(30), rng.choice([1, 2, 5, 40])
        table = [next(pool) for _ in range(layout.blocks_for(start + count))]
        logits = rng.choice([0, 1, count])
        seqs.append(SeqStep([rng.randrange(100) for _ in range(count)], start, table, logits))
        striped.append(count >= layout.dcp_size * layout.interleave and rng.random() < 0.7)
    batch = StepBatch(seqs)
    flat = [
        (token, seq.start + i, number)
        for number, seq in enumerate(seqs)
        for i, token in enumerate(seq.token_ids)
    ]  # fmt: skip
    wanted_rows = [len(seq.token_ids) - seq.num_logits + i for seq in seqs for i in range(seq.num_logits)]
    row_tokens = [
        (seq.token_ids[row], seq.start + row)
        for seq, row in zip((seq for seq in seqs for _ in range(seq.num_logits)), wanted_rows, strict=True)
    ]
    written, rows_found = {}, [0] * batch.num_logits
    for rank in range(layout.dcp_size):
        places = place_tokens(batch, layout, rank, striped)
        whole = [x for x in flat if not striped[x[2]]]
        own = [x for x in flat if striped[x[2]] and layout.owner(x[1]) == rank]
        assert places.replicated == len(whole)
        assert list(zip(places.tokens_T.tolist(), places.positions_T.tolist(), strict=True)) == [
            x[:2] for x in whole + own
        ]
        for index, slot in zip(places.owned_t.tolist(), places.slots_t.tolist(), strict=True):
            _, position, number = (whole + own)[index]
            assert layout.owner(position) == rank and (number, position) not in written
            written[number, position] = slot
            local = layout.local_index(position)
            assert slot == seqs[number].block_table[local // 4] * 4 + local % 4
        for row, index in enumerate(places.rows_B.tolist()):
            if index >= 0:
                rows_found[row] += 1
                assert (whole + own)[index][:2] == row_tokens[row]
        assert places.shared == any(dealt and seq.num_logits for dealt, seq in zip(striped, seqs, strict=True))
    assert len(written) == batch.num_tokens
    expected = [
        1 if dealt else layout.dcp_size for dealt, seq in zip(striped, seqs, strict=True) for _ in range(seq.num_logits)
    ]
    assert rows_found == expected


def test_what_sends_fewer_bytes_travels() -> None:
    layout = KVLayout(dcp_size=2, interleave=1, block_size=8)

    def way(start: int, stop: int, name: str = "auto") -> object:
        chunk = Chunk(start, stop, list(range(layout.blocks_for(stop))))
        plan = plan_striped(
            [chunk],
            layout,
            0,
            name=name,  # type: ignore[arg-type]
            sizes=StripeSizes(per_key=100, per_query=1000),
            plan=lambda batch: batch,
            device=torch.device("cpu"),
        )
        assert plan.counts == ((stop - start + 1 - start % 2) // 2, (stop - start + start % 2) // 2)
        return type(plan.way).__name__

    assert way(0, 1000) == "PassKV"
    assert way(9000, 10000) == "PassKV"  # 500 queries of 1000 bytes, 5000 keys of 100
    assert way(9100, 10100) == "PassQ"
    assert way(0, 1000, "pass_q") == "PassQ" and way(90000, 91000, "pass_kv") == "PassKV"


def test_work_space_grows_with_the_chunk_alone() -> None:
    layout, sizes = KVLayout(dcp_size=2, interleave=1, block_size=8), StripeSizes(per_key=2048, per_query=1000)

    def bound(name: str, chunk: int, replicated: int = 3) -> int:
        return exchange_work_bytes(sizes, layout, name, prefill_chunk_size=chunk, replicated=replicated)  # type: ignore[arg-type]

    slabs = 3 * (4 << 20)
    assert bound("replicated", 100) == 2 * 1000 * 103
    assert bound("pass_q", 100) == 2 * 1000 * 103
    assert bound("pass_kv", 100) == 2 * 1000 * (50 + 3 + 3) + slabs
    assert bound("auto", 100) == 2 * 1000 * 103 + slabs
    assert bound("pass_kv", 3, 9) == 2 * 1000 * (2 + 1 + 9) + slabs
    one_block = StripeSizes(per_key=1 << 23, per_query=0)  # larger than a slab
    assert exchange_work_bytes(one_block, layout, "pass_kv", prefill_chunk_size=9, replicated=0) == 3 * 8 << 23


def slabs_case(rank, world, kind, per_slab):
    """Prompts of very different lengths in slabs of ``per_slab`` blocks, and in as small calls of the back end."""
    parallel_state.initialize_model_parallel(decode_context_parallel_size=world)
    config = tiny_config(**(dict(num_query_groups=4, mla=MLA) if kind == "mla" else {}))
    state = random_state(config)
    texts, lens = texts_for(world, 2, config.vocab_size)
    limits = {"WORK_BYTES": 5 << 10, "COPY_BYTES": 1 << 10, "MAX_ROWS": 8, "HEAD_BYTES": 1 << 10}
    kept = sizes.SLAB_BYTES, {name: getattr(sdpa, name) for name in limits}
    runner = make_runner(
        sharded_model(config, state),
        config,
        cache=CacheConfig(block_size=BLOCK, num_blocks=300),
        engine=EngineConfig(prefill="pass_kv"),
    )
    try:
        sizes.SLAB_BYTES = per_slab * BLOCK * runner.pools[0].bytes_per_key
        vars(sdpa).update(limits)
        return largest_error(runner, wanted_logits(whole_model(config, state), texts, lens), texts, lens, 20)
    finally:
        sizes.SLAB_BYTES = kept[0]
        vars(sdpa).update(kept[1])


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_many_slabs(kind) -> None:
    for per_slab in (1, 3):
        assert max(run_on_ranks(3, slabs_case, kind, per_slab)) < 1e-5


def traffic_case(rank, world, name):
    """Tokens of one chunk whose prompt is there already, and a decoded token beside it; what a step sends."""
    parallel_state.initialize_model_parallel(decode_context_parallel_size=world)
    config, metrics = tiny_config(), Metrics()
    model = sharded_model(config, random_state(config))
    cache = CacheConfig(block_size=BLOCK, num_blocks=64)
    runner = make_runner(model, config, cache=cache, engine=EngineConfig(prefill=name), metrics=metrics)
    text = [(7 * i) % config.vocab_size for i in range(80)]
    table, other = list(range(20)), list(range(20, 40))
    runner.step(StepBatch([SeqStep(text[:48], 0, table, 0), SeqStep(text[:9], 0, other, 0)]))
    metrics.reset()
    logits = runner.step(StepBatch([SeqStep(text[48:72], 48, table, 3), SeqStep([5], 9, other, 1)]))
    traffic = metrics.collectives
    logits = everywhere(runner, logits, 4)
    oracle = whole_model(config, random_state(config))
    want = torch.cat((training_logits(oracle, text[:72])[69:], training_logits(oracle, [*text[:9], 5])[9:]))
    error = float((logits - want[:, : logits.shape[1]]).abs().max() / (want.max() - want.min()))
    return error, traffic, config


@pytest.mark.parametrize("name", ["pass_kv", "pass_q"])
def test_traffic_of_a_mixed_step(name) -> None:
    ranks, chunk, context = 2, 24, 72
    for error, traffic, config in run_on_ranks(ranks, traffic_case, name):
        assert error < 1e-5
        layers, heads, dim, kv = (
            config.num_layers, config.num_attention_heads, config.kv_channels, config.num_query_groups,
        )  # fmt: skip
        decoded_lse, decoded_sum = 4 * heads, 4 * config.hidden_size
        rows = 4 * 4 * config.hidden_size  # hidden states of the four rows of logits
        expected = {
            "all_gather": (layers, layers * decoded_lse),
            "all_reduce": (layers + 1, layers * decoded_sum + rows),
        }
        own = chunk // ranks
        if name == "pass_kv":
            blocks = context // (BLOCK * ranks)
            expected["send_receive"] = (layers, layers * blocks * BLOCK * 2 * kv * dim * 4)
        else:
            expected["all_gather"] = (2 * layers, layers * (decoded_lse + 4 * own * heads * dim))
            expected["all_to_all"] = (layers, layers * 4 * own * heads * (dim + 1))
        assert traffic == expected
