"""Files that are mapped into memory, and given back after so many bytes.

The pages of a mapped file that have been read count as memory of the process for as long as the file stays mapped. A
whole checkpoint would, one by one; so files are closed from time to time and opened again when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
LIMIT_BYTES = 128 << 20  # that may be read before all files are closed


class MappedFiles(Generic[T]):
    """Files by path, opened when asked for.

    Args:
        open_file: Maps a file; what it returns may be given away, and then keeps the file mapped for longer.
    """

    def __init__(self, open_file: Callable[[Path], T]) -> None:
        self._open_file = open_file
        self._files: dict[Path, T] = {}
        self._read = 0

    def get(self, path: Path) -> T:
        """The open file."""
        if path not in self._files:
            self._files[path] = self._open_file(path)
        return self._files[path]

    def count(self, nbytes: int) -> None:
        """Note that ``nbytes`` of the files have been read; closes them when that is too many."""
        self._read += nbytes
        if self._read >= LIMIT_BYTES:
            self.close()

    def close(self) -> None:
        """Close all files. What was read from them stays valid."""
        self._files.clear()
        self._read = 0
