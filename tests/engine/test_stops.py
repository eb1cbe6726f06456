import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_dcp.engine.stops import StopStrings


class Bytes:
    """One token per byte, as byte-level tokenizers have them."""

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return bytes(tokens).decode(errors="replace")


def split(data: bytes, cuts) -> list[list[int]]:
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [list(data[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def run(stop, pushes, prompt=b"x", **options) -> tuple[list[str], list[bool]]:
    """What each push gives out, then what the end does."""
    stops = StopStrings(Bytes(), list(prompt), stop, **options)
    parts, flags = [], []
    for tokens in pushes:
        text, stopped = stops.push(tokens)
        parts.append(text)
        flags.append(stopped)
    return [*parts, stops.finish()], flags


def text_before_stop(text: str, stop, skip: int = 0) -> tuple[str, bool]:
    """Brute force: the first end, and of the stop strings that end there the longest."""
    for end in range(skip, len(text) + 1):
        found = [s for s in stop if end - len(s) >= skip and text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="ab\u20ac\U0001f600", max_size=24),
    stop=st.lists(st.text(alphabet="ab\u20ac", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 80), max_size=30),
)
@example(text="xabcd", stop=["abcd", "bc"], cuts=range(9))
@example(text="aaab", stop=["aab"], cuts=[])
@example(text="abab", stop=["abac", "b"], cuts=[2])
@example(text="\u20ac\u20acb", stop=["\u20acb"], cuts=range(9))
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(text, stop, cuts):
    parts, flags = run(stop, split(text.encode(), cuts))
    expected, stops = text_before_stop(text, stop)
    assert "".join(parts) == expected
    assert any(flags) == stops
    assert flags == sorted(flags)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=16),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_comes_as_soon_as_it_is_certain_and_the_stop_with_its_last_token(text, stop):
    parts, flags = run(stop, [[byte] for byte in text.encode()])
    given = ""
    for i in range(len(text)):
        given += parts[i]
        so_far, stopped = text_before_stop(text[: i + 1], stop)
        assert flags[i] == stopped
        held = max((n for n in range(1, len(so_far) + 1) if any(s.startswith(so_far[-n:]) for s in stop)), default=0)
        assert given == (so_far if stopped else so_far[: len(so_far) - held])
        if stopped:
            break


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=16),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), min_size=1, max_size=2),
    min_tokens=st.integers(0, 18),
    cuts=st.lists(st.integers(0, 17), max_size=8),
)
def test_the_first_min_tokens_are_not_searched(text, stop, min_tokens, cuts):
    parts, flags = run(stop, split(text.encode(), cuts), min_tokens=min_tokens)
    expected, stops = text_before_stop(text, stop, skip=min_tokens)
    assert ("".join(parts), any(flags)) == (expected, stops)


def test_a_stop_string_is_not_looked_for_in_the_prompt():
    assert run(["ab"], [[ord("b")], [ord("c")]], prompt=b"xa") == (["b", "c", ""], [False, False])


def test_nothing_follows_a_stop():
    stops = StopStrings(Bytes(), [1], ["b"])
    assert stops.push(list(b"abc")) == ("a", True)
    assert stops.push(list(b"d")) == ("", True)
    assert stops.finish() == ""


def test_a_stop_string_of_invalid_bytes_is_found_at_the_end():
    assert run(["a\ufffd"], [[0x78], [0x61], [0xE2]]) == (["x", "", "", ""], [False, False, False])


def test_the_rest_of_the_first_min_tokens_is_not_searched_either():
    assert run(["\ufffd"], [[0x78], [0xE2]], min_tokens=3) == (["x", "", "\ufffd"], [False, False])


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_without_a_stop_string_the_text_is_the_detokenizers(stop):
    data = "a\u20acb\U0001f600".encode()
    parts, flags = run(stop, [[byte] for byte in data])
    assert [part for part in parts if part] == list(data.decode())
    assert not any(flags)
