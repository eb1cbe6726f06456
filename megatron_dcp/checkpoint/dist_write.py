"""Writing Megatron-Core's ``torch_dist`` format from a `Source`: one process, no groups, no Megatron.

The result is what Megatron-Core itself would save for such a model: its ``dist_checkpointing.load`` reads it at any
tensor, pipeline and expert parallel size. Tensors are read while they are written, one at a time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_dcp.checkpoint.arguments import args_from_config
from megatron_dcp.checkpoint.destination import QuietFile
from megatron_dcp.checkpoint.dist import COMMON
from megatron_dcp.checkpoint.dist_keys import EMBEDDING, extra_state_keys, places
from megatron_dcp.checkpoint.source import CHECKPOINT_VERSION, Source


def common_state(source: Source, iteration: int) -> dict[str, Any]:
    """What both Megatron formats hold besides tensors."""
    dtype = source.dtype(EMBEDDING)
    return {
        "args": args_from_config(
            source.config,
            dtype=dtype,
            iteration=iteration,
            hf_config=source.hf_config,
            has_tokenizer=source.location.tokenizer_dir is not None,
        ),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
    }


def write_dist(
    source: Source, directory: Path, *, iteration: int, progress: Callable[[int], None] | None = None
) -> None:
    """Write ``source`` into ``directory``, the directory of one iteration."""
    torch.save(common_state(source, iteration), directory / COMMON)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner, failure = _StreamingPlanner(source, progress), None
        try:
            save({}, storage_writer=Writer(directory, thread_count=1), planner=planner, no_dist=True)
        except CheckpointException as error:  # torch wraps all that its steps raise, even Ctrl-C
            failure, _ = next(iter(error.failures.values()))
        if failure is not None:
            raise failure
    # Last, as Megatron does: without this file a checkpoint counts as unfinished.
    (directory / "metadata.json").write_text(
        json.dumps(
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        )
    )


class Writer(FileSystemWriter):
    """torch's writer, which does not note the directory that it writes to: the checkpoint is renamed afterwards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fs = _QuietFiles()

    def storage_meta(self) -> None:
        return None


class _QuietFiles(FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield QuietFile(stream) if "w" in mode else stream  # type: ignore[arg-type]


class _StreamingPlanner(DefaultSavePlanner):
    """Plans the source's tensors by shape, and reads each one when its turn to be written comes.

    Tensors that lie in a stack (of layers, of experts) are pieces of one tensor of the checkpoint.
    """

    def __init__(self, source: Source, progress: Callable[[int], None] | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._source = source
        self._progress = progress
        self._names: dict[MetadataIndex, str] = {}
        self._seen: set[str] = set()

    def create_local_plan(self) -> SavePlan:
        config, specs = self._source.config, self._source.specs
        items = [_object_item(key) for key in extra_state_keys(specs, config)]
        for name, spec in specs.items():
            for place in places(name, config):
                offsets = torch.Size([*place.index, *[0] * len(spec.shape)])
                index = MetadataIndex(place.key, offsets)
                self._names[index] = name
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, torch.Size([*[1] * len(place.stack), *spec.shape])),
                    properties=TensorProperties(dtype=self._source.dtype(name)),
                    size=torch.Size([*place.stack, *spec.shape]),
                )
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return _empty_object()
        name = self._names[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        assert write_item.tensor_data is not None
        tensor = self._source.read(name).contiguous().view(write_item.tensor_data.chunk.sizes)
        if self._progress is not None and name not in self._seen:
            self._progress(tensor.nbytes)
        self._seen.add(name)
        return tensor


def _object_item(key: str) -> WriteItem:
    data = BytesIOWriteData(nbytes=_empty_object().getbuffer().nbytes)
    return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO, bytes_io_data=data)


def _empty_object() -> io.BytesIO:
    """How Megatron saves an object that is ``None``."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    return buffer
