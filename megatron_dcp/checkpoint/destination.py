"""How a new checkpoint comes to be: under another name until it is complete, on a disk that has room for it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_own: set[str] = set()  # unfinished directories of this process


def check_new(destination: Path) -> None:
    """Raise ``ValueError`` if something has that name already."""
    if destination.exists() or destination.is_symlink():
        raise ValueError(f"{str(destination)!r} exists already; remove it or choose another name")


def check_apart(source: str | Path, destination: str | Path) -> None:
    """Raise ``ValueError`` if the new checkpoint would lie in the directory of the one that is read."""
    if Path(destination).resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(
            f"{str(destination)!r} lies in the checkpoint {str(source)!r} that is read; choose a name outside of it"
        )


def check_space(destination: Path, needed: int) -> None:
    """Raise ``ValueError`` unless ``needed`` bytes are free where ``destination`` is to lie."""
    folder, free = _free(destination)
    if needed > free:
        raise ValueError(
            f"{str(destination)!r} takes {needed} bytes, but the disk of {str(folder)!r} has {free} left; free some "
            "space, or choose another place"
        )


@contextlib.contextmanager
def naming_full_disk(destination: Path, needed: int) -> Iterator[None]:
    """What is raised in the block because the disk is full becomes a ``ValueError`` that says so."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        folder, free = _free(destination)
        if not _is_full_disk(error):
            raise
        raise ValueError(
            f"the disk of {str(folder)!r} was full before {str(destination)!r} was complete: it takes {needed} bytes, "
            f"and {free} are free now that its beginning is removed; free some space, or choose another place"
        ) from error


def write_at(file: BinaryIO, offset: int, tensor: Tensor) -> None:
    """Write a tensor's values into an open file, from byte ``offset`` on."""
    file.seek(offset)
    file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class QuietFile:
    """A file for torch's C++ code to write to: what `write` would raise is kept, and raised when Python asks next.

    Raised in the middle of ``torch.save``, a full disk comes out as another error.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write, or only pretend to after an error."""
        size = memoryview(data).nbytes
        try:
            return size if self._error else self._file.write(data)
        except OSError as error:
            # Without its frames: Python 3.12.1 crashes on collecting a BytesIO's buffer, as `data` can be, in a cycle.
            self._error = error.with_traceback(None)
            return size

    def tell(self) -> int:
        """Position; raises the error that there has been."""
        self.check()
        return self._file.tell()

    def check(self) -> None:
        """Raise the error that there has been."""
        if self._error is not None:
            raise self._error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def new_directory(destination: str | Path) -> Iterator[Path]:
    """A directory to fill, which gets the name ``destination`` only if the block ends well.

    Until then it is a hidden sibling, ``.NAME.partial-HOST-PID-…``; a block that raises leaves nothing behind. What a
    process left that was killed is removed.

    Raises:
        ValueError: ``destination`` exists.
    """
    destination = Path(destination)
    check_new(destination)
    remove_stale(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.parent / f"{_partial_prefix(destination)}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    _own.add(partial.name)
    try:
        partial.mkdir()
        yield partial
        check_new(destination)
        os.rename(partial, destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        _own.discard(partial.name)


def remove_stale(destination: Path) -> None:
    """Remove the unfinished directories of ``destination`` whose processes, on this machine, are gone."""
    prefix = _partial_prefix(destination)
    if not destination.parent.is_dir():
        return
    for path in destination.parent.iterdir():
        pid = path.name.removeprefix(prefix).partition("-")[0]
        if path.name.startswith(prefix) and pid.isdecimal() and path.name not in _own:
            # A number can have come back: in a container it is often the same one.
            if int(pid) == os.getpid() or not _is_running(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _partial_prefix(destination: Path) -> str:
    return f".{destination.name}.partial-{socket.gethostname()}-"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _free(destination: Path) -> tuple[Path, int]:
    """The nearest directory that exists, and the bytes that are free on its disk."""
    folder = next(parent for parent in destination.absolute().parents if parent.is_dir())
    return folder, shutil.disk_usage(folder).free


def _is_full_disk(error: BaseException | None) -> bool:
    seen = []
    while error is not None and error not in seen:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False
