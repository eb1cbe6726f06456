"""Text up to the first stop string, piece by piece. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_dcp.engine.detokenizer import Detokenizer


class StopStrings:
    """Text of one growing sequence that ends before the first of its stop strings.

    Of several stop strings the one that is complete first counts, of those complete at once the longest. So it does not
    matter how the text falls into tokens, nor the tokens into calls of `push`.

    Args:
        tokenizer: Has ``decode(token_ids, skip_special_tokens=True) -> str``.
        prompt: The tokens that the text continues. A stop string is never looked for in them.
        stop: Strings of at least one character; may be empty.
        min_tokens: The text of this many first tokens is not searched.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str], *, min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stop = tuple(stop)
        self._unsearched = min_tokens
        self._held = ""
        self._stopped = False

    def push(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """The text that is certain once these tokens follow (may be empty), and whether a stop string has appeared.

        Text that may be the start of a stop string waits. To learn which token completed a stop string, push them one
        at a time. After a stop string no text comes out any more.
        """
        if self._stopped:
            return "", True
        text = ""
        if self._unsearched:
            text = self._detokenizer.push(tokens[: self._unsearched])
            tokens, self._unsearched = tokens[self._unsearched :], max(0, self._unsearched - len(tokens))
        if tokens:
            text += self._search(self._detokenizer.push(tokens))
        return text, self._stopped

    def finish(self) -> str:
        """The rest, now that no token follows."""
        if self._stopped:
            return ""
        rest = self._detokenizer.finish()
        if self._unsearched:
            return rest
        text = self._search(rest)
        return text if self._stopped else text + self._held

    def _search(self, new: str) -> str:
        text = self._held + new
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self._stopped = True
            return text[: min(found)[1]]
        certain = len(text) - self._uncertain(text)
        self._held = text[certain:]
        return text[:certain]

    def _uncertain(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string starts with."""
        longest = min(len(text), max(map(len, self._stop), default=0))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
