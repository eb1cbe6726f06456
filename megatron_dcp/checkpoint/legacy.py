"""Megatron's legacy format: one ``mp_rank_XX/model_optim_rng.pt`` per tensor parallel rank.

Files are mapped, not read: tensors come in when they are used, the optimizer's never.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.checkpoint.arguments import config_from_args
from megatron_dcp.checkpoint.dist_write import CHECKPOINT_VERSION, common_state
from megatron_dcp.checkpoint.files import Location
from megatron_dcp.checkpoint.names import TensorSpec, join, layer_name, local_name, split_layer_name
from megatron_dcp.checkpoint.safe import load_torch
from megatron_dcp.checkpoint.source import Source, check_tensors
from megatron_dcp.model_config import ModelConfig

_FILE = "model_optim_rng.pt"


class LegacySource(Source):
    """A legacy checkpoint of any tensor parallel size, open for reading.

    Raises:
        ValueError: It is incomplete or truncated, was saved with pipeline or expert parallelism, or does not fit its
            arguments.
    """

    def __init__(self, location: Location) -> None:
        files = _rank_files(location.data)
        states = [_load(file) for file in files]
        args = states[0].get("args")
        config = config_from_args(args, str(files[0]))
        _check_ranks(args, len(files), location.data)
        super().__init__(location, config, getattr(args, "hf_config", None))
        self._ranks = [_model(state, file) for state, file in zip(states, files, strict=True)]
        expected = {name: _rank_shape(spec, len(files)) for name, spec in self.specs.items()}
        for file, tensors in zip(files, self._ranks, strict=True):
            found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            check_tensors(found, expected, str(file))

    def dtype(self, name: str) -> torch.dtype:
        return self._ranks[0][name].dtype

    def _read(self, name: str) -> Tensor:
        return join([tensors[name] for tensors in self._ranks], self.specs[name])


def read_legacy_config(location: Location) -> ModelConfig:
    """Shape of the model at ``location``, without looking at its tensors."""
    file = _rank_files(location.data)[0]
    return config_from_args(_load(file).get("args"), str(file))


def write_legacy(
    source: Source, directory: Path, *, iteration: int, progress: Callable[[str], None] | None = None
) -> None:
    """Write ``source`` for one rank (tp 1, pp 1) into ``directory``, the directory of one iteration.

    The names are those of Megatron's own layers (``--transformer-impl local``). The format is one file of all
    tensors, so all of them are held in memory.
    """
    model: dict[str, Tensor] = {}
    for name, tensor in source.tensors():
        model[name] = tensor.contiguous().clone()  # a view would bring all of its storage into the file
        if progress is not None:
            progress(name)
    (directory / "mp_rank_00").mkdir()
    torch.save(common_state(source, iteration) | {"model": model}, directory / "mp_rank_00" / _FILE)


def _rank_files(data: Path) -> list[Path]:
    names = sorted(path.name for path in data.glob("mp_rank_*"))
    if names[-1].count("_") > 2:
        raise ValueError(
            f"{str(data)!r} was saved with pipeline or expert parallelism ({names[-1]}); such legacy checkpoints are "
            "not supported: save it as torch_dist with Megatron-LM (--ckpt-convert-format torch_dist)"
        )
    expected = [f"mp_rank_{rank:02d}" for rank in range(len(names))]
    missing = sorted(set(expected) - set(names)) + [n for n in names if not (data / n / _FILE).is_file()]
    if missing:
        raise ValueError(f"{data / missing[0] / _FILE} is missing: the checkpoint is incomplete")
    return [data / name / _FILE for name in expected]


def _load(file: Path) -> dict[str, Any]:
    state = load_torch(file, mmap=True)
    if not isinstance(state, dict):
        raise ValueError(f"{file} holds a {type(state).__name__}, not the state of a training")
    version = state.get("checkpoint_version", 0)
    if version < CHECKPOINT_VERSION:
        raise ValueError(
            f"{file} has checkpoint_version={version}, whose order of query, key and value rows differs; supported is "
            f"{CHECKPOINT_VERSION}: load and save it once with Megatron-LM"
        )
    return state


def _check_ranks(args: Any, ranks: int, data: Path) -> None:
    tp = getattr(args, "tensor_model_parallel_size", None)
    if tp is not None and tp != ranks:
        raise ValueError(
            f"{str(data)!r} was saved with tensor_model_parallel_size={tp}, but holds {ranks} mp_rank_* "
            f"director{'y' if ranks == 1 else 'ies'}: the checkpoint is incomplete"
        )


def _model(state: dict[str, Any], file: Path) -> dict[str, Tensor]:
    """The rank's tensors by Megatron's local names."""
    model = state.get("model")
    if not isinstance(model, dict):
        why = "it was saved with virtual pipeline stages" if "model0" in state else "there is no 'model' in it"
        raise ValueError(f"{file} cannot be read: {why}")
    if "language_model" in model:
        raise ValueError(
            f"{file} holds a model from before Megatron-Core ('language_model'); convert it with Megatron-LM's "
            "tools/checkpoint/convert.py first"
        )
    tensors = {}
    for name, value in model.items():
        if not isinstance(value, Tensor) or name.endswith("_extra_state"):
            continue
        layer, rest = split_layer_name(name)
        tensors[name if layer is None else layer_name(layer, local_name(rest))] = value
    return tensors


def _rank_shape(spec: TensorSpec, tp: int) -> tuple[int, ...]:
    if spec.tp_dim is None:
        return spec.shape
    if spec.shape[spec.tp_dim] % (tp * spec.parts):
        raise ValueError(f"a tensor of shape {spec.shape} cannot have been cut for {tp} tensor parallel ranks")
    return tuple(size // tp if dim == spec.tp_dim else size for dim, size in enumerate(spec.shape))
