from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_dcp.planner.machine import AttentionRate, ChunkRate, CollectiveRate, Machine, Sent

ROUND = Machine(
    name="round numbers",
    memory_bytes=100e9,
    memory_bandwidth=1e12,
    flops={"float32": 1e13, "bfloat16": 1e14, "fp8": 2e14},
    link_bandwidth=1e11,
    link_gpus=8,
    network_bandwidth=1e10,
    collective_s=10e-6,
    link_step_s=1e-6,
    network_step_s=5e-6,
    layer_s=0.0,
    step_s=0.0,
)


def sent(op: str, ranks: int, *, span: int = 0, world: int = 0, calls: int = 1, num_bytes: float = 0.0) -> Sent:
    span = span or ranks
    return Sent(what="test", op=op, ranks=ranks, span=span, world=world or span, calls=calls, bytes=num_bytes)


def test_roofline_is_the_slower_of_both() -> None:
    assert ROUND.seconds(1e12, 1e13, "bfloat16") == 1.0
    assert ROUND.seconds(1e11, 1e14, "bfloat16") == 1.0
    assert ROUND.seconds(1e11, 1e14, "fp8") == 0.5


@pytest.mark.parametrize(
    ("op", "ranks", "steps"),
    [("all_reduce", 8, 6), ("all_reduce", 2, 2), ("all_reduce", 3, 4), ("all_gather", 8, 7), ("all_to_all", 8, 1)],
)
def test_latency_is_a_start_and_steps(op: str, ranks: int, steps: int) -> None:
    assert ROUND.collective_seconds(sent(op, ranks)) == pytest.approx(10e-6 + steps * 1e-6)
    assert ROUND.collective_seconds(sent(op, ranks, calls=3)) == pytest.approx(3 * (10e-6 + steps * 1e-6))


def test_bytes_take_what_the_slowest_link_of_the_group_takes() -> None:
    assert ROUND.collective_seconds(sent("all_to_all", 8, num_bytes=1e11)) == pytest.approx(1 + 11e-6)
    over_network = sent("all_to_all", 8, span=16, num_bytes=1e10)
    assert ROUND.collective_seconds(over_network) == pytest.approx(1 + 15e-6)
    # 6 consecutive ranks of many lie across two domains of 8, those of a world of 6 do not
    assert ROUND.collective_seconds(sent("all_to_all", 6, world=12)) == pytest.approx(15e-6)
    assert ROUND.collective_seconds(sent("all_to_all", 6)) == pytest.approx(11e-6)
    assert ROUND.collective_seconds(sent("all_to_all", 4, world=64)) == pytest.approx(11e-6)


def test_alone_nothing_is_sent() -> None:
    assert ROUND.collective_seconds(sent("all_reduce", 1)) == 0
    assert ROUND.collective_seconds(sent("send", 4, calls=0)) == 0


def rate(op: str, ranks: int, span: int, num_bytes: float, seconds: float) -> CollectiveRate:
    return CollectiveRate(op=op, ranks=ranks, span=span, bytes=num_bytes, seconds=seconds)


MEASURED = replace(
    ROUND,
    collectives=(
        rate("all_gather", 2, 2, 1000, 10e-6),
        rate("all_gather", 2, 2, 3000, 20e-6),
        rate("all_gather", 2, 8, 1000, 50e-6),
        rate("ring", 4, 4, 1000, 7e-6),
    ),
    attention=tuple(
        AttentionRate(kv_dtype=dtype, head_dim=dim, rows=rows, latent=latent, bytes_per_s=speed)
        for dtype, dim, rows, latent, speed in [
            ("float32", 64, 1, False, 8e9),
            ("float32", 64, 4, False, 2e9),
            ("float32", 128, 1, False, 9e9),
            ("float32", 576, 16, True, 1e9),
            ("int8", 64, 1, False, 3e9),
        ]
    ),
)


@pytest.mark.parametrize(
    ("one", "seconds"),
    [
        (sent("all_gather", 2, num_bytes=1000), 10e-6),
        (sent("all_gather", 2, num_bytes=10), 10e-6),  # latency: no call takes less than the smallest
        (sent("all_gather", 2, num_bytes=2000), 15e-6),
        (sent("all_gather", 2, num_bytes=5000), 30e-6),  # on from the last two
        (sent("all_gather", 2, num_bytes=8000, calls=4), 60e-6),
        (sent("all_gather", 2, span=8, num_bytes=10), 50e-6),
        (sent("all_gather", 2, span=6, num_bytes=10), 50e-6),  # the group that reaches most nearly as far
        (sent("send", 4, num_bytes=1000), 7e-6),
        (sent("ring", 4, num_bytes=4000, calls=1), 7e-6),  # one size only: no slope is known
        (sent("all_gather", 4), 10e-6 + 3e-6),  # not measured: as on a data sheet
        (sent("all_gather", 1, num_bytes=1000), 0.0),
    ],
)
def test_a_measured_collective_takes_what_was_measured(one: Sent, seconds: float) -> None:
    assert MEASURED.collective_seconds(one) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("dtype", "dim", "rows", "latent", "speed"),
    [
        ("float32", 64, 1, False, 8e9),
        ("float32", 64, 2, False, 1 / ((1 / 8e9 + 1 / 2e9) / 2)),  # half way on a scale of powers
        ("float32", 64, 32, False, 2e9),
        ("float32", 80, 4, False, 2e9),
        ("float32", 256, 4, False, 9e9),
        ("float32", 320, 8, True, 1e9),
        ("int8", 64, 7, False, 3e9),
        ("int8", 576, 16, True, None),
        ("bfloat16", 64, 1, False, None),
    ],
)
def test_a_measured_rate_of_attention_is_the_nearest(
    dtype: str, dim: int, rows: int, latent: bool, speed: float | None
) -> None:
    found = MEASURED.attention_rate(dtype, dim, rows, latent=latent)
    assert found is None if speed is None else found == pytest.approx(speed)
    assert ROUND.attention_rate(dtype, dim, rows, latent=latent) is None


def test_a_chunk_attends_as_fast_as_at_the_nearest_head_dim() -> None:
    rates = [("float32", 64, 1e11), ("float32", 128, 2e11), ("bfloat16", 64, 3e11)]
    one = replace(ROUND, chunks=tuple(ChunkRate(dtype=name, head_dim=dim, flops=rate) for name, dim, rate in rates))
    assert [one.chunk_flops("float32", dim) for dim in (32, 64, 90, 91, 576)] == [1e11, 1e11, 1e11, 2e11, 2e11]
    assert one.chunk_flops("bfloat16", 128) == 3e11
    assert ROUND.chunk_flops("bfloat16", 128) == ROUND.flops["bfloat16"]
