"""Names that people type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def look_up(kind: str, name: str, known: Iterable[str], aliases: Mapping[str, str]) -> str:
    """The known name that ``name`` means, whatever its case and separators; ``ValueError`` with the closest ones."""
    names = list(known)
    by_key = {_key(alias): target for alias, target in aliases.items()} | {_key(each): each for each in names}
    if (found := by_key.get(_key(name))) is not None:
        return found
    close = dict.fromkeys(by_key[key] for key in difflib.get_close_matches(_key(name), by_key, n=4, cutoff=0.5))
    said = f"did you mean {' or '.join(close)}? Known" if close else "known"
    raise ValueError(f"{kind} {name[:80]!r} is not known; {said} are {', '.join(names)}")


def _key(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
