"""From a checkpoint of any format to a model of this rank's shard, its configuration and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_dcp.checkpoint.convert import open_source
from megatron_dcp.checkpoint.dist import read_dist_config
from megatron_dcp.checkpoint.files import locate
from megatron_dcp.checkpoint.hf import read_hf_config
from megatron_dcp.checkpoint.legacy import read_legacy_config
from megatron_dcp.checkpoint.names import padded_vocab_size
from megatron_dcp.checkpoint.source import Source
from megatron_dcp.comm.consensus import agree, same_on_all
from megatron_dcp.model_config import ModelConfig

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.distributed import ProcessGroup


def read_config(path: str | Path) -> ModelConfig:
    """Shape of the model in the checkpoint ``path``, without opening its tensors.

    Raises:
        ValueError: There is no such checkpoint, or its model is not supported.
    """
    location = locate(path)
    read = {"torch_dist": read_dist_config, "legacy": read_legacy_config, "hf": read_hf_config}
    return read[location.format](location)


def load_tokenizer(path: str | Path) -> Any:
    """The ``transformers`` tokenizer that lies with the checkpoint ``path``; ``None`` where there is none.

    Raises:
        ValueError: There is no such checkpoint, its tokenizer cannot be read, or ``transformers`` is not installed.
    """
    directory = locate(path).tokenizer_dir
    if directory is None:
        return None
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise ValueError(
            f"the tokenizer in {str(directory)!r} needs the package transformers: pip install transformers, or give "
            "prompts as token_ids"
        ) from error
    try:
        if (directory / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(directory, local_files_only=True)
        if (directory / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # whatever its files make the tokenizer's own code raise
        raise ValueError(f"the tokenizer in {str(directory)!r} cannot be read: {error}") from error


def load_model(
    path: str | Path,
    pg_collection: ProcessGroupCollection,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **build: Any,
) -> tuple[GPTModel, ModelConfig]:
    """Build the model of the checkpoint ``path`` on this rank and fill it. Call it on every rank of the model.

    The checkpoint may have any format and have been saved at any tensor parallel size. Every rank reads its own
    shard; nothing is sent. Memory beyond the model: one tensor.

    Args:
        path: As for `convert`.
        pg_collection: Process groups; ``.tp`` decides the shard.
        dtype: dtype of the parameters, whatever they are stored in.
        build: Further arguments of ``build_model``.

    Returns:
        The model in eval mode, and its shape. The vocabulary is padded further where the tensor parallel size does
        not divide its stored padding.

    Raises:
        ValueError: On every rank: the checkpoint is not sound (checked before the model is built), or its model
            cannot be cut for this tensor parallel size.
    """
    from megatron_dcp._mcore import build_model

    group = _ranks_of_model(pg_collection)
    tp, rank = pg_collection.tp.size(), pg_collection.tp.rank()
    source: Source | None = None
    error: Exception | None = None
    try:
        source = open_source(path)
        if source.config.padded_vocab_size % tp:
            source.repad(padded_vocab_size(source.config.vocab_size, tp))
        source.config.check_tensor_parallel(tp)
    except Exception as caught:  # whatever it is: the other ranks wait
        error = caught
    agree(error, group)
    assert source is not None
    if group.size() > 1:
        same_on_all(repr(source.config), group, f"the shape of the model in {path}")

    model = build_model(source.config, pg_collection, dtype=dtype, device=device, **build)
    try:
        _fill(model, source, tp, rank)
    except Exception as caught:
        error = caught
    agree(error, group)
    return model, source.config


@torch.no_grad()
def _fill(model: torch.nn.Module, source: Source, tp: int, rank: int) -> None:
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(source.specs), set(parameters) ^ set(source.specs)
    for name, parameter in parameters.items():
        tensor = source.read_shard(name, tp, rank)
        assert tensor.shape == parameter.shape, (name, tensor.shape, parameter.shape)
        parameter.copy_(tensor)


def _ranks_of_model(pg_collection: ProcessGroupCollection) -> ProcessGroup:
    """The ranks that must fail together: all that decode together where DCP groups exist."""
    return getattr(pg_collection, "dcp_replica", None) or pg_collection.tp
