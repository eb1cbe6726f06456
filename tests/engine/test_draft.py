import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_dcp.engine.draft import NgramDrafter
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.request import Request


def request(prompt) -> Request:
    return Request(index=0, prompt=list(prompt), params=SamplingParams(), max_tokens=100, stop_ids=frozenset())


def brute_force(tokens, count, longest, shortest) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):  # the latest first; the n-gram at the end does not count
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                grown = list(tokens)
                for place in range(start + n, start + n + count):
                    grown.append(grown[place])
                return grown[len(tokens) :]
    return []


@settings(max_examples=400, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    pushes=st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=10),
    count=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
@example(prompt=[1], pushes=[[], [1], [1, 1], [2]], count=4, sizes=(1, 4))
@example(prompt=[1, 2], pushes=[[1], [2], [1]], count=5, sizes=(2, 3))
def test_every_proposal_is_that_of_a_search_through_the_sequence(prompt, pushes, count, sizes):
    drafter = NgramDrafter(count, max_ngram=max(sizes), min_ngram=min(sizes))
    mine, other = request(prompt), request([3, 2, 1, 0] * 3)
    for push in pushes:
        mine.token_ids += push
        other.token_ids += push[::-1]
        for one in (mine, other, mine):
            tokens = one.prompt + one.token_ids
            assert list(drafter(one)) == brute_force(tokens, count, max(sizes), min(sizes))


def test_the_longest_ngram_decides_before_the_latest():
    assert NgramDrafter(1)(request([1, 2, 3, 7, 2, 3, 8, 3, 9, 1, 2, 3])) == [7]
    assert NgramDrafter(1, max_ngram=2)(request([1, 2, 3, 7, 2, 3, 8, 3, 9, 1, 2, 3])) == [8]
    assert NgramDrafter(1, max_ngram=1)(request([1, 2, 3, 7, 2, 3, 8, 3, 9, 1, 2, 3])) == [9]


def test_a_repeated_token_is_continued_at_full_length():
    assert NgramDrafter(4)(request([5, 9, 9])) == [9, 9, 9, 9]


def test_nothing_is_proposed_where_the_end_is_new():
    assert NgramDrafter(4)(request([1, 2, 3])) == []
    assert NgramDrafter(4, min_ngram=2)(request([1, 2, 3, 2])) == []


def test_a_call_costs_as_much_as_the_new_tokens():
    """Counted, not timed: tokens that the index reads."""
    drafter = NgramDrafter(4)
    mine = request(range(10_000))
    drafter(mine)
    index = drafter._indexes[mine]
    read = []
    index.tokens = type(
        "Counted", (list,), {"__getitem__": lambda self, k: read.append(k) or list.__getitem__(self, k)}
    )(index.tokens)
    mine.token_ids += [17, 18]
    assert drafter(mine) == [19, 20, 21, 22]
    touched = sum(len(range(*k.indices(10_002))) for k in read)
    assert touched < 50


def test_forget_drops_the_index():
    drafter = NgramDrafter(4)
    mine = request([1, 1])
    assert drafter(mine) == [1, 1, 1, 1]
    drafter.forget(mine)
    drafter.forget(mine)
    assert not drafter._indexes


@pytest.mark.parametrize(
    "sizes", [{"max_tokens": 0}, {"max_ngram": 0}, {"min_ngram": 0}, {"max_ngram": 2, "min_ngram": 3}]
)
def test_bad_sizes_are_refused_by_name(sizes):
    with pytest.raises(ValueError, match=next(iter(sizes)).replace("max_ngram", "m.._ngram")):
        NgramDrafter(**{"max_tokens": 4, **sizes})
