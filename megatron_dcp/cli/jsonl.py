"""Prompts from JSON lines, outputs to JSON lines. No torch."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from megatron_dcp.engine.prompts import Prompt, check_text
from megatron_dcp.engine.request import RequestOutput

_KEYS = ("index", "prompt_token_ids", "token_ids", "text", "finish_reason", "logprobs")
FORM = '{"prompt": "..."} or {"token_ids": [...]}'


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of a file, one for each line that is not blank.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is not of the right form; names file and line.
    """
    prompts: list[Prompt] = []
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, 1):
            try:
                if text := line.decode("utf-8-sig" if line_number == 1 else "utf-8").strip():
                    prompts.append(_prompt(text))
            except RecursionError:
                raise ValueError(f"{path}:{line_number}: JSON that is nested too deeply; a line is {FORM}") from None
            except ValueError as error:  # of the bytes, of JSON and of the form
                raise ValueError(f"{path}:{line_number}: {error}; a line is {FORM}") from None
    if not prompts:
        raise ValueError(f"{path} holds no prompts; give at least one line of the form {FORM}")
    return prompts


def _prompt(text: str) -> Prompt:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except ValueError:  # Python's own bound on the digits that it reads
        raise ValueError("a number with too many digits") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    if unknown := sorted(value.keys() - {"prompt", "token_ids"}):
        raise ValueError(f"unknown key {unknown[0][:40]!r}")
    if len(value) != 1:
        raise ValueError("needs exactly one of 'prompt' and 'token_ids'")
    if "prompt" in value:
        if not isinstance(value["prompt"], str):
            raise ValueError(f"'prompt' is {repr(value['prompt'])[:40]}, not a text")
        check_text(value["prompt"], "'prompt'")
        return value["prompt"]
    tokens = value["token_ids"]
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError("'token_ids' is not a list of whole numbers")
    return tokens


def to_line(output: RequestOutput, *, ascii_only: bool = False) -> str:
    """An output as one line of JSON, with its line break."""
    return json.dumps({key: getattr(output, key) for key in _KEYS}, ensure_ascii=ascii_only) + "\n"


class OutputFile:
    """A file that appears under its name only when it is complete.

    It is opened under a temporary name in the same folder, so that a folder that cannot be written is found out before
    anything is computed. What is no regular file (``/dev/stdout``, a pipe) is written directly.
    """

    def __init__(self, path: str) -> None:
        self._given = path
        self._path = Path(os.path.realpath(path))
        if self._path.is_dir():
            raise ValueError(f"--output {path} is a directory; give the name of a file")
        self._temporary: Path | None = None
        if self._path.exists() and not stat.S_ISREG(self._path.stat().st_mode):
            self._file: TextIO = self._path.open("w", encoding="utf-8")
            return
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            self._file = self._temporary.open("x", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--output {path} cannot be written: {error.strerror}") from error

    def finish(self, outputs: Iterable[RequestOutput]) -> None:
        """Write all lines and give the file its name.

        Raises:
            ValueError: They cannot be written, say because the disk is full; names the file.
        """
        lines = [to_line(output) for output in outputs]
        try:
            with self._file:
                self._file.writelines(lines)
        except OSError as error:
            raise ValueError(
                f"--output {self._given} cannot be written: {error.strerror}; free some space, or choose another place"
            ) from error
        if self._temporary is not None:
            self._temporary.replace(self._path)
            self._temporary = None

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
