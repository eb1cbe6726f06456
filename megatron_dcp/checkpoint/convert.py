"""Converting checkpoints between formats, with nothing half-written if it stops midway."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path

from megatron_dcp.checkpoint.dist import DistSource
from megatron_dcp.checkpoint.dist_write import write_dist
from megatron_dcp.checkpoint.files import (
    FORMATS,
    TRACKER,
    Format,
    Location,
    check_apart,
    check_new,
    check_space,
    copy_companions,
    iteration_dir,
    locate,
    new_directory,
)
from megatron_dcp.checkpoint.hf import HFSource, write_hf
from megatron_dcp.checkpoint.legacy import LegacySource, write_legacy
from megatron_dcp.checkpoint.source import Source
from megatron_dcp.config import check_choice

# For models that come without one. Megatron-LM counts from 1 and takes 0 for "not trained yet".
FIRST_ITERATION = 1


def open_source(path: str | Path | Location) -> Source:
    """Open the checkpoint at ``path``, of any format, for reading.

    Raises:
        ValueError: See `locate` and the classes of the formats.
    """
    location = path if isinstance(path, Location) else locate(path)
    match location.format:
        case "torch_dist":
            return DistSource(location)
        case "legacy":
            return LegacySource(location)
        case "hf":
            return HFSource(location)


def convert(
    src: str | Path, dst: str | Path, *, to: Format = "torch_dist", progress: Callable[[str], None] | None = None
) -> Path:
    """Write the model of the checkpoint ``src`` as a new checkpoint ``dst``; weights are copied bit by bit.

    Tokenizer files go along; optimizer states do not. ``dst`` appears under its name only when it is complete.

    Args:
        src: A directory with ``latest_checkpointed_iteration.txt``, one iteration's directory, or a Hugging Face
            model; the format is found out.
        dst: A name that does not exist yet.
        to: ``"torch_dist"``, ``"legacy"`` (one rank) or ``"hf"``.
        progress: Called with the name of every tensor of Megatron's that has been read.

    Returns:
        ``dst`` as a path.

    Raises:
        ValueError: ``dst`` exists, lies in ``src`` or on a disk without room, ``src`` is no sound checkpoint, or its
            model does not exist in the other format.
    """
    check_choice("to", to, FORMATS)
    dst = Path(dst)
    check_new(dst)
    check_apart(src, dst)
    source = open_source(src)
    check_space(dst, sum(prod(spec.shape) * source.dtype(name).itemsize for name, spec in source.specs.items()))
    iteration = source.location.iteration or FIRST_ITERATION
    with new_directory(dst) as directory:
        if to == "hf":
            write_hf(source, directory, progress=progress)
        else:
            (directory / iteration_dir(iteration)).mkdir()
            write = write_dist if to == "torch_dist" else write_legacy
            write(source, directory / iteration_dir(iteration), iteration=iteration, progress=progress)
            (directory / TRACKER).write_text(f"{iteration}\n")
        copy_companions(source.location, directory)
    return dst
