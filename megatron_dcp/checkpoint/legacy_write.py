"""Writing Megatron's legacy format for any tensor, pipeline and expert parallel size, one tensor at a time.

Every rank's file is laid out first, with room where tensors will lie; then each tensor of the model is read once, and
its shards are written into the files of the ranks that hold them.
"""

from __future__ import annotations

import math
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_dcp.checkpoint.destination import QuietFile, write_at
from megatron_dcp.checkpoint.dist_write import common_state
from megatron_dcp.checkpoint.legacy_ranks import (
    EMBEDDING,
    FILE,
    OUTPUT,
    Rank,
    Sizes,
    names_of_rank,
    own_name,
    shard_shape,
)
from megatron_dcp.checkpoint.names import shard
from megatron_dcp.checkpoint.source import Source

_LOCAL_HEADER = 30  # bytes of a zip file's header of one member, before its name


def write_legacy(
    source: Source,
    directory: Path,
    *,
    iteration: int,
    sizes: Sizes,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write ``source`` into ``directory``, the directory of one iteration.

    The names are those of Megatron's own layers (``--transformer-impl local``), the vocabulary is padded as the
    source's is. The checksums of a file's members are left out, as ``torch.load`` has no use for them.
    """
    common = common_state(source, iteration)
    _set_sizes(common["args"], sizes)
    places: dict[str, list[tuple[Path, int, int, int]]] = {name: [] for name in source.specs}
    for rank in sizes.ranks():
        file = directory / sizes.directory(rank) / FILE
        file.parent.mkdir()
        held = _names(source, rank, sizes)
        offsets = _lay_out(file, common, source, held, rank, sizes)
        for name, offset in zip(held.values(), offsets, strict=True):
            places[name].append((file, offset, *sizes.cut(source.specs[name], rank)))
    for name, tensor in source.tensors():
        for file, offset, count, index in places[name]:
            with file.open("r+b") as opened:
                write_at(opened, offset, shard(tensor, source.specs[name], count, index))
        if progress is not None:
            progress(tensor.nbytes)


def legacy_bytes(source: Source, sizes: Sizes) -> int:
    """Bytes of all tensors in all files: what several ranks hold counts several times."""
    return sum(
        math.prod(shard_shape(source.specs[name], sizes.cut(source.specs[name], rank)[0])) * source.dtype(name).itemsize
        for rank in sizes.ranks()
        for name in _names(source, rank, sizes).values()
    )


def _set_sizes(args: Namespace, sizes: Sizes) -> None:
    args.tensor_model_parallel_size = sizes.tp
    args.pipeline_model_parallel_size = sizes.pp
    args.expert_model_parallel_size = sizes.ep
    args.expert_tensor_parallel_size = sizes.expert_tp


def _names(source: Source, rank: Rank, sizes: Sizes) -> dict[str, str]:
    """What ``rank`` holds: the names in the whole model by its own names."""
    config = source.config
    per_stage = config.num_layers // sizes.pp
    layers = range(rank.pp * per_stage, (rank.pp + 1) * per_stage)
    held = {
        own_name(name, rank, sizes, config, layers.start): name
        for name in names_of_rank(config, source.specs, rank, sizes, layers)
    }
    if sizes.pp > 1 and rank.pp == sizes.pp - 1 and not config.untie_embeddings_and_output_weights:
        held[OUTPUT] = EMBEDDING  # the last stage has a copy of its own
    return held


def _lay_out(
    file: Path, common: dict[str, Any], source: Source, held: dict[str, str], rank: Rank, sizes: Sizes
) -> list[int]:
    """Write ``file`` with zeros (a hole) for every tensor; returns at which byte each begins."""
    model: dict[str, Any] = {}
    shapes = []
    for own, name in held.items():
        spec = source.specs[name]
        shapes.append((shard_shape(spec, sizes.cut(spec, rank)[0]), source.dtype(name)))
        model[own] = torch.empty(shapes[-1][0], dtype=shapes[-1][1])  # never touched, so it takes no memory
        if own.endswith(".weight") and own.split(".")[-2].startswith(("linear_", "output_layer")):
            model[own.removesuffix("weight") + "_extra_state"] = None  # as these layers have it
    with torch.serialization.skip_data(), file.open("wb") as opened:
        quiet = QuietFile(opened)
        torch.save(common | {"model": model}, quiet)
        quiet.check()
    offsets = []
    with zipfile.ZipFile(file) as members, file.open("rb") as opened:
        root = members.namelist()[0].partition("/")[0]
        for number, (shape, dtype) in enumerate(shapes):  # torch numbers tensors in the order of the dictionary
            member = members.getinfo(f"{root}/data/{number}")
            assert member.file_size == math.prod(shape) * dtype.itemsize, (file, number)
            opened.seek(member.header_offset)
            header = opened.read(_LOCAL_HEADER)
            extra = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))  # name, extra field
            offsets.append(member.header_offset + _LOCAL_HEADER + extra)
    return offsets
