"""How ``LLM`` comes by its groups and its model, with every failure on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed

from megatron_dcp import parallel_state
from megatron_dcp.checkpoint import load_model, load_tokenizer, read_config
from megatron_dcp.comm.collectives import gather_objects
from megatron_dcp.comm.consensus import agree
from megatron_dcp.config import CacheConfig, EngineConfig, check_at_least, check_choice, check_within_tp_bound
from megatron_dcp.distributed import initialize_distributed
from megatron_dcp.engine.params import token_ids
from megatron_dcp.layers import enable_dcp
from megatron_dcp.metrics import Metrics
from megatron_dcp.model_config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def start(
    model: Any, timeout_s: float, eos_token_ids: Iterable[int] | None, **arguments: Any
) -> tuple[bool, tuple[int, ...] | None]:
    """Initialise ``torch.distributed`` and check what `Front` was given, as far as that needs no other rank.

    Returns:
        Whether the model is a live one, and ``eos_token_ids`` as a tuple.
    """
    initialize_distributed(timeout_s)
    for name, kind in (("cache", CacheConfig), ("engine", EngineConfig), ("metrics", Metrics)):
        if not isinstance(arguments[name], kind | None):
            raise ValueError(
                f"{name}={arguments[name]!r} must be of type {kind.__name__}; leave it out for the default"
            )
    tokenizer, live = arguments["tokenizer"], isinstance(model, torch.nn.Module)
    if tokenizer is not None and not all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")):
        raise ValueError(f"tokenizer={tokenizer!r} must have the methods encode and decode; leave it out for none")
    if live:
        _refuse("a live model keeps its own", dtype=arguments["dtype"], device=arguments["device"])
    elif isinstance(model, str | os.PathLike):
        _refuse("a checkpoint states its own", vocab_size=arguments["vocab_size"])
        if arguments["dtype"] is not None:
            check_choice("dtype", arguments["dtype"], tuple(DTYPES))
        if arguments["device"] is not None:
            _check_device(arguments["device"])
    else:
        raise ValueError(f"model={model!r} must be the directory of a checkpoint or a Megatron GPTModel")
    return live, None if eos_token_ids is None else token_ids("eos_token_ids", eos_token_ids)


def attach(model: torch.nn.Module, vocab_size: int | None) -> tuple[Any, int]:
    """The bare model with its decode path, and its vocabulary."""
    bare = enable_dcp(model)
    if vocab_size is None:
        return bare, bare.vocab_size
    check_at_least("vocab_size", vocab_size, 1)
    if vocab_size > bare.vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} exceeds the {bare.vocab_size} rows of the model's embedding; leave it out for all"
        )
    return bare, vocab_size


def find_tokenizer(given: Any, path: str | None) -> Any:
    """The given one, else that of the checkpoint, if there is one and it has one."""
    tokenizer = given if given is not None or path is None else load_tokenizer(path)
    if getattr(tokenizer, "eos_token_id", None) is not None:
        check_at_least("the tokenizer's eos_token_id", tokenizer.eos_token_id, 0)
    return tokenizer


def initialize_groups(sizes: dict[str, Any]) -> None:
    """Make the groups, or hold the sizes against those that exist. A collective call of the world.

    Args:
        sizes: Fields of a ``ParallelConfig``; ``None``: not asked for.
    """
    given = {name: value for name, value in sizes.items() if value is not None}
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(**given)
    else:
        on_all_ranks(_hold_against_groups, given)


def _hold_against_groups(given: dict[str, Any]) -> None:
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
    if not existed and config.whole_experts and sizes.get("expert_tensor_parallel_size") is None:
        sizes = sizes | {"expert_tensor_parallel_size": 1}
    initialize_groups(sizes)
    groups = parallel_state.get_process_group_collection()
    try:
        on_all_ranks(check_within_tp_bound, parallel_state.get_parallel_config(), config.cached_kv_heads)
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
    """``function(...)``; where it fails on one rank of the world, every rank raises.

    It may be what initialises the world; where that fails, each rank is on its own.
    """
    result, error = None, None
    try:
        result = function(*args, **kwargs)
    except Exception as caught:
        error = caught
    if error is not None and not distributed.is_initialized():
        raise error
    agree(error, distributed.group.WORLD)
    return result


def _refuse(why: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} cannot be given: {why}; leave it out")


def _check_device(device: Any) -> None:
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError):
        made = None
    gpus = torch.cuda.device_count()
    if made is None or made.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not known; use 'cpu', 'cuda' or 'cuda:0', or leave it out")
    if made.type == "cuda" and (made.index or 0) >= gpus:
        raise ValueError(f"device={device!r} is not there: this machine has {gpus} GPUs; use 'cpu', or leave it out")
