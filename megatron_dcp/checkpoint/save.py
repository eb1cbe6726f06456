"""Saving a model that is in memory, in Megatron-Core's ``torch_dist`` format, from all of its ranks."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_dcp.checkpoint.arguments import args_from_config
from megatron_dcp.checkpoint.destination import new_directory
from megatron_dcp.checkpoint.dist import COMMON
from megatron_dcp.checkpoint.dist_write import Writer
from megatron_dcp.checkpoint.files import COMPANIONS, TRACKER, iteration_dir
from megatron_dcp.checkpoint.source import CHECKPOINT_VERSION
from megatron_dcp.comm.consensus import agree
from megatron_dcp.model_config import ModelConfig

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


def save_model(
    model: torch.nn.Module,
    config: ModelConfig,
    dst: str | Path,
    *,
    pg_collection: ProcessGroupCollection | None = None,
    iteration: int = 1,
    tokenizer_dir: str | Path | None = None,
) -> Path:
    """Save a ``GPTModel``'s weights as a new checkpoint ``dst`` that says what shape it has.

    Call it on every rank of ``torch.distributed``, with a ``dst`` that all of them see. ``dst`` appears under its
    name only when it is complete. Needs no GPU, unlike Megatron-Core's own ``dist_checkpointing.save``.

    Args:
        model: Of any tensor and pipeline parallel size; wrappers with a ``.module`` are looked through.
        config: The model's shape.
        dst: A name that does not exist yet.
        pg_collection: The model's process groups; ``None``: those of ``megatron.core.parallel_state``.
        iteration: Iteration of the training, at least 1.
        tokenizer_dir: Directory whose tokenizer files go along.

    Returns:
        ``dst`` as a path.

    Raises:
        ValueError: On every rank: ``dst`` exists, or ``config`` is not the model's.
    """
    while isinstance(wrapped := getattr(model, "module", None), torch.nn.Module):
        model = wrapped
    dst, world = Path(dst), dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    with contextlib.ExitStack() as stack:
        error: Exception | None = None
        shared: list[Any] = [None]
        try:
            _check_shape(model, config)
            if dist.get_rank() == 0:
                shared[0] = stack.enter_context(new_directory(dst))
                (shared[0] / iteration_dir(iteration)).mkdir()
        except (ValueError, OSError) as caught:
            error = caught
        agree(error, world)
        dist.broadcast_object_list(shared, src=0)
        directory: Path = shared[0]

        _save_sharded(model, directory / iteration_dir(iteration), pg_collection)
        try:
            if dist.get_rank() == 0:
                dtype = next(model.parameters()).dtype
                _write_rest(directory, config, dtype, iteration, Path(tokenizer_dir) if tokenizer_dir else None)
        except OSError as caught:
            error = caught
        agree(error, world)
    dist.barrier()  # nobody goes on before the checkpoint has its name
    return dst


_SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "normalization", "qk_layernorm", "softmax_type", "glu_linear_offset", "activation_func_clamp_value",
)  # fmt: skip
# What Megatron names differently, or fills in by itself, or does not know.
_NOT_COMPARED = ("num_experts", "moe_layer_freq", "moe_router_pre_softmax", "moe_router_group_score_topk")


def _check_shape(model: torch.nn.Module, config: ModelConfig) -> None:
    theirs: Any = model.config
    ours = {name: getattr(config, name) for name in _SHAPE}
    ours |= {"gated_linear_unit": config.gated, "multi_latent_attention": config.mla is not None}
    ours |= {"num_moe_experts": None if config.moe is None else config.moe.num_experts}
    for part in (config.mla, config.moe):
        if part is not None:
            ours |= {name: value for name, value in vars(part).items() if name not in _NOT_COMPARED}
    for name, value in ours.items():
        if getattr(theirs, name) != value:
            raise ValueError(f"{name}={value!r} is not the model's, which has {getattr(theirs, name)!r}")


def _save_sharded(model: Any, directory: Path, pg_collection: ProcessGroupCollection | None) -> None:
    """Megatron's own save, with torch's synchronous writer in place of Megatron's, which needs a GPU."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    class Synchronous(strategies.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            by_key, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
            planner = strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
            dist.checkpoint.save(
                strategies.mcore_to_pyt_state_dict(by_key, False),
                storage_writer=Writer(checkpoint_dir),
                planner=planner,
            )

    metadata = None
    if pg_collection is not None and hasattr(pg_collection, "dp_cp"):
        metadata = {"dp_cp_group": pg_collection.dp_cp}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = Synchronous("torch_dist", 1)
        dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), str(directory), strategy)


def _write_rest(
    directory: Path, config: ModelConfig, dtype: torch.dtype, iteration: int, tokenizer_dir: Path | None
) -> None:
    args = args_from_config(config, dtype=dtype, iteration=iteration, has_tokenizer=tokenizer_dir is not None)
    common = {"args": args, "checkpoint_version": CHECKPOINT_VERSION, "iteration": iteration}
    torch.save(common, directory / iteration_dir(iteration) / COMMON)
    for name in COMPANIONS:
        if tokenizer_dir is not None and (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, directory / name)
    (directory / TRACKER).write_text(f"{iteration}\n")
