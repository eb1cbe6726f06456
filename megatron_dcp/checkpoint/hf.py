"""Reading Hugging Face checkpoints: ``config.json`` and safetensors, in one file or sharded with an index."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.checkpoint.families import family_of
from megatron_dcp.checkpoint.files import HF_CONFIG, Location
from megatron_dcp.checkpoint.hf_config import config_from_hf, read_json
from megatron_dcp.checkpoint.mapped import MappedFiles
from megatron_dcp.checkpoint.source import Source, check_tensors
from megatron_dcp.model_config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Models whose text part is one of the families: how the names of its tensors start, and those of the other parts.
_PARTS = {"gemma3": ("language_model.", ("vision_tower.", "multi_modal_projector."))}
_HEAD = "lm_head.weight"
_ROWS = 4096  # compared at once
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


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
        self._path_of = _find_files(location.data)
        self._stored_name = _text_names(read_json(location.data / HF_CONFIG), self._path_of)
        self._files = MappedFiles(_open)
        expected: dict[str, tuple[int, ...]] = {}
        for row in rows:
            expected |= row.hf_shapes(self.specs[row.megatron].shape, config)
        ignored = _ignored(config, hf_config)
        found = {
            name: tuple(self._slice(name).get_shape())
            for name in self._stored_name
            if not name.startswith(ignored) and not name.endswith("rotary_emb.inv_freq")
        }
        check_tensors(found, expected, str(location.data))
        self._check_tied()
        self._dtypes = {name: self._dtype(name) for name in found}
        self._files.close()

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[self._rows[name].hf[0]]

    def _slice(self, hf_name: str) -> Any:
        stored = self._stored_name[hf_name]
        return self._files.get(self._path_of[stored]).get_slice(stored)

    def _check_tied(self) -> None:
        """Raise ``ValueError`` where a head that is said to be the embedding is stored too, and is another one."""
        if self.config.untie_embeddings_and_output_weights or _HEAD not in self._stored_name:
            return
        (embedding,) = self._rows["embedding.word_embeddings.weight"].hf
        head, table = self._slice(_HEAD), self._slice(embedding)
        same = head.get_shape() == table.get_shape() and head.get_dtype() == table.get_dtype()
        rows = range(0, head.get_shape()[0], _ROWS)
        if not same or not all(torch.equal(head[i : i + _ROWS], table[i : i + _ROWS]) for i in rows):
            raise ValueError(
                f"{self.location.data} says tie_word_embeddings=true, but holds {_HEAD} that is not {embedding}: set "
                f"tie_word_embeddings to false in its {HF_CONFIG}, or remove the tensor"
            )

    def _tensor(self, hf_name: str, index: int | None) -> Tensor:
        """The whole tensor, or a slice of its first dimension."""
        return self._slice(hf_name)[slice(None) if index is None else index]

    def _dtype(self, hf_name: str) -> torch.dtype:
        stored = self._slice(hf_name).get_dtype()
        if stored not in DTYPES:
            raise ValueError(
                f"{hf_name} in {self.location.data} is stored as {stored}; supported are {', '.join(DTYPES)}: "
                "cast it first"
            )
        return DTYPES[stored]

    def _read(self, name: str) -> Tensor:
        row = self._rows[name]
        tensors = [self._tensor(hf_name, row.index) for hf_name in row.hf]
        self._files.count(sum(tensor.nbytes for tensor in tensors))
        if len({tensor.dtype for tensor in tensors}) > 1:
            kinds = ", ".join(f"{n}: {t.dtype}" for n, t in zip(row.hf, tensors, strict=True))
            raise ValueError(f"tensors that Megatron packs into one have different dtypes ({kinds}); cast them first")
        return row.transform.pack(tensors, self.config)


def _read_config(location: Location) -> tuple[ModelConfig, dict[str, Any]]:
    path = location.data / HF_CONFIG
    values = read_json(path)
    if values.get("model_type") in _PARTS and isinstance(values.get("text_config"), dict):
        shared = {name: values[name] for name in ("eos_token_id", "tie_word_embeddings") if name in values}
        values = shared | values["text_config"]
    generation = location.data / "generation_config.json"
    config, _ = config_from_hf(values, str(path), generation=read_json(generation) if generation.is_file() else None)
    return config, values


def _text_names(values: dict[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Stored name by the name that the text model alone would give a tensor; other parts of the model are left out."""
    start, others = _PARTS.get(str(values.get("model_type")), ("", ()))
    return {name.removeprefix(start): name for name in names if not name.startswith(others)}


def _ignored(config: ModelConfig, hf_config: dict[str, Any]) -> tuple[str, ...]:
    """How names start that are no part of the model: a tied head, and layers that only predict further tokens."""
    further = range(config.num_layers, config.num_layers + (hf_config.get("num_nextn_predict_layers") or 0))
    tied = () if config.untie_embeddings_and_output_weights else (_HEAD,)
    return (*tied, *(f"model.layers.{layer}." for layer in further))


def _find_files(directory: Path) -> dict[str, Path]:
    """The safetensors file of every tensor. Every file's header is read and its length checked."""
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{directory / INDEX} has no weight_map")
        names = sorted(set(weight_map.values()))
    elif (directory / SINGLE).is_file():
        weight_map, names = None, [SINGLE]
    else:
        old = " It has weights in PyTorch's old format: save them with safe_serialization=True." * bool(
            list(directory.glob("pytorch_model*.bin"))
        )
        raise ValueError(f"{str(directory)!r} has neither {SINGLE} nor {INDEX}: the checkpoint is incomplete.{old}")
    found = {}
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{directory / INDEX} names {name!r}, which is not a file beside it")
        for tensor in _open(directory / name).keys():  # noqa: SIM118
            found[tensor] = directory / name
    for name, file in (weight_map or {}).items():
        if name not in found:
            raise ValueError(f"{directory / INDEX} lists {name}, but {file} does not hold it")
    return found


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: the checkpoint is incomplete") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}; copy or download it again") from error
