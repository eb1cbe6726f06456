"""From a checkpoint of any format to a model of this rank's shard, its configuration and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_dcp.checkpoint.convert import open_source
from megatron_dcp.checkpoint.dist import read_dist_config
from megatron_dcp.checkpoint.files import locate
from megatron_dcp.checkpoint.fsdp import read_fsdp_config
from megatron_dcp.checkpoint.hf import read_hf_config
from megatron_dcp.checkpoint.legacy import read_legacy_config
from megatron_dcp.checkpoint.names import global_expert_name, global_layer_name, split_layer_name
from megatron_dcp.checkpoint.source import Source
from megatron_dcp.comm.consensus import agree, same_on_all
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.model_tensors import padded_vocab_size

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
    read = {
        "torch_dist": read_dist_config,
        "fsdp_dtensor": read_fsdp_config,
        "legacy": read_legacy_config,
        "hf": read_hf_config,
    }
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

    The checkpoint may have any format and have been saved at any tensor or expert parallel size. Every rank reads its
    own shard, of the layers of its own pipeline stage and of its own experts only; nothing is sent. Memory beyond the
    model: one tensor.

    Args:
        path: As for `convert`.
        pg_collection: Process groups; ``.tp`` decides the shard, of experts ``.ep`` and ``.expt_tp``; ``.pp`` the
            layers.
        dtype: dtype of the parameters, whatever they are stored in; biases that choose experts stay fp32.
        build: Further arguments of ``build_model``.

    Returns:
        The model in eval mode, and its shape. The vocabulary is padded further where the tensor parallel size does
        not divide its stored padding.

    Raises:
        ValueError: On every rank: the checkpoint is not sound (checked before the model is built), or its model
            cannot be cut for these tensor, pipeline and expert parallel sizes.
    """
    from megatron_dcp._mcore import build_model, check_sizes

    groups = _ranks_of_model(pg_collection)
    tp = pg_collection.tp.size()
    source: Source | None = None
    error: Exception | None = None
    try:
        source = open_source(path)
        if source.config.padded_vocab_size % tp:
            source.repad(padded_vocab_size(source.config.vocab_size, tp))
        check_sizes(source.config, pg_collection)
    except Exception as caught:  # whatever it is: the other ranks wait
        error = caught
    _agree(error, groups)
    assert source is not None
    for group in groups:
        try:
            same_on_all(repr(source.config), group, f"the shape of the model in {path}")
        except ValueError as caught:
            error = caught
    _agree(error, groups)

    model = build_model(source.config, pg_collection, dtype=dtype, device=device, **build)
    try:
        _fill(model, source, pg_collection)
    except Exception as caught:
        error = caught
    _agree(error, groups)
    return model, source.config


@torch.no_grad()
def _fill(model: GPTModel, source: Source, pg_collection: ProcessGroupCollection) -> None:
    """Fill parameters and persistent buffers, each kind of which has a rank of its own."""
    state = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if not name.endswith("_extra_state")}
    first_expert, first_layer = 0, model.decoder.layers[0].layer_number - 1
    if source.config.moe is not None:
        first_expert = pg_collection.ep.rank() * (source.config.moe.num_experts // pg_collection.ep.size())
    read = set()
    for name, tensor in tensors.items():
        whole = global_expert_name(global_layer_name(name, first_layer), first_expert)
        if whole == "output_layer.weight" and model.share_embeddings_and_output_weights:
            whole = "embedding.word_embeddings.weight"  # the last stage's own copy
        spec = source.specs[whole]
        cut = pg_collection.expt_tp if spec.expert else pg_collection.tp
        shard = source.read_shard(whole, cut.size(), cut.rank())
        assert shard.shape == tensor.shape, (name, shard.shape, tensor.shape)
        tensor.copy_(shard)
        read.add(whole)
    others = {name for name, spec in source.specs.items() if not spec.expert and _is_on_stage(name, model)}
    assert others <= read, others - read


def _is_on_stage(name: str, model: GPTModel) -> bool:
    """Whether a tensor of the whole model belongs to the pipeline stage that ``model`` is."""
    layer, _ = split_layer_name(name)
    if layer is None:
        return bool(model.pre_process if name.startswith("embedding.") else model.post_process)
    first = model.decoder.layers[0].layer_number - 1
    return first <= layer < first + len(model.decoder.layers)


def _ranks_of_model(pg_collection: ProcessGroupCollection) -> list[ProcessGroup]:
    """The ranks that must fail together: all that decode together where DCP groups exist, and that share experts.

    The pipeline comes last: it carries what a rank has heard in its stage to all stages.
    """
    groups = [getattr(pg_collection, "dcp_replica", None) or pg_collection.tp]
    if hasattr(pg_collection, "ep") and pg_collection.ep.size() > 1:
        groups.append(pg_collection.tp_ep)
    return [*groups, pg_collection.pp]


def _agree(error: Exception | None, groups: list[ProcessGroup]) -> None:
    """`agree` over all groups; an error reaches every rank that shares a group with one that has it."""
    for group in groups:
        try:
            agree(error, group)
        except (ValueError, RuntimeError) as caught:
            error = caught
    if error is not None:
        raise error
