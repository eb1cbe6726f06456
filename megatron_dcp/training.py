"""Generation inside a Megatron training job: its command line, its groups, its model.

With ``megatron.training``::

    pretrain(..., extra_args_provider=add_dcp_args)
    llm = llm_from_args(get_args(), model, tokenizer=tokenizer)   # after Megatron has made its groups and the model
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, get_args

import torch

from megatron_dcp.config import (
    BackendName,
    CacheConfig,
    CudaGraphs,
    DcpLayout,
    EngineConfig,
    ExchangeName,
    KVCacheDtype,
    PrefillName,
)
from megatron_dcp.engine.llm import LLM
from megatron_dcp.engine.loading import initialize_groups


def add_dcp_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of decode context parallelism; what Megatron-LM calls an ``extra_args_provider``.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("decode context parallel")
    cache, engine = CacheConfig(), EngineConfig()
    group.add_argument(
        "--decode-context-parallel-size", type=int, default=1, help="ranks that share the KV cache of a sequence"
    )
    group.add_argument(
        "--dcp-layout",
        choices=get_args(DcpLayout),
        default="orthogonal",
        help="orthogonal: the dcp ranks are data-parallel ranks; within_tp: they are tensor-parallel ranks",
    )
    group.add_argument(
        "--dcp-kv-interleave-size",
        type=int,
        default=cache.kv_interleave_size,
        help="consecutive tokens on one dcp rank; divides the block size",
    )
    group.add_argument("--dcp-block-size", type=int, default=cache.block_size, help="tokens of a block on one rank")
    group.add_argument(
        "--dcp-kv-cache-dtype",
        choices=get_args(KVCacheDtype),
        default=cache.kv_cache_dtype,
        help="what keys and values are stored in; auto: the model's dtype",
    )
    group.add_argument(
        "--dcp-backend", choices=get_args(BackendName), default=engine.backend, help="attention back end"
    )
    group.add_argument(
        "--dcp-cuda-graphs",
        choices=get_args(CudaGraphs),
        default=engine.cuda_graphs,
        help="capture decode steps: full, or piecewise with the exchanges left out",
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument("--dcp-num-blocks", type=int, help="blocks of the KV pool on every rank")
    size.add_argument("--dcp-bytes-per-rank", type=int, help="most bytes of the KV pool on every rank")
    group.add_argument(
        "--dcp-max-num-seqs", type=int, default=engine.max_num_seqs, help="sequences that decode at the same time"
    )
    group.add_argument(
        "--dcp-prefill-chunk-size",
        type=int,
        default=engine.prefill_chunk_size,
        help="most prompt tokens of one step",
    )
    group.add_argument("--dcp-exchange", choices=get_args(ExchangeName), help="how partial attention is merged")
    group.add_argument(
        "--dcp-prefill",
        choices=get_args(PrefillName),
        default=engine.prefill,
        help="how the dcp ranks share a prompt's tokens",
    )
    return parser


def initialize_dcp_from_args(args: argparse.Namespace) -> None:
    """Make the DCP groups that ``args`` ask for beside those that Megatron has. Call it on every rank.

    Where they exist already, only the sizes are held against them.

    Args:
        args: With the options of `add_dcp_args`.

    Raises:
        ValueError: On every rank: the sizes do not fit Megatron's groups, or the groups that exist.
    """
    initialize_groups(
        {"decode_context_parallel_size": args.decode_context_parallel_size, "dcp_layout": args.dcp_layout}
    )


def llm_from_args(args: argparse.Namespace, model: torch.nn.Module | Sequence[torch.nn.Module], **more: Any) -> LLM:
    """An `LLM` that generates from the live model of a training job, over Megatron's own groups and weights.

    Makes the DCP groups first where they do not exist. All ranks of the world call it together.

    Args:
        args: With the options of `add_dcp_args`.
        model: Megatron's model, wrapped or not, or the list with this one model that ``get_model`` returns.
        more: Further arguments of `LLM`: ``tokenizer``, ``vocab_size``, ``eos_token_ids``, ``metrics``.

    Raises:
        ValueError: On every rank: sizes that do not fit, a model that DCP does not know, several model chunks.
    """
    if not isinstance(model, torch.nn.Module):
        if len(model) != 1:
            raise ValueError(
                f"the model has {len(model)} chunks on this rank: virtual pipeline stages are not supported; leave out "
                "--num-layers-per-virtual-pipeline-stage"
            )
        model = model[0]
    cache = CacheConfig(
        block_size=args.dcp_block_size,
        kv_interleave_size=args.dcp_kv_interleave_size,
        num_blocks=args.dcp_num_blocks,
        bytes_per_rank=args.dcp_bytes_per_rank,
        kv_cache_dtype=args.dcp_kv_cache_dtype,
    )
    engine = EngineConfig(
        max_num_seqs=args.dcp_max_num_seqs,
        prefill_chunk_size=args.dcp_prefill_chunk_size,
        exchange=args.dcp_exchange,
        prefill=args.dcp_prefill,
        backend=args.dcp_backend,
        cuda_graphs=args.dcp_cuda_graphs,
    )
    initialize_dcp_from_args(args)
    return LLM(model, cache=cache, engine=engine, **more)
