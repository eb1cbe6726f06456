"""Converting checkpoints between formats, with nothing half-written if it stops midway."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from megatron_dcp.checkpoint.destination import (
    check_apart,
    check_new,
    check_space,
    naming_full_disk,
    new_directory,
    remove_stale,
)
from megatron_dcp.checkpoint.dist import DistSource
from megatron_dcp.checkpoint.dist_write import write_dist
from megatron_dcp.checkpoint.files import (
    TRACKER,
    WRITABLE_FORMATS,
    Format,
    Location,
    WritableFormat,
    copy_companions,
    iteration_dir,
    locate,
)
from megatron_dcp.checkpoint.fsdp import FsdpSource
from megatron_dcp.checkpoint.hf import HFSource
from megatron_dcp.checkpoint.hf_write import MAX_SHARD_BYTES, write_hf
from megatron_dcp.checkpoint.legacy import LegacySource
from megatron_dcp.checkpoint.legacy_ranks import Sizes, check_sizes, padding
from megatron_dcp.checkpoint.legacy_write import legacy_bytes, write_legacy
from megatron_dcp.checkpoint.source import Source
from megatron_dcp.config import check_choice

# For models that come without one. Megatron-LM counts from 1 and takes 0 for "not trained yet".
FIRST_ITERATION = 1


_SOURCES: dict[Format, Callable[[Location], Source]] = {
    "torch_dist": DistSource,
    "fsdp_dtensor": FsdpSource,
    "legacy": LegacySource,
    "hf": HFSource,
}


def open_source(path: str | Path | Location) -> Source:
    """Open the checkpoint at ``path``, of any format, for reading.

    Raises:
        ValueError: See `locate` and the classes of the formats.
    """
    location = path if isinstance(path, Location) else locate(path)
    source = _SOURCES[location.format](location)
    source.check_dtypes()
    return source


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: WritableFormat = "torch_dist",
    tensor_model_parallel_size: int | None = None,
    pipeline_model_parallel_size: int | None = None,
    expert_model_parallel_size: int | None = None,
    expert_tensor_parallel_size: int | None = None,
    max_shard_bytes: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Path:
    """Write the model of the checkpoint ``src`` as a new checkpoint ``dst``; weights are copied bit by bit.

    Tokenizer files go along; optimizer states do not. ``dst`` appears under its name only when it is complete. Tensors
    pass one by one: memory is a few times the largest of them, whatever the model's size.

    Args:
        src: A directory with ``latest_checkpointed_iteration.txt``, one iteration's directory, or a Hugging Face
            model; the format is found out.
        dst: A name that does not exist yet.
        to: ``"torch_dist"``, ``"legacy"`` or ``"hf"``.
        tensor_model_parallel_size: Ranks that a legacy checkpoint is for, as the next three; default 1.
            ``torch_dist`` is for any.
        expert_tensor_parallel_size: Default as ``tensor_model_parallel_size``; divides it. 1 for experts with biases.
        max_shard_bytes: Most bytes of a file of ``to="hf"``; default 5 GB.
        progress: Called with the bytes of tensors that are written and those that there are in all.

    Returns:
        ``dst`` as a path.

    Raises:
        ValueError: ``dst`` exists, lies in ``src`` or on a disk without room, ``src`` is no sound checkpoint, its
            model does not exist in the other format or cannot be cut for these sizes, or an argument says nothing
            about this format.
    """
    check_choice("to", to, WRITABLE_FORMATS)
    given = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        "expert_model_parallel_size": expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size,
        "max_shard_bytes": max_shard_bytes,
    }
    _check_arguments(to, given)
    tp = tensor_model_parallel_size or 1
    dst = Path(dst)
    check_new(dst)
    check_apart(src, dst)
    source = open_source(src)
    sizes = Sizes(
        tp=tp,
        pp=pipeline_model_parallel_size or 1,
        ep=expert_model_parallel_size or 1,
        expert_tp=expert_tensor_parallel_size or (1 if source.config.whole_experts else tp),
    )
    if to == "legacy":
        source.repad(padding(source.config, sizes))
        check_sizes(source.config, sizes)
    total = sum(prod(spec.shape) * source.dtype(name).itemsize for name, spec in source.specs.items())
    needed = legacy_bytes(source, sizes) if to == "legacy" else total
    remove_stale(dst)
    check_space(dst, needed)
    options: dict[str, Any] = {"progress": None if progress is None else _adding_up(progress, total)}
    iteration = source.location.iteration or FIRST_ITERATION
    with naming_full_disk(dst, needed), new_directory(dst) as directory:
        if to == "hf":
            write_hf(source, directory, max_shard_bytes=max_shard_bytes or MAX_SHARD_BYTES, **options)
        else:
            data = directory / iteration_dir(iteration)
            data.mkdir()
            if to == "torch_dist":
                write_dist(source, data, iteration=iteration, **options)
            else:
                write_legacy(source, data, iteration=iteration, sizes=sizes, **options)
            (directory / TRACKER).write_text(f"{iteration}\n")
        copy_companions(source.location, directory)
    return dst


def _check_arguments(to: WritableFormat, given: dict[str, int | None]) -> None:
    for name, value in given.items():
        if value is None:
            continue
        if value < 1:
            raise ValueError(f"{name}={value} is below 1")
        if name == "max_shard_bytes" and to != "hf":
            raise ValueError(f"{name}={value} is for to='hf'; {to} has files of its own")
        if name != "max_shard_bytes" and to == "torch_dist":
            raise ValueError(
                f"{name}={value} says nothing for to='torch_dist': such a checkpoint is loaded at any tensor, pipeline "
                "and expert parallel size; leave it out, or write to='legacy', whose files are cut for one"
            )
        if name != "max_shard_bytes" and to == "hf":
            raise ValueError(f"{name}={value} says nothing for to='hf', whose tensors are whole; leave it out")


def _adding_up(progress: Callable[[int, int], object], total: int) -> Callable[[int], None]:
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return add
