"""Hugging Face checkpoints: ``config.json`` and safetensors, in one file or sharded with an index."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.checkpoint.families import Row, family_of
from megatron_dcp.checkpoint.files import HF_CONFIG, Location
from megatron_dcp.checkpoint.hf_config import config_from_hf, config_to_hf, read_json
from megatron_dcp.checkpoint.source import Source, check_tensors
from megatron_dcp.model_config import ModelConfig

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
MAX_SHARD_BYTES = 5 * 1000**3


def read_hf_config(location: Location) -> ModelConfig:
    """Shape of the model at ``location``, without opening its tensors."""
    return _read_config(location)[0]


class HFSource(Source):
    """A Hugging Face directory, open for reading.

    Raises:
        ValueError: The model is not supported, or its tensors do not fit its configuration.
    """

    def __init__(self, location: Location) -> None:
        config, hf_config = _read_config(location)
        super().__init__(location, config, hf_config)
        rows = family_of(config, hf_config["model_type"]).rows(config)
        self._rows = {row.megatron: row for row in rows}
        self._files = _open_files(location.data)
        expected = {
            name: shape
            for row in rows
            for name, shape in zip(row.hf, row.transform.hf_shapes(self.specs[row.megatron].shape, config), strict=True)
        }
        ignored = _ignored(config, hf_config)
        found = {
            name: tuple(file.get_slice(name).get_shape())
            for name, file in self._files.items()
            if not name.startswith(ignored) and not name.endswith("rotary_emb.inv_freq")
        }
        check_tensors(found, expected, str(location.data))
        for name in found:
            self._dtype(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype(self._rows[name].hf[0])

    def _dtype(self, hf_name: str) -> torch.dtype:
        stored = self._files[hf_name].get_slice(hf_name).get_dtype()
        if stored not in _DTYPES:
            raise ValueError(
                f"{hf_name} in {self.location.data} is stored as {stored}; supported are {', '.join(_DTYPES)}"
            )
        return _DTYPES[stored]

    def _read(self, name: str) -> Tensor:
        row = self._rows[name]
        tensors = [self._files[hf_name].get_tensor(hf_name) for hf_name in row.hf]
        if len({tensor.dtype for tensor in tensors}) > 1:
            kinds = ", ".join(f"{n}: {t.dtype}" for n, t in zip(row.hf, tensors, strict=True))
            raise ValueError(f"tensors that Megatron packs into one have different dtypes ({kinds}); cast them first")
        return row.transform.pack(tensors, self.config)


def write_hf(
    source: Source,
    directory: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write ``source`` as a Hugging Face model into ``directory``; holds one shard and one tensor in memory.

    Raises:
        ValueError: No supported family has such models.
    """
    from safetensors.torch import save_file

    config = source.config
    rows = family_of(config, (source.hf_config or {}).get("model_type")).rows(config)
    hf_config = config_to_hf(config, source.dtype(rows[0].megatron), source.hf_config)
    (directory / HF_CONFIG).write_text(json.dumps(hf_config, indent=2) + "\n")

    shards = _plan_shards(source, rows, max_shard_bytes)
    weight_map: dict[str, str] = {}
    tensors = _hf_tensors(source, rows, progress)
    for number, names in enumerate(shards, start=1):
        file = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # Views into a packed tensor would share memory, which safetensors refuses.
        held = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in _take(tensors, names)}
        save_file(held, directory / file, metadata={"format": "pt"})
        shutil.copymode(directory / HF_CONFIG, directory / file)  # safetensors lets only the owner read its files
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(_nbytes(source, row) for row in rows)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _read_config(location: Location) -> tuple[ModelConfig, dict[str, Any]]:
    path = location.data / HF_CONFIG
    values = read_json(path)
    generation = location.data / "generation_config.json"
    config, _ = config_from_hf(values, str(path), generation=read_json(generation) if generation.is_file() else None)
    return config, values


def _ignored(config: ModelConfig, hf_config: dict[str, Any]) -> tuple[str, ...]:
    """How names start that are no part of the model: a tied head, and layers that only predict further tokens."""
    further = range(config.num_layers, config.num_layers + (hf_config.get("num_nextn_predict_layers") or 0))
    tied = () if config.untie_embeddings_and_output_weights else ("lm_head.weight",)
    return (*tied, *(f"model.layers.{layer}." for layer in further))


def _open_files(directory: Path) -> dict[str, Any]:
    """The open safetensors file of every tensor; opening reads a file's header and checks its length."""
    from safetensors import SafetensorError, safe_open

    if (directory / _INDEX).is_file():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{directory / _INDEX} has no weight_map")
        names = sorted(set(weight_map.values()))
    elif (directory / _SINGLE).is_file():
        weight_map, names = None, [_SINGLE]
    else:
        old = " It has weights in PyTorch's old format: save them with safe_serialization=True." * bool(
            list(directory.glob("pytorch_model*.bin"))
        )
        raise ValueError(f"{str(directory)!r} has neither {_SINGLE} nor {_INDEX}: the checkpoint is incomplete.{old}")
    files = {}
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{directory / _INDEX} names {name!r}, which is not a file beside it")
        try:
            files[name] = safe_open(directory / name, framework="pt", device="cpu")
        except FileNotFoundError as error:
            raise ValueError(f"{directory / name} is missing: the checkpoint is incomplete") from error
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{directory / name} is truncated or no safetensors file: {error}") from error
    found = {tensor: file for file in files.values() for tensor in file.keys()}  # noqa: SIM118
    for name, file in (weight_map or {}).items():
        if name not in found:
            raise ValueError(f"{directory / _INDEX} lists {name}, but {file} does not hold it")
    return found


def _nbytes(source: Source, row: Row) -> int:
    shapes = row.transform.hf_shapes(source.specs[row.megatron].shape, source.config)
    return sum(math.prod(shape) for shape in shapes) * source.dtype(row.megatron).itemsize


def _plan_shards(source: Source, rows: list[Row], max_bytes: int) -> list[list[str]]:
    """Hugging Face names by file, in the order in which the tensors are read."""
    shards: list[list[str]] = [[]]
    held = 0
    for row in rows:
        size = _nbytes(source, row)
        if shards[-1] and held + size > max_bytes:
            shards.append([])
            held = 0
        shards[-1].extend(row.hf)
        held += size
    return shards


def _hf_tensors(
    source: Source, rows: list[Row], progress: Callable[[str], None] | None
) -> Iterator[tuple[str, Tensor]]:
    for row in rows:
        tensor = source.read(row.megatron)
        if progress is not None:
            progress(row.megatron)
        yield from zip(row.hf, row.transform.unpack(tensor, source.config), strict=True)


def _take(tensors: Iterator[tuple[str, Tensor]], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    for expected in names:
        name, tensor = next(tensors)
        assert name == expected
        yield name, tensor
