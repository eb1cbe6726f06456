"""How ``LLM`` comes by its groups and its model, with every failure on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from megatron_dcp import parallel_state
from megatron_dcp.checkpoint import load_model, read_config
from megatron_dcp.comm.collectives import gather_objects
from megatron_dcp.comm.consensus import agree
from megatron_dcp.config import check_within_tp_bound
from megatron_dcp.model_config import ModelConfig


def initialize_groups(sizes: dict[str, Any]) -> None:
    """Make the groups, or hold the sizes against those that exist.

    Args:
        sizes: Fields of a ``ParallelConfig``; ``None``: not asked for.
    """
    given = {name: value for name, value in sizes.items() if value is not None}
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(**given)
        return
    for name, value in given.items():
        existing = getattr(parallel_state.get_parallel_config(), name)
        if value != existing:
            raise ValueError(
                f"{name}={value!r} differs from the {existing!r} of the groups that exist; leave it out, or call "
                "megatron_dcp.parallel_state.destroy_model_parallel() first"
            )


def load_checkpoint(
    path: str, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device | str
) -> tuple[Any, ModelConfig]:
    """Model and shape of a checkpoint. Makes the groups, and takes them down again if the checkpoint does not load."""
    config = on_all_ranks(read_config, path)
    existed = parallel_state.is_initialized()
    initialize_groups(sizes)
    try:
        check_within_tp_bound(parallel_state.get_parallel_config(), config.cached_kv_heads)
        groups = parallel_state.get_process_group_collection()
        return on_all_ranks(load_model, path, groups, dtype=dtype, device=device)
    except Exception:
        if not existed:
            parallel_state.destroy_model_parallel()
        raise


def replica_place(groups: Any) -> tuple[int, int]:
    """This rank's replica among all of the world, and how many there are. A collective call of the world.

    Args:
        groups: From :func:`megatron_dcp.parallel_state.get_process_group_collection`.

    Returns:
        ``(index, count)``; replicas are ordered by their first global rank.
    """
    own = min(distributed.get_process_group_ranks(groups.dcp_replica))
    world = distributed.group.WORLD
    assert world is not None
    firsts = sorted(set(gather_objects(own, world)))
    return firsts.index(own), len(firsts)


def on_all_ranks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(...)``; where it fails on one rank of the world, every rank raises."""
    result, error = None, None
    try:
        result = function(*args, **kwargs)
    except Exception as caught:
        error = caught
    agree(error, distributed.group.WORLD)
    return result
