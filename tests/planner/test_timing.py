"""Times worked out by hand, and what they must obey."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_dcp.config import ExchangeName
from megatron_dcp.planner import MODELS, Pins, Row, Workload, machine, make_plan
from megatron_dcp.planner.candidates import candidates
from megatron_dcp.planner.decode_traffic import attention_traffic
from megatron_dcp.planner.machine import AttentionRate, ChunkRate, CollectiveRate
from megatron_dcp.planner.timing import keys_read
from megatron_dcp.traffic import expected_traffic

H200 = machine("H200")
QWEN, DEEPSEEK = MODELS["qwen2.5-72b"], MODELS["deepseek-v3"]


def row(name: str, work: Workload, gpus: int = 8, **pins: object) -> Row:
    (found,) = make_plan(name, MODELS[name], H200, gpus, work, Pins(**pins)).rows  # type: ignore[arg-type]
    return found


def test_a_step_by_hand() -> None:
    """Qwen2.5-72B, tp 8, 8 x 131072 tokens on H200: 3.84 TB/s and 337.5 GB/s are reached."""
    step = row("qwen2.5-72b", Workload(context=131072, batch=8), tp=8).step
    assert step.kv == pytest.approx(8 * 42_949_672_960 / 8 / 3.84e12)
    layer = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 29568  # QKV, output, gated MLP
    vocabulary = 152576 * 8192  # padded to a multiple of 8 x 128
    small = 80 * (2 * 8192 + 8192 // 8 + 2 * 1024 // 8)  # norms, which every rank has, and biases
    assert step.weights == pytest.approx(((80 * layer + vocabulary) / 8 + small) * 2 / 3.84e12)
    hidden = 8 * 8192 * 2
    sums = 80 * 2 + 1  # attention and MLP of each layer, the embedding
    all_reduce = 8e-6 + 6e-6 + 2 * 7 / 8 * hidden / 337.5e9
    logits = 8e-6 + 7e-6 + 7 * 8 * 152576 / 8 * 2 / 337.5e9
    assert step.collectives == pytest.approx(sums * all_reduce + logits)
    assert step.exchange == 0
    assert step.overhead == pytest.approx(80 * 20e-6 + 500e-6)
    assert step.total == step.weights + step.kv + step.collectives + step.overhead


def test_an_exchange_by_hand() -> None:
    """fold at tp 2 x dcp 4: a gather of LSEs, and the output's sum over 8 ranks rather than 2, in 80 layers."""
    step = row("qwen2.5-72b", Workload(context=1024, batch=8), tp=2, dcp=4, layout="orthogonal").step
    hidden = 8 * 8192 * 2
    gather = 8e-6 + 3e-6 + 3 * 4 * 8 * 32 / 337.5e9
    wide = 8e-6 + 6e-6 + 2 * 7 / 8 * hidden / 337.5e9
    narrow = 8e-6 + 2e-6 + 2 * 1 / 2 * hidden / 337.5e9
    assert step.exchange == pytest.approx(80 * (gather + wide - narrow))
    alone = row("qwen2.5-72b", Workload(context=1024, batch=8), gpus=2, tp=2, dcp=1, pp=1).step
    assert step.collectives == pytest.approx(alone.collectives)


def test_products_take_over_from_reading_where_the_batch_is_large() -> None:
    small, large = (row("qwen2.5-72b", Workload(context=128, batch=b), tp=8).step for b in (1, 4096))
    layer = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 29568
    operations = 2 * 4096 * (80 * layer + 152576 * 8192) / 8
    assert large.weights == pytest.approx(operations / (0.6 * 989e12), rel=1e-4)
    assert large.weights > 10 * small.weights


def test_experts_are_read_as_tokens_choose_them() -> None:
    """One token reads 8 of DeepSeek's 256 experts, many read all."""

    def weights(batch: int) -> float:
        return row("deepseek-v3", Workload(context=128, batch=batch), tp=8, dcp=1, ep=8, expert_tp=1).step.weights

    expert = 3 * 7168 * 2048 * 2 / 3.84e12
    assert weights(2) - weights(1) == pytest.approx(58 * (32 * (1 - (1 - 1 / 32) ** 2) - 1) * expert)
    assert weights(100) - weights(1) == pytest.approx(58 * (32 * (1 - (31 / 32) ** 100) - 1) * expert)


def test_communication_of_decode_does_not_grow_with_context() -> None:
    for pins in (dict(tp=1, dcp=8, layout="orthogonal"), dict(tp=2, dcp=4, layout="orthogonal")):
        short, long = (row("qwen2.5-72b", Workload(context=context), **pins) for context in (1024, 131072))
        assert short.traffic == long.traffic and short.traffic.exchange_bytes > 0
        assert short.step.exchange == long.step.exchange > 0
        assert long.step.kv == pytest.approx(128 * short.step.kv)


@pytest.mark.parametrize("exchange", ["fold", "all_reduce", "ag_rs", "a2a"])
def test_traffic_of_the_exchange_is_what_the_layers_count(exchange: ExchangeName) -> None:
    """tp 2 x dcp 4: 32 query heads of 128 on a rank; and what most of them add to the sum of the output."""
    found = row("qwen2.5-72b", Workload(context=1024, batch=3), tp=2, dcp=4, layout="orthogonal", exchange=exchange)
    ours = expected_traffic(exchange, 1, 32, 128, 4).values()
    wider = 2 * (7 / 8 - 1 / 2) * 8192 * 2 if exchange != "all_reduce" else 0
    assert found.traffic.exchange_bytes == pytest.approx(sum(sent for _, sent in ours) + wider)
    assert found.traffic.exchange_calls == sum(calls for calls, _ in ours)
    assert found.exchanges[exchange] == found.traffic and set(found.exchanges) == {"fold", "all_reduce", "ag_rs", "a2a"}


def test_within_tp_gathers_queries_and_exchanges_latents() -> None:
    (one,) = candidates(DEEPSEEK, 8, Pins(tp=8, dcp=4, layout="within_tp", ep=8, expert_tp=1))
    sent = {(each.what, each.op): each for each in attention_traffic(DEEPSEEK, one, "bfloat16", 5)}
    assert sent["queries", "all_gather"].bytes == 3 * 5 * 16 * 576 * 2
    assert sent["exchange", "all_to_all"].bytes == 4 * 5 * (64 - 16) * 513
    assert sent["latent", "all_gather"].ranks == 8
    assert sent["output", "all_reduce"].bytes == 2 * 7 / 8 * 5 * 7168 * 2
    assert sent["queries", "all_gather"].ranks == sent["exchange", "all_to_all"].ranks == 4


def test_tp_beyond_the_kv_heads_gathers_the_rows_of_a_group() -> None:
    model = MODELS["qwen3-235b-a22b"]  # 64 query and 4 KV heads
    (one,) = candidates(model, 8, Pins(tp=8, dcp=1, ep=8, expert_tp=1))
    sent = {each.what: each for each in attention_traffic(model, one, "bfloat16", 2)}
    assert sent["KV group"].bytes == 7 * 2 * (64 + 8) * 128 // 8 * 2


def test_keys_that_a_rank_reads() -> None:
    gemma = MODELS["gemma-3-27b"]
    (one,) = candidates(gemma, 8, Pins(tp=2, dcp=4, layout="orthogonal"))
    assert keys_read(gemma, one, 131072, window=False) == 32768
    assert keys_read(gemma, one, 131074, window=False) == 32769
    assert keys_read(gemma, one, 131072, window=True) == 256
    assert keys_read(gemma, one, 100, window=True) == 25


def test_stages_divide_memory_and_not_time() -> None:
    one = row("qwen2.5-72b", Workload(context=4096), gpus=4, tp=4, pp=1, dcp=1)
    two = row("qwen2.5-72b", Workload(context=4096), gpus=8, tp=4, pp=2, dcp=1)
    assert two.memory.weights < 0.52 * one.memory.weights
    assert two.step.weights == one.step.weights and two.step.kv == one.step.kv
    assert two.step.collectives - one.step.collectives == pytest.approx(9e-6 + 8192 * 2 / 337.5e9)


def test_first_token_by_hand() -> None:
    """One chunk of a dense model on one GPU, where products bind: matrices and half a square of scores."""
    found = row("llama-3-8b", Workload(context=1024), gpus=1)
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    operations = 2 * 1024 * layer + 2 * 1024 * 512.5 * 32 * 256
    assert found.ttft_s == pytest.approx(32 * (operations / (0.6 * 989e12) + 20e-6) + 500e-6, rel=1e-3)


def test_first_token_on_a_measured_machine_by_hand() -> None:
    """Attention of the chunk at its own rate, three passes over what the products put out, and what a step adds."""
    slow = replace(
        H200, ranks=1, activations=3.0, layer_sequence_s=2e-6, sequence_s=3e-6,
        chunks=(ChunkRate(dtype="bfloat16", head_dim=128, flops=1e14),),
    )  # fmt: skip
    model, work = MODELS["llama-3-8b"], Workload(context=1024)
    (before,), (after,) = (make_plan("q", model, each, 1, work).rows for each in (H200, slow))
    scores = 2 * 1024 * 512.5 * 32 * 256
    outputs = (4096 + 2 * 1024) + 4096 + 2 * 14336 + 4096  # QKV, output, gated MLP up and down
    layer = scores / 1e14 - scores / (0.6 * 989e12) + 3 * 1024 * outputs * 2 / 3.84e12 + 2e-6
    assert after.ttft_s - before.ttft_s == pytest.approx(32 * layer + 3e-6)
    assert after.step.weights == before.step.weights


def test_only_chosen_experts_put_out_activations() -> None:
    model = MODELS["mixtral-8x7b"]
    passes = replace(H200, activations=1.0)
    (before,), (after,) = (make_plan("q", model, each, 1, Workload(context=512)).rows for each in (H200, passes))
    outputs = (4096 + 2 * 1024) + 4096 + 8 + 2 * (2 * 14336 + 4096)  # QKV, output, router, two experts
    assert after.ttft_s - before.ttft_s == pytest.approx(32 * 512 * outputs * 2 / 3.84e12)
    (shared,) = make_plan("q", model, passes, 2, Workload(context=512), Pins(tp=2, ep=2, expert_tp=1)).rows
    (other,) = make_plan("q", model, H200, 2, Workload(context=512), Pins(tp=2, ep=2, expert_tp=1)).rows
    split = 3 * 1024 + 4096 + 8 + (2 * 14336 + 4096)  # one of the two on this rank, on average
    assert shared.ttft_s - other.ttft_s == pytest.approx(32 * 512 * split * 2 / 3.84e12)


def test_dcp_shares_the_work_of_a_prompt_in_orthogonal_only() -> None:
    work = Workload(context=131072, batch=1)
    alone = row("qwen2.5-72b", work, gpus=2, tp=2)
    shared = row("qwen2.5-72b", work, tp=2, dcp=4, layout="orthogonal")
    assert 3 < alone.ttft_s / shared.ttft_s <= 4


def test_a_slower_machine_is_slower() -> None:
    work = Workload(context=8192, batch=16)
    rows = make_plan("q", QWEN, H200, 8, work).rows
    slow = replace(H200, memory_bandwidth=H200.memory_bandwidth / 2, collective_s=1e-4)
    by_name = {each.candidate.name: each for each in make_plan("q", QWEN, slow, 8, work).rows}
    for each in rows:
        other = by_name[each.candidate.name].step
        assert other.kv == pytest.approx(2 * each.step.kv)
        assert other.exchange > each.step.exchange or each.candidate.dcp == 1


def test_a_measured_machine_adds_what_it_has_seen() -> None:
    """Qwen2.5-72B at tp 4 x dcp 2, 3 x 4096 tokens: 2048 keys a rank, 2 of 8 KV heads, 8 query heads each."""
    rate = AttentionRate(kv_dtype="bfloat16", head_dim=128, rows=8, latent=False, bytes_per_s=1e12)
    gather = CollectiveRate(op="all_gather", ranks=2, span=8, bytes=1.0, seconds=3e-5)
    own = dict(layer_sequence_s=2e-6, sequence_s=3e-6, followers_s=4e-5, merge_s=7e-6, imbalance=1.5)
    slow = replace(H200, attention=(rate,), collectives=(gather,), ranks=8, **own)
    pins = Pins(tp=4, dcp=2, layout="orthogonal")
    (before,), (after,) = (
        make_plan("q", QWEN, each, 8, Workload(context=4096, batch=3), pins).rows for each in (H200, slow)
    )
    assert after.step.kv == pytest.approx(1.5 * 80 * 3 * 2048 * 2 * 2 * 128 * 2 / 1e12)
    assert after.step.overhead - before.step.overhead == pytest.approx(80 * 3 * 2e-6 + 3 * 3e-6 + 4e-5)
    lse = 8e-6 + 1e-6 + 3 * 16 * 4 / 337.5e9  # what the data sheet has for the gather
    assert after.step.exchange - before.step.exchange == pytest.approx(80 * (3e-5 - lse + 7e-6))
    (alone,) = make_plan("q", QWEN, slow, 8, Workload(context=4096, batch=3), Pins(tp=8)).rows
    assert alone.step.exchange == 0
    assert alone.step.overhead == pytest.approx(after.step.overhead)


def test_without_followers_nobody_is_told_or_waited_for() -> None:
    rate = AttentionRate(kv_dtype="bfloat16", head_dim=128, rows=4, latent=False, bytes_per_s=1e12)
    slow = replace(H200, followers_s=1.0, imbalance=100.0, attention=(rate,))
    (one,) = make_plan("q", MODELS["llama-3-8b"], slow, 1, Workload(context=128)).rows
    assert one.step.overhead < 1
    assert one.step.kv == pytest.approx(32 * 128 * 8 * 2 * 128 * 2 / 1e12)


def test_many_chunks_are_looked_at_in_groups() -> None:
    """A hundred thousand chunks take as long as the smaller chunk says, and not as long to plan."""
    at_once = row("llama-3-8b", Workload(context=131072, chunk=128), gpus=1)  # 1024 chunks
    grouped = row("llama-3-8b", Workload(context=131072, chunk=127), gpus=1)  # 1033, two by two
    assert grouped.ttft_s == pytest.approx(at_once.ttft_s, rel=0.02)
    single = row("llama-3-8b", Workload(context=131072, chunk=1), gpus=1)
    assert single.ttft_s > 131072 * single.step.overhead
