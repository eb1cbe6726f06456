from __future__ import annotations

import pytest

from megatron_dcp.planner.machine import Machine, Sent

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
