"""How a new checkpoint appears: what killed and interrupted runs leave, and full disks."""

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dcp.checkpoint import convert, detect_format, dist_write, hf_write, legacy_write, open_source
from megatron_dcp.checkpoint.destination import QuietFile, new_directory, write_at
from models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ("torch_dist", "legacy", "hf")


def partials(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if ".partial-" in path.name)


@pytest.fixture
def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize("to", FORMATS)
def test_remains_of_a_killed_process_are_removed(to: str, gone: int, tmp_path: Path) -> None:
    host = socket.gethostname()
    dead = [f".new.partial-{host}-{gone}-0123abcd", f".new.partial-{host}-{os.getpid()}-0123abcd"]
    others = [
        f".new.partial-{host}-{os.getppid()}-0123abcd",  # runs
        f".new.partial-elsewhere-{gone}-0123abcd",  # on another machine: nobody knows
        f".other.partial-{host}-{gone}-0123abcd",
        ".new.partial-mine",
    ]
    for name in dead + others:
        (tmp_path / name / "iter_0000001").mkdir(parents=True)
    convert(tiny_model("llama"), tmp_path / "new", to=to)  # type: ignore[arg-type]
    assert partials(tmp_path) == sorted(others)
    assert detect_format(tmp_path / "new") == to


def test_two_at_a_time_do_not_touch_each_other(tmp_path: Path) -> None:
    with new_directory(tmp_path / "new") as one:
        with pytest.raises(ValueError, match="exists already"), new_directory(tmp_path / "new") as other:
            assert one.is_dir() and one != other
            one.rename(tmp_path / "new")
        (tmp_path / "new").rename(one)
    assert (tmp_path / "new").is_dir() and partials(tmp_path) == []


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
from megatron_dcp.checkpoint.hf import HFSource
from megatron_dcp.cli import main
read = HFSource._read
def slow(self, name):
    if "layers.1" in name:
        print("half", flush=True)
        time.sleep(60)
    return read(self, name)
HFSource._read = slow
sys.exit(main(["convert", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("number", "code", "to"),
    [
        (signal.SIGINT, 130, "legacy"),
        (signal.SIGTERM, 1, "torch_dist"),
        *((signal.SIGKILL, -signal.SIGKILL, to) for to in ("legacy", "torch_dist", "hf")),
    ],
)
def test_a_command_that_is_stopped_leaves_nothing_that_looks_whole(
    number: signal.Signals, code: int, to: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SLOW, str(tiny_model("llama")), str(tmp_path / "new"), "--to", to]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        assert len(partials(tmp_path)) == 1 and not (tmp_path / "new").exists()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert not (tmp_path / "new").exists()
    if number == signal.SIGKILL:
        (left,) = partials(tmp_path)
        with pytest.raises(ValueError):
            open_source(tmp_path / left)
        convert(tiny_model("llama"), tmp_path / "new", to=to)
    else:
        assert len(errors.splitlines()) == 1 and ("interrupted" in errors or "SIGTERM" in errors)
    assert partials(tmp_path) == []


class SmallDisk:
    """A disk with some bytes of room for all files on it."""

    def __init__(self, room: int) -> None:
        self.room = room

    def file(self, file: Any) -> Any:
        return _FileOnDisk(file, self)

    def write_at(self, file: Any, offset: int, tensor: Any) -> None:
        write_at(self.file(file), offset, tensor)

    def quiet(self, file: Any) -> QuietFile:
        return QuietFile(self.file(file))


class _FileOnDisk:
    def __init__(self, file: Any, disk: SmallDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        self._disk.room -= memoryview(data).nbytes
        if self._disk.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 30_000])
@pytest.mark.parametrize("to", FORMATS)
def test_a_disk_that_is_full_midway(to: str, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(room)
    for module in (hf_write, legacy_write):
        monkeypatch.setattr(module, "write_at", disk.write_at)
    for module in (dist_write, legacy_write):  # what torch's own code writes to
        monkeypatch.setattr(module, "QuietFile", disk.quiet)
    message = r"the disk of '.*' was full before '.*new' was complete: it takes \d{5,} bytes, and \d+ are free now"
    with pytest.raises(ValueError, match=message):
        convert(tiny_model("llama"), tmp_path / "new", to=to)  # type: ignore[arg-type]
    assert disk.room < 0 and list(tmp_path.iterdir()) == []
    gc.collect()  # of torch's writers nothing is left that would write on


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("something else")])
def test_other_errors_stay_what_they_are(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(hf_write, "write_at", failing)
    with pytest.raises(type(error), match=str(error).split("] ")[-1]):
        convert(tiny_model("llama"), tmp_path / "new", to="hf")
    assert list(tmp_path.iterdir()) == []
