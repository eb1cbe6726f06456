"""Reading pickles without running what they name.

A checkpoint comes from somebody else, and a pickle is a program. Tensors, plain Python values and a short list of
harmless classes are read; classes of Megatron's own that only Megatron needs (enumerations among the arguments,
states of its random generators) become inert place holders; anything else is refused.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import pickle
import re
import signal
import types
from pathlib import Path
from typing import Any

import torch

_PLAIN: tuple[Any, ...] = (
    argparse.Namespace,
    types.SimpleNamespace,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    signal.Signals,
    io.BytesIO,
)
# Modules whose classes are replaced by place holders. Their values are never looked at.
_INERT = ("megatron.", "transformer_engine.", "numpy.", "torch._C.Generator")


class _Inert:
    """Stands for an object that is not needed; takes anything, keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def load_torch(path: Path, *, content: bytes | None = None, mmap: bool = False) -> Any:
    """``torch.load`` on the CPU with weights-only safety.

    Args:
        content: What to read instead of the file, which then only gives its name to messages.
        mmap: Map the file instead of reading it, where its format allows that: tensors are read when they are used.

    Raises:
        ValueError: The file is truncated or no such file, or it holds classes beyond those that are known harmless.
    """
    try:
        unsafe = _unsafe_globals(_stream(path, content))
        refused = [name for name in unsafe if not name.startswith(_INERT)]
        if refused:
            raise ValueError(_refusal(path, refused))
        stubs = [(type("Inert", (_Inert,), {}), name) for name in unsafe]
        with _allowed(*_PLAIN, *stubs):
            try:
                return torch.load(_stream(path, content), map_location="cpu", weights_only=True, mmap=mmap or None)
            except RuntimeError as error:
                if not mmap or "mmap" not in str(error):
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)  # the format from before torch 1.6
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: the checkpoint is incomplete") from error
    except pickle.UnpicklingError as error:
        named = re.search(r"(?:GLOBAL|Unsupported class|[Uu]nsupported global:?) ([\w.]+)", str(error))
        if named:  # a file from before torch 1.6
            raise ValueError(_refusal(path, [named[1]])) from error
        raise ValueError(_damage(path, error)) from error
    except (RuntimeError, EOFError, KeyError, AttributeError, IndexError, OSError) as error:
        raise ValueError(_damage(path, error)) from error


def load_metadata(path: Path) -> Any:
    """The ``torch.distributed.checkpoint`` metadata in ``path`` (a ``.metadata`` file).

    Raises:
        ValueError: The file is truncated, or it names a class that metadata does not consist of.
    """
    try:
        with path.open("rb") as file:
            return _MetadataUnpickler(file).load()
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: the checkpoint is incomplete") from error
    except _Refused as error:
        raise ValueError(
            f"{path} names {error}, which the metadata of a checkpoint has no need of; it is refused because reading "
            "it could run foreign code. Save the checkpoint again with a Megatron-Core that is supported (0.16 to 0.19)"
        ) from error
    except _Missing as error:
        raise ValueError(
            f"{path} names {error}, which torch {torch.__version__} does not have: the checkpoint is newer. Update "
            "torch, or save it again with an older torch and Megatron-Core (0.16 to 0.19)"
        ) from error
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is truncated or no checkpoint metadata: {_first_line(error)}; copy it again"
        ) from error


class _Refused(Exception):
    pass


class _Missing(Exception):
    pass


class _MetadataUnpickler(pickle.Unpickler):
    """Finds the dataclasses that metadata consists of and torch's own constants, nothing else."""

    _CLASSES = (
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.planner",
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed._shard.sharded_tensor.metadata",
        "torch.distributed._shard.metadata",
    )
    # Subclasses that add nothing to what is read; found without importing Megatron.
    _RENAMED = {
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): (_CLASSES[0], "Metadata"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): (_CLASSES[1], "SavePlan"),
    }
    _OTHERS = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("builtins", "set"),
        ("builtins", "frozenset"),
    }
    _PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}  # the second since Python 3.13

    def find_class(self, module: str, name: str) -> Any:
        module, name = self._RENAMED.get((module, name), (module, name))
        if (module, name) in self._PATHS:
            return pathlib.PurePosixPath
        if "." not in name:
            found = None
            if (module, name) in self._OTHERS or module in self._CLASSES or module == "torch":
                try:
                    found = super().find_class(module, name)
                except AttributeError as error:
                    raise _Missing(f"{module}.{name}") from error
            if (module, name) in self._OTHERS or isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                return found
            # Only what the module itself defines: an imported `os` or `pickle` is not to be reached through it.
            if isinstance(found, type) and module in self._CLASSES and found.__module__ == module:
                return found
        raise _Refused(f"{module}.{name}")


def _allowed(*classes: Any) -> Any:
    """Context in which weights-only loading takes ``classes``; torch would forget those that were allowed before."""
    before = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([cls for cls in classes if cls not in before])


def _stream(path: Path, content: bytes | None) -> Path | io.BytesIO:
    return path if content is None else io.BytesIO(content)


def _unsafe_globals(file: Path | io.BytesIO) -> list[str]:
    """Names in the pickle that weights-only loading would refuse, beyond `_PLAIN`."""
    with _allowed(*_PLAIN):
        try:
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        except ValueError:  # the format from before torch 1.6, which it cannot list
            return []


def _refusal(path: Path, names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return (
        f"{path} holds more than tensors and plain values: {shown}. Reading that could run foreign code, so it is "
        "refused. If you trust whoever wrote the file, allow these classes in Python before loading or converting it: "
        "torch.serialization.add_safe_globals([...]), then megatron_dcp.checkpoint.convert(src, dst, to='torch_dist')"
    )


def _damage(path: Path, error: BaseException) -> str:
    return f"{path} is truncated or not a torch file: {_first_line(error)}; copy it again"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).split("\n")[0][:200]
