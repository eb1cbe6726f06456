"""What all formats have in common once a checkpoint is open: a shape, and whole tensors, one at a time.

Converting is reading this neutral form and writing it again; loading is reading it shard by shard. A format is a
subclass of `Source` and a function that writes one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.checkpoint.files import Location
from megatron_dcp.checkpoint.names import fit_vocab, shard
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.model_tensors import TensorSpec, model_tensors

# What Megatron-LM writes today; it says how rows of query, key and value are ordered.
CHECKPOINT_VERSION = 3.0
_SHOWN = 3
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Source(ABC):
    """An open checkpoint whose tensors have all been found, with the right shapes; none has been read.

    Attributes:
        config: Shape of the model.
        specs: Every tensor by its Megatron name.
        hf_config: The ``config.json`` that the model came with, as far as known.
    """

    def __init__(self, location: Location, config: ModelConfig, hf_config: dict[str, Any] | None = None) -> None:
        self.location = location
        self.config = config
        self.specs: dict[str, TensorSpec] = model_tensors(config)
        self.hf_config = hf_config

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """dtype that the tensor is stored in."""

    @abstractmethod
    def _read(self, name: str) -> Tensor:
        """The whole tensor as stored; its vocabulary padded in any way or not."""

    def read(self, name: str) -> Tensor:
        """The whole tensor on the CPU, in its stored dtype; rows that pad the vocabulary are zero."""
        tensor, spec = self._read(name), self.specs[name]
        if spec.vocab:
            tensor = fit_vocab(tensor, self.config.vocab_size, spec.shape[0])
        assert tensor.shape == spec.shape, (name, tensor.shape, spec.shape)
        return tensor

    def read_shard(self, name: str, tp: int, rank: int) -> Tensor:
        """What ``rank`` of ``tp`` tensor parallel ranks holds of `read`'s tensor."""
        return shard(self.read(name), self.specs[name], tp, rank)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every one, in the order of the forward pass, read one at a time."""
        return ((name, self.read(name)) for name in self.specs)

    def check_dtypes(self) -> None:
        """Raise ``ValueError`` naming a tensor that is not stored in floating point."""
        for name in self.specs:
            if (dtype := self.dtype(name)) not in FLOATS:
                raise ValueError(
                    f"{name} in {self.location.data} is stored as {dtype}; supported are "
                    f"{', '.join(map(str, FLOATS))}: cast it first"
                )

    def repad(self, padded: int) -> None:
        """Pad the vocabulary to ``padded`` rows from now on."""
        self.config = replace(self.config, padded_vocab_size=padded)
        self.specs = model_tensors(self.config)


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    where: str,
    *,
    min_rows: Mapping[str, int] | None = None,
) -> None:
    """Raise ``ValueError`` unless the tensors that are there are those that the model's shape asks for.

    Args:
        found: Shape by name.
        expected: Shape by name.
        where: The checkpoint, for messages.
        min_rows: Tensors that may have any number of rows from the given one on: a padded vocabulary.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise ValueError(
            f"{where} lacks {_list(missing)}, which its own configuration asks for: the checkpoint is "
            "incomplete, or its configuration belongs to another model"
        )
    extra = [name for name in found if name not in expected]
    if extra:
        raise ValueError(
            f"{where} holds {_list(extra)}, which its own configuration has no place for: the model has parts "
            "that are not supported, or its configuration belongs to another model"
        )
    for name in expected:
        shape, rows = found[name], (min_rows or {}).get(name)
        if rows is not None and shape[1:] == expected[name][1:] and shape[0] >= rows:
            continue
        if tuple(shape) != tuple(expected[name]):
            wanted = f"at least {rows} rows of {expected[name][1:]}" if rows is not None else f"{expected[name]}"
            raise ValueError(
                f"{name} in {where} has shape {tuple(shape)}, but the checkpoint's configuration asks for {wanted}: "
                "one of the two belongs to another model"
            )


def check_version(version: Any, where: str) -> None:
    """Raise ``ValueError`` unless tensors mean today what they meant for ``checkpoint_version=version``."""
    if version == CHECKPOINT_VERSION:
        return
    if isinstance(version, int | float) and version < CHECKPOINT_VERSION:
        raise ValueError(
            f"{where} has checkpoint_version={version}, whose order of query, key and value rows differs; supported is "
            f"{CHECKPOINT_VERSION}: load and save it once with Megatron-LM"
        )
    raise ValueError(
        f"{where} has checkpoint_version={version!r}, which is newer than {CHECKPOINT_VERSION}, the one that is known: "
        "update megatron-dcp, or save the checkpoint with an older Megatron-LM"
    )


def _list(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
