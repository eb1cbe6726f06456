"""Reading Megatron-Core's ``torch_dist`` format.

Read without process groups and without Megatron: ``.metadata`` says which file holds which box of which tensor, and
exactly the boxes that are asked for are read. Optimizer states are other tensors of the same files; they are never
touched. The arguments lie in ``common.pt`` (Megatron-Core 0.16) or in an object of the checkpoint itself (0.19).
"""

from __future__ import annotations

import io
import json
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_dcp.checkpoint.arguments import config_from_args
from megatron_dcp.checkpoint.dist_keys import find_tensors
from megatron_dcp.checkpoint.files import Location
from megatron_dcp.checkpoint.names import shard_ranges
from megatron_dcp.checkpoint.safe import load_metadata, load_torch
from megatron_dcp.checkpoint.source import CHECKPOINT_VERSION, Source, check_tensors, check_version
from megatron_dcp.model_config import ModelConfig

COMMON = "common.pt"
COMMON_KEY = "common_state/shard_0_1"


class DistSource(Source):
    """A ``torch_dist`` checkpoint, open for reading.

    Raises:
        ValueError: It is incomplete or truncated, names classes that are not read, or does not fit its arguments.
    """

    def __init__(self, location: Location, reader: Reader | None = None) -> None:
        self._reader = Reader(location.data) if reader is None else reader
        args, config = read_args(location, self._reader)
        super().__init__(location, config, getattr(args, "hf_config", None))
        metadata = self._reader.metadata
        self._sizes: dict[str, tuple[int, ...]] = {
            key: tuple(stored.size)
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._stored = find_tensors(self._sizes, config, str(location.data))
        found = {name: self._stored_shape(name) for name in self._stored}
        vocab = {name: config.vocab_size for name, spec in self.specs.items() if spec.vocab}
        expected = {name: spec.shape for name, spec in self.specs.items()}
        check_tensors(found, expected, str(location.data), min_rows=vocab)
        self._reader.check_files({key for stored in self._stored.values() for key in stored.keys})

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.tensor(self._stored[name].keys[0]).properties.dtype

    def _read(self, name: str) -> Tensor:
        stored = self._stored[name]
        parts = []
        for key in stored.keys:
            shape = self._part_shape(name, key)
            parts.append(self._read_box(key, stored.index, [0] * len(shape), shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_shard(self, name: str, tp: int, rank: int) -> Tensor:
        spec, stored = self.specs[name], self._stored[name]
        # Padding may differ from what is stored, and halves lie under two keys: both are cut from the whole.
        if spec.tp_dim is None or tp == 1 or spec.vocab or len(stored.keys) > 1:
            return super().read_shard(name, tp, rank)
        boxes = []
        for start, length in shard_ranges(spec, tp, rank):
            offsets, sizes = [0] * len(spec.shape), list(spec.shape)
            offsets[spec.tp_dim], sizes[spec.tp_dim] = start, length
            boxes.append(self._read_box(stored.keys[0], stored.index, offsets, sizes))
        return boxes[0] if len(boxes) == 1 else torch.cat(boxes, dim=spec.tp_dim)

    def _part_shape(self, name: str, key: str) -> list[int]:
        return list(self._sizes[key][len(self._stored[name].index) :])

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        first, *others = [self._part_shape(name, key) for key in self._stored[name].keys]
        return tuple(first) if not others else (first[0] + sum(shape[0] for shape in others), *first[1:])

    def _read_box(self, key: str, index: tuple[int, ...], offsets: list[int], sizes: list[int]) -> Tensor:
        return self._reader.read(key, [*index, *offsets], [1] * len(index) + sizes).view(sizes)


def read_dist_config(location: Location) -> ModelConfig:
    """Shape of the model at ``location``, without looking at its tensors."""
    return read_args(location, Reader(location.data))[1]


def read_common(location: Location) -> dict[str, Any]:
    """What a ``torch_dist`` checkpoint holds besides tensors: ``args``, ``iteration`` and so on."""
    return Reader(location.data).common()


class Reader(FileSystemReader):
    """torch's reader, with its metadata read safely and only once."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory
        self.check_format()
        self.metadata: Metadata = load_metadata(directory / ".metadata")
        if not isinstance(self.metadata, Metadata) or not isinstance(self.metadata.storage_data, dict):
            raise ValueError(f"{directory / '.metadata'} holds no checkpoint metadata")
        self.set_up_storage_reader(self.metadata, is_coordinator=True)
        self._pieces: dict[str, list[Any]] = {}
        for index, info in self.metadata.storage_data.items():
            self._pieces.setdefault(index.fqn, []).append(info)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def check_format(self) -> None:
        """Raise ``ValueError`` unless Megatron has finished writing here, in a version that is known."""
        path = self._directory / "metadata.json"
        try:
            values = json.loads(path.read_text())
            backend, version = values["sharded_backend"], values.get("sharded_backend_version", 1)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is truncated or no checkpoint configuration: {error}") from error
        if backend != "torch_dist":
            raise ValueError(f"{path} names sharded_backend={backend!r}; supported is 'torch_dist'")
        if version != 1:
            raise ValueError(
                f"{path} names sharded_backend_version={version!r}; supported is 1: the checkpoint is newer than "
                "megatron-dcp. Update that, or save it with an older Megatron-Core (0.16 to 0.19)"
            )

    def common(self) -> dict[str, Any]:
        """The state that all ranks share."""
        if (self._directory / COMMON).is_file() or COMMON_KEY not in self.metadata.state_dict_metadata:
            common = load_torch(self._directory / COMMON)
        else:
            common = self.read_object(COMMON_KEY)[0]
        if not isinstance(common, dict):
            raise ValueError(f"the common state of {self._directory} is a {type(common).__name__}, not a dict")
        return common

    def read_object(self, key: str) -> Any:
        """What lies under ``key`` and is no tensor, read with weights-only safety."""
        self.check_files({key})
        (piece,) = self._pieces[key]
        with (self._directory / piece.relative_path).open("rb") as file:
            file.seek(piece.offset)
            return load_torch(self._directory / piece.relative_path, content=file.read(piece.length))

    def check_files(self, keys: set[str]) -> None:
        """Raise ``ValueError`` unless every file that holds a piece of ``keys`` is there and long enough."""
        ends: dict[str, int] = {}
        for key in keys:
            for piece in self._pieces.get(key, ()):
                name = piece.relative_path
                if Path(name).name != name:
                    raise ValueError(f"{self._directory / '.metadata'} names {name!r}, which is not a file beside it")
                ends[name] = max(ends.get(name, 0), piece.offset + piece.length)
        for name, end in sorted(ends.items()):
            path = self._directory / name
            if not path.is_file():
                raise ValueError(f"{path} is missing: the checkpoint is incomplete")
            size = path.stat().st_size
            if size < end:
                raise ValueError(
                    f"{path} is truncated: it has {size} bytes, its metadata asks for {end}; copy it again"
                )

    def tensor(self, key: str) -> TensorStorageMetadata:
        """Size, dtype and pieces of a tensor."""
        stored = self.metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata), key
        return stored

    def read(self, key: str, offsets: list[int], sizes: list[int]) -> Tensor:
        """The box of tensor ``key`` that starts at ``offsets``."""
        stored = self.tensor(key)
        box = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, stored, [box])
        if sum(math.prod(item.lengths) for item in items) != math.prod(sizes):
            raise ValueError(f"{self._directory / '.metadata'} does not say where all of {key} lies")
        out = torch.empty(sizes, dtype=stored.properties.dtype)
        try:
            self.read_data(LoadPlan(items), _IntoBox(out)).wait()  # type: ignore[arg-type]
        except (RuntimeError, EOFError, OSError, AssertionError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{key} cannot be read from {self._directory}, its bytes are damaged: {str(error).splitlines()[0]}"
            ) from error
        return out


class _IntoBox:
    """The part of a load planner that `FileSystemReader.read_data` talks to: everything goes into one tensor."""

    def __init__(self, out: Tensor) -> None:
        self._out = out

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        view = self._out
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        pass

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a tensor was asked for")


def read_args(location: Location, reader: Reader) -> tuple[Any, ModelConfig]:
    common = reader.common()
    args = common.get("args")
    if args is not None:
        check_version(common.get("checkpoint_version", CHECKPOINT_VERSION), str(location.data))
    return args, config_from_args(args, str(location.data))
