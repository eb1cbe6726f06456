"""Where the parts of a checkpoint lie on disk, and which format it has."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

WritableFormat = Literal["torch_dist", "legacy", "hf"]
WRITABLE_FORMATS: tuple[str, ...] = get_args(WritableFormat)
Format = Literal["torch_dist", "legacy", "hf", "fsdp_dtensor"]

TRACKER = "latest_checkpointed_iteration.txt"
HF_CONFIG = "config.json"
# What travels with the weights: everything that turns text into tokens and says where a text ends.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a checkpoint lies.

    Attributes:
        root: Directory that a user names; tokenizer files lie here.
        data: Directory of the tensors: ``root`` for Hugging Face, one iteration's directory for Megatron.
        iteration: Iteration of the training; ``None`` where the checkpoint knows none.
    """

    format: Format
    root: Path
    data: Path
    iteration: int | None = None

    @property
    def tokenizer_dir(self) -> Path | None:
        """The directory with the tokenizer's files, if there is one."""
        for directory in (self.data, self.root):
            if any((directory / name).is_file() for name in TOKENIZERS):
                return directory
        return None


def locate(path: str | Path) -> Location:
    """Find the checkpoint that ``path`` names: a directory with a tracker file, an iteration's, or a Hugging Face one.

    Raises:
        ValueError: There is no checkpoint, it is unfinished, or its format is not known.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is a file; give the directory that holds it" if path.exists() else "does not exist"
        raise ValueError(f"checkpoint {str(path)!r} {what}")
    if (path / TRACKER).is_file():
        name, iteration = _read_tracker(path / TRACKER)
        if not (path / name).is_dir():
            raise ValueError(
                f"{path / TRACKER} names {name!r}, which is not there; {_iterations(path)}. "
                "Give the path of one of these, or correct the file"
            )
        return Location(format=_megatron_format(path / name), root=path, data=path / name, iteration=iteration)
    if (path / HF_CONFIG).is_file() and not (path / ".metadata").exists():
        return Location(format="hf", root=path, data=path)
    if list(path.glob("iter_*")) or (path / "release").is_dir():
        raise ValueError(
            f"{str(path)!r} has no {TRACKER}, which a finished checkpoint has; {_iterations(path)}. "
            "Give the path of one of these"
        )
    name = path.resolve().name
    iteration = int(name[5:]) if name.startswith("iter_") and name[5:].isdigit() else None
    root = path.resolve().parent if iteration is not None or name == "release" else path
    return Location(format=_megatron_format(path), root=root, data=path, iteration=iteration)


def detect_format(path: str | Path) -> Format:
    """``"torch_dist"``, ``"legacy"``, ``"hf"`` or ``"fsdp_dtensor"``; raises as `locate` does."""
    return locate(path).format


def iteration_dir(iteration: int) -> str:
    """Megatron-LM's name of the directory of one iteration."""
    return f"iter_{iteration:07d}"


def copy_companions(source: Location, destination: Path) -> list[str]:
    """Copy tokenizer files and generation settings; returns their names."""
    copied = []
    for name in COMPANIONS:
        for directory in (source.data, source.root):
            if (directory / name).is_file():
                shutil.copyfile(directory / name, destination / name)
                copied.append(name)
                break
    return copied


def _read_tracker(path: Path) -> tuple[str, int | None]:
    text = path.read_text(errors="replace").strip()
    if text == "release":
        return text, None
    if not text.isdecimal():
        raise ValueError(f"{path} holds {text[:40]!r}, neither an iteration nor 'release'; {_iterations(path.parent)}")
    return iteration_dir(int(text)), int(text)


def _iterations(root: Path) -> str:
    found = sorted(p.name for p in root.iterdir() if p.is_dir() and (p.name.startswith("iter_") or p.name == "release"))
    return f"there are {', '.join(found)}" if found else "there is no iteration's directory"


def _megatron_format(data: Path) -> Format:
    if (data / "metadata.json").is_file():
        return "torch_dist"
    if list(data.glob("mp_rank_*")):
        return "legacy"
    if (data / ".metadata").is_file():
        return "fsdp_dtensor"
    if list(data.glob("*.distcp")):
        raise ValueError(
            f"{str(data)!r} has no .metadata, which is written after the tensors: its saving was interrupted; take an "
            "earlier iteration"
        )
    shown = ", ".join(sorted(p.name for p in data.iterdir())[:6]) or "nothing"
    raise ValueError(
        f"{str(data)!r} holds no checkpoint that is known: neither metadata.json (torch_dist), nor mp_rank_* (legacy), "
        f"nor config.json (Hugging Face), nor {TRACKER}; it holds {shown}"
    )
