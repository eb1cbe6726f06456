"""Writing Megatron-Core's ``torch_dist`` format from a `Source`: one process, no groups, no Megatron.

The result is what Megatron-Core itself would save for such a model: its ``dist_checkpointing.load`` reads it at any
tensor and pipeline parallel size. Tensors are read while they are written, one at a time.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_dcp.checkpoint.arguments import args_from_config
from megatron_dcp.checkpoint.dist import COMMON
from megatron_dcp.checkpoint.names import fused_name, split_layer_name
from megatron_dcp.checkpoint.source import Source

CHECKPOINT_VERSION = 3.0

# Modules for which Megatron also loads an (empty) extra state: with its own layers the linear ones, with
# TransformerEngine's layers all of them. It refuses to load a checkpoint that lacks one.
_EXTRA_STATES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_QK_NORM_EXTRA_STATES = ("self_attention.q_layernorm", "self_attention.k_layernorm")


def common_state(source: Source, iteration: int) -> dict[str, Any]:
    """What both Megatron formats hold besides tensors."""
    dtype = source.dtype("embedding.word_embeddings.weight")
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
    source: Source, directory: Path, *, iteration: int, progress: Callable[[str], None] | None = None
) -> None:
    """Write ``source`` into ``directory``, the directory of one iteration."""
    torch.save(common_state(source, iteration), directory / COMMON)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner = _StreamingPlanner(source, progress)
        try:
            save({}, storage_writer=Writer(directory, thread_count=1), planner=planner, no_dist=True)
        except CheckpointException as error:  # torch wraps all that its steps raise, even Ctrl-C
            cause, _ = next(iter(error.failures.values()))
            raise cause from None
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

    def storage_meta(self) -> None:
        return None


class _StreamingPlanner(DefaultSavePlanner):
    """Plans the source's tensors by shape, and reads each one when its turn to be written comes.

    The tensors of all layers form one tensor of the checkpoint with the layer as its first dimension, as Megatron
    does; every layer is one piece of it.
    """

    def __init__(self, source: Source, progress: Callable[[str], None] | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._source = source
        self._progress = progress
        self._names: dict[MetadataIndex, str] = {}

    def create_local_plan(self) -> SavePlan:
        layers = self._source.config.num_layers
        items = [_object_item(key) for key in _extra_state_keys(layers, self._source.config.qk_layernorm)]
        for name, spec in self._source.specs.items():
            layer, rest = split_layer_name(name)
            if layer is None:
                key, size, offsets, sizes = name, spec.shape, [0] * len(spec.shape), spec.shape
            else:
                key, size = f"decoder.layers.{fused_name(rest)}", (layers, *spec.shape)
                offsets, sizes = [layer, *[0] * len(spec.shape)], (1, *spec.shape)
            index = MetadataIndex(key, torch.Size(offsets))
            self._names[index] = name
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
                properties=TensorProperties(dtype=self._source.dtype(name)),
                size=torch.Size(size),
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
        if self._progress is not None:
            self._progress(name)
        return tensor


def _extra_state_keys(layers: int, qk_layernorm: bool) -> list[str]:
    """Unique keys of the extra states: the module's name, the layer's place among all layers."""
    modules = _EXTRA_STATES + (_QK_NORM_EXTRA_STATES if qk_layernorm else ())
    keys = [f"decoder.layers.{module}._extra_state/shard_{i}_{layers}" for i in range(layers) for module in modules]
    return [*keys, "decoder.final_layernorm._extra_state/shard_0_1"]


def _object_item(key: str) -> WriteItem:
    data = BytesIOWriteData(nbytes=_empty_object().getbuffer().nbytes)
    return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO, bytes_io_data=data)


def _empty_object() -> io.BytesIO:
    """How Megatron saves an object that is ``None``."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    return buffer
