import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from megatron_dcp.engine.detokenizer import Detokenizer, text_after


def byte_level() -> Tokenizer:
    """GPT-2's bytes as tokens (id = byte), as in Llama 3, Qwen and the quickstart's model."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's way, as in Llama 2: words with a leading space mark, bytes for what has no token."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581the": 256, "\u2581cat": 257, "s": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


LEVEL, FALLBACK = byte_level(), byte_fallback()


def pieces(tokenizer, prompt, tokens) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push([token]) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("tokenizer", [LEVEL, FALLBACK], ids=["byte_level", "byte_fallback"])
@settings(max_examples=100, deadline=None)
@given(prompt=st.text(max_size=12), text=st.text(max_size=120))
def test_pieces_make_the_text_and_no_piece_holds_half_a_character(tokenizer, prompt, text):
    text = text.replace("\ufffd", "?")
    tokens = list(text.encode())
    parts = pieces(tokenizer, list(("x" + prompt).encode()), tokens)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("tokenizer", [LEVEL, FALLBACK], ids=["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", ["\u00e9" * 120, "0" + "\u20ac" * 80, "\U00010000" * 60, "a\u20ac" * 60])
def test_long_runs_of_bytes(tokenizer, text):
    parts = pieces(tokenizer, list(b"x"), list(text.encode()))
    assert [part for part in parts if part] == list(text)


@settings(max_examples=100, deadline=None)
@given(data=st.lists(st.sampled_from([0x80, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x41, 0x20]), max_size=200))
def test_invalid_bytes_come_out_as_the_tokenizer_writes_them(data):
    prompt = list(b"ab")
    assert "".join(pieces(LEVEL, prompt, data)) == bytes(data).decode(errors="replace")
    assert text_after(LEVEL, prompt, data) == bytes(data).decode(errors="replace")


def test_a_character_is_given_out_with_its_last_byte():
    assert pieces(LEVEL, list(b"x"), list("a\u20acb".encode())) == ["a", "", "", "\u20ac", "b", ""]


def test_bytes_that_never_become_a_character_come_out_at_the_end():
    assert pieces(LEVEL, list(b"x"), [0x41, 0xE2, 0x82]) == ["A", "", "", "\ufffd"]


def test_the_space_before_the_first_word_is_kept():
    assert FALLBACK.decode([256]) == "the"  # alone, the tokenizer drops it
    assert pieces(FALLBACK, [256], [257, 258, 256]) == [" cat", "s", " the", ""]
    assert text_after(FALLBACK, [256], [257, 258]) == " cats"


def test_the_window_stays_short_whatever_comes():
    class Counting:
        longest = 0

        def decode(self, tokens, skip_special_tokens):
            self.longest = max(self.longest, len(tokens))
            return LEVEL.decode(tokens, skip_special_tokens=skip_special_tokens)

    for data in ([0x80] * 1000, [0xE2, 0x82] * 500, list(b"plain text " * 100), list("\u20ac".encode()) * 300):
        tokenizer = Counting()
        assert "".join(pieces(tokenizer, list(b"x"), data)) == bytes(data).decode(errors="replace")
        assert tokenizer.longest < 140
