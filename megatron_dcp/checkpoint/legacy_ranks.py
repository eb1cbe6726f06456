"""The ranks of Megatron's legacy format: which files there are, and which tensors lie in each.

A rank's directory is ``mp_rank_TT``, with ``_PPP`` where there are pipeline stages and ``_EEE`` where experts are dealt
out. Ranks that only data parallelism tells apart hold the same, so one of them has written the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_dcp.checkpoint.names import global_expert_name, shard_ranges, split_layer_name
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.model_tensors import TensorSpec, layer_name, padded_vocab_size

FILE = "model_optim_rng.pt"
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_DIRECTORY = re.compile(r"^mp_rank_(\d{2,})((?:_\d{3,}){0,2})$")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


class Rank(NamedTuple):
    """Tensor, pipeline and expert parallel rank."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parallel sizes that a legacy checkpoint is cut for.

    Raises:
        ValueError: ``expert_tp`` does not divide ``tp``: the files of such ranks have no names.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    expert_tp: int = 1

    def __post_init__(self) -> None:
        if self.tp % self.expert_tp:
            raise ValueError(
                f"expert_tensor_parallel_size={self.expert_tp} does not divide tensor_model_parallel_size={self.tp}; "
                "in Megatron's legacy format ranks that differ in the former alone share a file name. Use a divisor, "
                "or torch_dist"
            )

    def __str__(self) -> str:
        return f"tp {self.tp}, pp {self.pp}, ep {self.ep}, expert tp {self.expert_tp}"

    def directory(self, rank: Rank) -> str:
        """Megatron-LM's name of the rank's directory."""
        pipeline = f"_{rank.pp:03d}" if self.pp > 1 else ""
        return f"mp_rank_{rank.tp:02d}{pipeline}" + (f"_{rank.ep:03d}" if self.ep > 1 else "")

    def ranks(self) -> list[Rank]:
        """Those that have a file.

        Global rank ``r`` of a stage is ``r % tp`` in its tensor, ``r // expert_tp % ep`` in its expert parallel group;
        where experts are cut less than the rest, not every pair occurs.
        """
        step = math.gcd(self.tp // self.expert_tp, self.ep)
        return [
            Rank(tp, pp, ep)
            for pp in range(self.pp)
            for tp in range(self.tp)
            for ep in range(self.ep)
            if (ep - tp // self.expert_tp) % step == 0
        ]

    def cut(self, spec: TensorSpec, rank: Rank) -> tuple[int, int]:
        """Into how many shards a tensor is cut, and which of them ``rank`` holds."""
        return (self.expert_tp, rank.tp % self.expert_tp) if spec.expert else (self.tp, rank.tp)


def check_sizes(config: ModelConfig, sizes: Sizes) -> None:
    """Raise ``ValueError`` naming the legal sizes unless the model can be cut for them; its vocabulary is padded."""
    config.check_tensor_parallel(sizes.tp)
    config.check_pipeline_parallel(sizes.pp)
    if config.moe is None and sizes.ep > 1:
        raise ValueError(f"expert_model_parallel_size={sizes.ep}, but the model has no experts; use 1")
    # As many ranks as the experts may take: each of them can be a data parallel rank.
    experts = 1 if config.moe is None else config.moe.num_experts
    config.check_expert_parallel(sizes.ep, sizes.expert_tp, ranks=sizes.tp * experts)


def padding(config: ModelConfig, sizes: Sizes) -> int:
    """Rows that Megatron-LM gives the embedding of this model at these sizes."""
    return padded_vocab_size(config.vocab_size, sizes.tp)


def parse_directory(name: str) -> tuple[int, ...] | None:
    """The numbers in a rank's directory name, tensor parallel rank first; ``None``: it is no such name."""
    match = _DIRECTORY.match(name)
    return (int(match[1]), *map(int, filter(None, match[2].split("_")))) if match else None


def sizes_from_args(args: Any, numbers: list[tuple[int, ...]], config: ModelConfig) -> Sizes:
    """The sizes that Megatron-LM's ``args`` say, or that the numbers in the directories' names do."""
    values = dict(args) if isinstance(args, dict) else vars(args)
    last = [max(each) + 1 for each in zip(*numbers, strict=False)]

    def size(name: str, position: int) -> int:
        return values.get(name) or (last[position] if position < len(last) else 1)

    tp = size("tensor_model_parallel_size", 0)
    pp = size("pipeline_model_parallel_size", 1)
    ep = values.get("expert_model_parallel_size") or (last[2] if len(last) > 2 else 1)
    expert_tp = values.get("expert_tensor_parallel_size") if config.moe is not None else None
    return Sizes(tp=tp, pp=pp, ep=ep, expert_tp=expert_tp or tp)


def names_of_rank(
    config: ModelConfig, specs: dict[str, TensorSpec], rank: Rank, sizes: Sizes, layers: range
) -> Iterator[str]:
    """The tensors that ``rank`` holds, by their names in the whole model.

    Args:
        layers: Those of its stage, or of the part of its stage that is meant.
    """
    per_rank = config.moe.num_experts // sizes.ep if config.moe is not None else 1
    for name in specs:
        layer, rest = split_layer_name(name)
        if layer is None:
            first, last = rank.pp == 0, rank.pp == sizes.pp - 1
            if (first and layers.start == 0) if name == EMBEDDING else (last and layers.stop == config.num_layers):
                yield name
            continue
        expert = _EXPERT.search(rest)
        if layer in layers and (expert is None or int(expert[1]) // per_rank == rank.ep):
            yield name


def own_name(name: str, rank: Rank, sizes: Sizes, config: ModelConfig, first_layer: int) -> str:
    """What the rank itself calls the tensor ``name``: its layers and experts are numbered from 0."""
    layer, rest = split_layer_name(name)
    if layer is None:
        return name
    per_rank = config.moe.num_experts // sizes.ep if config.moe is not None else 0
    return global_expert_name(layer_name(layer - first_layer, rest), -per_rank * rank.ep)


def shard_shape(spec: TensorSpec, count: int) -> tuple[int, ...]:
    """Shape of one of ``count`` shards.

    Raises:
        ValueError: The tensor cannot be cut into so many.
    """
    if spec.tp_dim is None:
        return spec.shape
    if spec.shape[spec.tp_dim] % (count * spec.parts):
        raise ValueError(f"a tensor of shape {spec.shape} cannot have been cut for {count} tensor parallel ranks")
    length = sum(size for _, size in shard_ranges(spec, count, 0))
    return tuple(length if dim == spec.tp_dim else size for dim, size in enumerate(spec.shape))
