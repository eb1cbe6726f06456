"""How the Hugging Face tensors of one row are packed into Megatron's one tensor. Only moves numbers: bit-exact."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from megatron_dcp.checkpoint.names import fit_vocab
from megatron_dcp.model_config import ModelConfig

Shape = tuple[int, ...]


class Transform(ABC):
    """Packs the tensors of a row into Megatron's tensor of ``shape``."""

    @abstractmethod
    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]: ...

    @abstractmethod
    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor: ...

    @abstractmethod
    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]: ...


class Same(Transform):
    """One tensor, as it is."""

    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]:
        return [shape]

    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor:
        return tensors[0]

    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        return [tensor]


class Vocabulary(Transform):
    """Rows that only pad the vocabulary are added and taken away."""

    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]:
        return [(config.vocab_size, *shape[1:])]

    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor:
        return fit_vocab(tensors[0], config.vocab_size, config.padded_vocab_size)

    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        return [tensor[: config.vocab_size]]


class QKV(Transform):
    """q, k, v of all heads, interleaved per KV group: the group's query heads, its k, its v."""

    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]:
        queries = config.num_attention_heads * config.kv_channels
        keys = config.num_query_groups * config.kv_channels
        return [(queries, *shape[1:]), (keys, *shape[1:]), (keys, *shape[1:])]

    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor:
        grouped = [t.unflatten(0, (config.num_query_groups, -1)) for t in tensors]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        grouped = tensor.unflatten(0, (config.num_query_groups, -1))
        head = config.kv_channels
        q, k, v = grouped.split((grouped.shape[1] - 2 * head, head, head), dim=1)
        return [q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)]


class Transposed(Transform):
    """One matrix, its dimensions the other way round."""

    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]:
        return [shape[::-1]]

    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor:
        return tensors[0].t()

    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        return [tensor.t()]


class GateUp(Transform):
    """The two first matrices of a gated MLP, one below the other."""

    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]:
        return [(shape[0] // 2, *shape[1:])] * 2

    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor:
        return torch.cat(tensors)

    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        return list(tensor.chunk(2))


class AlternatingGateUp(Transform):
    """The same two in one tensor, whose last dimension is Megatron's first, gate and up by turns; also their biases."""

    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]:
        return [shape[::-1]]

    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor:
        pairs = tensors[0].unflatten(-1, (-1, 2))
        return pairs.permute(*reversed(range(pairs.dim()))).flatten(0, 1)

    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        halves = tensor.unflatten(0, (2, -1))
        return [halves.permute(*reversed(range(halves.dim()))).flatten(-2)]
