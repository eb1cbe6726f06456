"""Writing Hugging Face checkpoints: ``config.json`` and safetensors, one tensor at a time.

A safetensors file is the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and place of
every tensor, filled up with spaces), and the tensors' values without a gap. So a file is laid out by shapes alone, and
values are written where they belong when their turn comes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_dcp.checkpoint.destination import write_at
from megatron_dcp.checkpoint.families import Row, family_of
from megatron_dcp.checkpoint.files import HF_CONFIG
from megatron_dcp.checkpoint.hf import DTYPES, INDEX, SINGLE
from megatron_dcp.checkpoint.hf_config import config_to_hf
from megatron_dcp.checkpoint.source import Source

MAX_SHARD_BYTES = 5 * 1000**3  # as transformers
_ALIGNMENT = 8
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_Tensor = tuple[str, tuple[int, ...], torch.dtype]


def write_hf(
    source: Source,
    directory: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write ``source`` as a Hugging Face model into ``directory``.

    Args:
        max_shard_bytes: Most bytes of tensors in a file, unless what Megatron packs into one has more. Several files
            get an index.
        progress: Called with the bytes of every tensor of Megatron's that has been written.

    Raises:
        ValueError: No supported family has such models.
    """
    config = source.config
    rows = family_of(config, (source.hf_config or {}).get("model_type")).rows(config)
    hf_config = config_to_hf(config, source.dtype(rows[0].megatron), source.hf_config)
    shards = _plan_shards(source, rows, max_shard_bytes)
    places: dict[str, tuple[Path, int]] = {}
    for number, tensors in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= {tensor: (directory / name, at) for tensor, at in _lay_out(directory / name, tensors).items()}
    for row in rows:
        tensor = source.read(row.megatron)
        for name, part in zip(row.hf, row.transform.unpack(tensor, config), strict=True):
            file, offset = places[name]
            with file.open("r+b") as opened:
                write_at(opened, offset + (row.index or 0) * part.nbytes, part)
        if progress is not None:
            progress(tensor.nbytes)
    if len(shards) > 1:
        total = sum(_nbytes(tensor) for tensors in shards for tensor in tensors)
        weight_map = {name: file.name for name, (file, _) in places.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    # Last: files that are laid out and not filled yet are no model without it.
    (directory / HF_CONFIG).write_text(json.dumps(hf_config, indent=2) + "\n")


def _nbytes(tensor: _Tensor) -> int:
    _, shape, dtype = tensor
    return math.prod(shape) * dtype.itemsize


def _tensors(source: Source, row: Row) -> list[_Tensor]:
    """The tensors that begin with ``row``: none where it is a later slice of one."""
    if row.index:
        return []
    shapes = row.hf_shapes(source.specs[row.megatron].shape, source.config)
    return [(name, shape, source.dtype(row.megatron)) for name, shape in shapes.items()]


def _plan_shards(source: Source, rows: list[Row], max_bytes: int) -> list[list[_Tensor]]:
    """Tensors by file, in the order in which they are read; those of one row stay together."""
    shards: list[list[_Tensor]] = [[]]
    held = 0
    for row in rows:
        tensors = _tensors(source, row)
        size = sum(map(_nbytes, tensors))
        if tensors and shards[-1] and held + size > max_bytes:
            shards.append([])
            held = 0
        shards[-1] += tensors
        held += size
    return shards


def _lay_out(file: Path, tensors: list[_Tensor]) -> dict[str, int]:
    """Write the header of ``file`` and give the file its length; returns at which byte each tensor begins."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    # Larger elements first, so that all are aligned.
    for name, shape, dtype in sorted(tensors, key=lambda tensor: -tensor[2].itemsize):
        starts[name] = end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (starts[name], end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)
    return {name: 8 + len(text) + start for name, start in starts.items()}
