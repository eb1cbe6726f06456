"""Errors and differences become errors on every rank."""

from typing import Any

import pytest
from torch import distributed

from megatron_dcp.comm.consensus import agree, same_on_all
from workers import run_on_ranks


class Custom(Exception):
    pass


def outcome(call: Any, *args: Any) -> tuple[str, str] | None:
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def agree_on(rank: int, world: int, errors: dict[int, Exception]) -> list[Any]:
    """What each rank raises; then that the group still works, and agrees where there is no error."""
    group = distributed.group.WORLD
    assert group is not None
    error = errors.get(rank)
    raised = outcome(agree, error, group)
    assert outcome(agree, error, None) == raised
    assert outcome(agree, None, group) is None
    return [raised]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_error_passes(world: int) -> None:
    assert run_on_ranks(world, agree_on, {}) == [[None]] * world


def test_error_alone_is_raised() -> None:
    assert run_on_ranks(1, agree_on, {0: Custom("broken")}) == [[("Custom", "broken")]]


def test_value_error_is_one_everywhere_with_rank_and_message() -> None:
    others = ("ValueError", "rank 2 failed with ValueError: bad size")
    assert run_on_ranks(3, agree_on, {2: ValueError("bad size")}) == [[others], [others], [("ValueError", "bad size")]]


def test_other_errors_are_runtime_errors_elsewhere() -> None:
    assert run_on_ranks(2, agree_on, {0: OSError("no file")}) == [
        [("OSError", "no file")],
        [("RuntimeError", "rank 0 failed with OSError: no file")],
    ]


def test_every_rank_keeps_its_own_error_and_the_rest_hear_of_all() -> None:
    errors = {1: Custom("one"), 2: ValueError("two"), 3: Custom("three")}
    first, *others = run_on_ranks(4, agree_on, errors)
    assert first == [("RuntimeError", "rank 1 failed with Custom: one (and errors on ranks [2, 3])")]
    assert others == [[("Custom", "one")], [("ValueError", "two")], [("Custom", "three")]]


def agree_in_a_subgroup(rank: int, world: int) -> Any:
    groups = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    return outcome(agree, Custom("here") if rank == 3 else None, groups[rank % 2])


def test_only_the_group_hears_and_ranks_are_global() -> None:
    assert run_on_ranks(4, agree_in_a_subgroup) == [
        None,
        ("RuntimeError", "rank 3 failed with Custom: here"),
        None,
        ("Custom", "here"),
    ]


def own_error_and_peer_gone(rank: int, world: int) -> None:
    if rank == 1:
        raise LookupError("left before")
    agree(Custom("mine"), distributed.group.WORLD)


def test_own_error_is_kept_where_the_others_have_gone() -> None:
    first, second = run_on_ranks(2, own_error_and_peer_gone, expect_errors=True)
    assert type(first).__name__ == "Custom" and str(first) == "mine"
    assert isinstance(second, LookupError)


def compare(rank: int, world: int, values: list[bytes | str]) -> Any:
    return outcome(same_on_all, values[rank], distributed.group.WORLD, "the seed")


@pytest.mark.parametrize("value", ["7", b"\x00\xff", ""])
def test_equal_values_pass(value: bytes | str) -> None:
    assert run_on_ranks(1, compare, [value]) == [None]
    assert run_on_ranks(3, compare, [value] * 3) == [None] * 3


def test_difference_names_ranks_and_short_texts() -> None:
    message = "the seed must be the same on ranks [0, 1, 2], but there is on ranks [0, 2]: 7; on ranks [1]: 8"
    for kind, text in run_on_ranks(3, compare, ["7", "8", "7"]):
        assert kind == "ValueError" and text.startswith(message)


def test_difference_of_bytes_names_ranks_and_hashes() -> None:
    for kind, text in run_on_ranks(3, compare, [b"one", b"one", b"two"]):
        # sha256("one") and sha256("two")
        assert kind == "ValueError"
        assert "on ranks [0, 1]: SHA-256 7692c3ad3540; on ranks [2]: SHA-256 3fc4ccfe7458" in text


def test_long_texts_are_not_printed() -> None:
    texts = ["a" * 1000, "a" * 999 + "b"]
    for kind, text in run_on_ranks(2, compare, texts):
        assert kind == "ValueError" and "aaa" not in text and "SHA-256" in text


def test_difference_of_pairs_names_the_first() -> None:
    same, tail = ("prompt 0", "[1]"), ("prompt 2", "[3]")
    lists: list[Any] = [[same, ("prompt 1", "[2]"), tail], [same, ("prompt 1", "[9]"), tail], [same]]
    for kind, text in run_on_ranks(3, compare, lists):
        assert kind == "ValueError" and text.startswith("the seed (prompt 1) must be the same")
        assert "on ranks [0]: [2]; on ranks [1]: [9]; on ranks [2]: nothing" in text
    assert run_on_ranks(2, compare, [[same, tail]] * 2) == [None] * 2
