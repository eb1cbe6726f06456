"""Reading Megatron's legacy format: one ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` per model parallel rank.

Files are mapped, not read: tensors come in when they are used, the optimizer's never.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.checkpoint.arguments import config_from_args
from megatron_dcp.checkpoint.dist_keys import grouped_expert_name
from megatron_dcp.checkpoint.files import Location
from megatron_dcp.checkpoint.legacy_ranks import (
    FILE,
    OUTPUT,
    Rank,
    Sizes,
    names_of_rank,
    parse_directory,
    shard_shape,
    sizes_from_args,
)
from megatron_dcp.checkpoint.mapped import MappedFiles
from megatron_dcp.checkpoint.names import global_expert_name, join, local_name, split_layer_name
from megatron_dcp.checkpoint.safe import load_torch
from megatron_dcp.checkpoint.source import Source, check_tensors, check_version
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.model_tensors import layer_name


@dataclass(frozen=True)
class _Saved:
    """Where a shard lies: in which file, in which of its models (virtual stages), under which name."""

    file: Path
    model: str
    name: str
    dtype: torch.dtype


class LegacySource(Source):
    """A legacy checkpoint of any tensor, pipeline, virtual pipeline and expert parallel size, open for reading.

    Raises:
        ValueError: It is incomplete or truncated, or does not fit its arguments.
    """

    def __init__(self, location: Location) -> None:
        self._files: MappedFiles[dict[str, Any]] = MappedFiles(_load)
        args, sizes, files = _find_ranks(location.data, self._files)
        first = next(iter(files.values()))
        super().__init__(location, config_from_args(args, str(first)), getattr(args, "hf_config", None))
        self._sizes = sizes
        self._saved: dict[str, dict[int, _Saved]] = {name: {} for name in self.specs}
        firsts = [next(file for rank, file in files.items() if rank.pp == pp) for pp in range(sizes.pp)]
        stages = [list(_models(self._files.get(file), file).values()) for file in firsts]
        layers = _layers(stages, self.config.num_layers, location.data)
        del stages
        for rank, file in files.items():
            models = _models(self._files.get(file), file)
            if len(models) != len(layers):
                raise ValueError(f"{file} has {len(models)} virtual pipeline stages, other ranks have {len(layers)}")
            for (model, tensors), of_stages in zip(models.items(), layers, strict=True):
                self._add(rank, file, model, tensors, of_stages[rank.pp])
            del models
            self._files.close()  # where everything lies is enough for now

    def _add(self, rank: Rank, file: Path, model: str, tensors: dict[str, Tensor], layers: range) -> None:
        """Note the tensors of one model of one file, after checking them."""
        config = self.config
        per_rank = config.moe.num_experts // self._sizes.ep if config.moe is not None else 0
        found = {}
        for saved, tensor in tensors.items():
            layer, rest = split_layer_name(saved)
            name = saved
            if layer is not None:
                local = local_name(grouped_expert_name(rest) or rest)
                name = global_expert_name(layer_name(layer + layers.start, local), per_rank * rank.ep)
            if name == OUTPUT and self._sizes.pp > 1 and not config.untie_embeddings_and_output_weights:
                continue  # the last stage's copy of the embedding
            found[name] = (saved, tensor)
        expected = {}
        for name in names_of_rank(config, self.specs, rank, self._sizes, layers):
            expected[name] = shard_shape(self.specs[name], self._sizes.cut(self.specs[name], rank)[0])
        where = str(file) if model == "model" else f"{model} in {file}"
        check_tensors({name: tuple(tensor.shape) for name, (_, tensor) in found.items()}, expected, where)
        for name, (saved, tensor) in found.items():
            _, shard = self._sizes.cut(self.specs[name], rank)
            self._saved[name].setdefault(shard, _Saved(file, model, saved, tensor.dtype))

    def dtype(self, name: str) -> torch.dtype:
        return next(iter(self._saved[name].values())).dtype

    def _read(self, name: str) -> Tensor:
        spec, shards = self.specs[name], self._saved[name]
        count = 1 if spec.tp_dim is None else self._sizes.cut(spec, Rank(0, 0, 0))[0]
        tensors = []
        for shard in range(count):
            saved = shards[shard]
            tensors.append(self._files.get(saved.file)[saved.model][saved.name])
        self._files.count(sum(tensor.nbytes for tensor in tensors))
        return join(tensors, spec)


def read_legacy_config(location: Location) -> ModelConfig:
    """Shape of the model at ``location``, without looking at its tensors."""
    args, _, files = _find_ranks(location.data, MappedFiles(_load))
    return config_from_args(args, str(next(iter(files.values()))))


def _find_ranks(data: Path, opened: MappedFiles[dict[str, Any]]) -> tuple[Any, Sizes, dict[Rank, Path]]:
    """``args``, sizes, and the file of every rank that has one.

    Raises:
        ValueError: A file is missing without which the model is not whole.
    """
    names = sorted(path.name for path in data.glob("mp_rank_*"))
    numbers = {name: parse_directory(name) for name in names}
    if wrong := [name for name in names if numbers[name] is None]:
        raise ValueError(f"{data / wrong[0]} is not the directory of a rank as Megatron names them")
    first = data / names[0] / FILE
    if not first.is_file():
        raise ValueError(f"{first} is missing: the checkpoint is incomplete")
    args = opened.get(first).get("args")
    config = config_from_args(args, str(first))  # says it where there are none
    try:
        sizes = sizes_from_args(args, [each for each in numbers.values() if each is not None], config)
    except ValueError as error:
        raise ValueError(f"the args in {first} cannot be followed: {error}") from error
    files = {}
    for rank in [Rank(t, p, e) for p in range(sizes.pp) for t in range(sizes.tp) for e in range(sizes.ep)]:
        file = data / sizes.directory(rank) / FILE
        if file.is_file():
            files[rank] = file
    dense = {(rank.tp, rank.pp) for rank in files}
    experts = {(rank.pp, rank.ep, rank.tp % sizes.expert_tp) for rank in files}
    for rank in sizes.ranks():
        # Another rank's file serves as well, if it holds the same shards.
        found = config.moe is None or (rank.pp, rank.ep, rank.tp % sizes.expert_tp) in experts
        if not found or (rank.tp, rank.pp) not in dense:
            raise ValueError(
                f"{data / sizes.directory(rank) / FILE} is missing: the checkpoint, saved with {sizes}, is incomplete"
            )
    unknown = set(names) - {file.parent.name for file in files.values()}
    if unknown:
        raise ValueError(
            f"{str(data)!r} holds {min(unknown)}, which a checkpoint saved with {sizes} (so its args) does not have: "
            "it belongs to another one"
        )
    return args, sizes, files


def _load(file: Path) -> dict[str, Any]:
    state = load_torch(file, mmap=True)
    if not isinstance(state, dict):
        raise ValueError(f"{file} holds a {type(state).__name__}, not the state of a training")
    check_version(state.get("checkpoint_version", 0), str(file))
    return state


def _models(state: dict[str, Any], file: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors under the names that they were saved with, of every virtual stage."""
    keys = ["model"]
    if "model0" in state:
        keys = [f"model{i}" for i in range(sum(key.removeprefix("model").isdecimal() for key in state))]
    models = {}
    for key in keys:
        model = state.get(key)
        if not isinstance(model, dict):
            raise ValueError(f"{file} cannot be read: there is no {key!r} in it")
        if "language_model" in model:
            raise ValueError(
                f"{file} holds a model from before Megatron-Core ('language_model'); convert it with Megatron-LM's "
                "tools/checkpoint/convert.py first"
            )
        models[key] = dict(_tensors(model, file))
    return models


def _tensors(model: dict[str, Any], file: Path) -> Iterator[tuple[str, Tensor]]:
    for name, value in model.items():
        if not isinstance(name, str):
            raise ValueError(f"{file} cannot be read: {name!r} among its tensors is no name")
        if name.endswith(("mlp.experts.weight1", "mlp.experts.weight2")):
            raise ValueError(
                f"{file} holds {name}: all experts in one tensor (--moe-use-legacy-grouped-gemm), which is not "
                "supported in legacy files; save it as torch_dist with Megatron-LM (--ckpt-convert-format torch_dist)"
            )
        if isinstance(value, Tensor) and not name.endswith("_extra_state"):
            yield name, value


def _layers(stages: list[list[dict[str, Tensor]]], num_layers: int, where: Path) -> list[list[range]]:
    """Layers by virtual stage and stage: counted, as stages may differ; in a virtual stage they go through all stages.

    Args:
        stages: The tensors by stage and virtual stage.
    """
    layers: list[list[range]] = []
    start = 0
    for virtual in range(len(stages[0])):
        layers.append([])
        for stage in stages:
            if len(stage) != len(stages[0]):
                raise ValueError(f"the stages of {where} differ in their number of virtual pipeline stages")
            numbers = [split_layer_name(name)[0] for name in stage[virtual]]
            count = max((number + 1 for number in numbers if number is not None), default=0)
            layers[-1].append(range(start, start + count))
            start += count
    if start != num_layers:
        raise ValueError(
            f"the files of {where} hold {start} layers together, but its args ask for {num_layers}: it is incomplete, "
            "or they belong to another model"
        )
    return layers
