"""From tokens to text, piece by piece. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no (or not yet) UTF-8
CONTEXT_TOKENS = 8
LONGEST_WINDOW = 64


class Detokenizer:
    """Text of one growing sequence, without ever giving out half a character.

    A tokenizer's text of a list of tokens is not the sum of their texts: a character may span tokens, and some
    tokenizers drop a space at the start. So a window of the last tokens, of the prompt too, is decoded each time, and
    what has not been given out yet of it is new. A replacement character at its end may still become a real one and
    waits.

    Args:
        tokenizer: Has ``decode(token_ids, skip_special_tokens=True) -> str``.
        prompt: The tokens that the text continues.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # The window must not start inside a character, which has at most four bytes, each of them perhaps a token.
        starts = (list(prompt[-keep:]) for keep in range(CONTEXT_TOKENS, CONTEXT_TOKENS - 4, -1))
        self._window = next((w for w in starts if not self._decode(w).startswith(REPLACEMENT)), [])
        self._given = len(self._decode(self._window).rstrip(REPLACEMENT))

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain once these tokens follow; may be empty."""
        self._window.extend(tokens)
        text = self._decode(self._window)
        new = self._give(text, len(text.rstrip(REPLACEMENT)))
        # Best between characters: a byte fallback decodes a whole run of bytes as invalid until its last one is there.
        if len(self._window) > (LONGEST_WINDOW if self._given == len(text) else 2 * LONGEST_WINDOW):
            new += self._shorten(text)
        return new

    def finish(self) -> str:
        """The rest, now that no token follows."""
        text = self._decode(self._window)
        return self._give(text, len(text))

    def _give(self, text: str, end: int) -> str:
        new = text[self._given : end]
        self._given = max(self._given, end)
        return new

    def _shorten(self, text: str) -> str:
        """Drop tokens from the window's start, at a place where what is left reads the same without them."""
        for keep in range(CONTEXT_TOKENS, 2 * CONTEXT_TOKENS):
            tail = self._decode(self._window[-keep:])
            if tail and text.endswith(tail):
                cut = len(text) - len(tail)
                new = self._give(text, cut)  # bytes that stayed invalid for this long
                self._window = self._window[-keep:]
                self._given -= cut
                return new
        return ""

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def text_after(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The whole text of ``tokens`` after ``prompt``: what a `Detokenizer` gives out in pieces."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return detokenizer.push(tokens) + detokenizer.finish()
