"""``megatron-dcp plan``: which tp, dcp, pp and dp for a model on some GPUs; what fits, and what it costs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megatron_dcp.cli import arguments
from megatron_dcp.config import CacheConfig, DcpLayout, EngineConfig, ExchangeName, KVCacheDtype

if TYPE_CHECKING:
    from megatron_dcp.model_config import ModelConfig
    from megatron_dcp.planner import Pins

EXAMPLE = "  megatron-dcp plan qwen2.5-72b --gpu H200 --gpus 8 --context 131072 --batch 8"
_SHAPE = (
    ("--num-layers", "layers"),
    ("--hidden-size", "size of the hidden states"),
    ("--ffn-hidden-size", "inner size of the MLPs, which have a gate"),
    ("--num-attention-heads", "query heads"),
    ("--vocab-size", "tokens that exist"),
)


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = arguments.new_parser(
        commands,
        "plan",
        "List what fits on some GPUs, with bytes, traffic and time, and recommend one.",
        "Needs no GPU.\n\n"
        "MODEL is a well-known model, a checkpoint, or a config.json of Hugging Face; without it, give the shape.\n"
        "Times are estimates: a roofline, and latencies that are assumed (docs/planner.md).",
        EXAMPLE,
    )
    parser.add_argument(
        "model", nargs="?", type=arguments.path, metavar="MODEL", help="name, checkpoint or config.json"
    )
    parser.add_argument("--gpu", required=True, metavar="NAME", help="A100-40GB, A100-80GB, H100, H200, B200 or GB200")
    parser.add_argument("--context", required=True, type=arguments.whole(1), metavar="N", help="tokens of a sequence")
    engine = EngineConfig()
    arguments.add_sizes(
        parser,
        ("--gpus", None, "N", 8, "how many GPUs"),
        ("--batch", None, "N", 1, "sequences that decode at the same time, over all replicas"),
        ("--prefill-chunk-size", None, "N", engine.prefill_chunk_size, "most prompt tokens of one step"),
        ("--top", None, "N", 10, "configurations to show"),
    )
    parser.add_argument(
        "--weight-dtype",
        choices=("bfloat16", "float16", "float32", "fp8", "mxfp4", "nvfp4"),
        default="bfloat16",
        help="what weights are stored in; from fp8 on for planning only (default bfloat16)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=(*get_args(KVCacheDtype), "all"),
        default="auto",
        help="what keys and values are stored in (default auto: as weights, at least 16 bits); all: auto and both of 8",
    )
    parser.add_argument(
        "--memory-share",
        type=arguments.number(0, 1, above=True),
        default=0.9,
        metavar="X",
        help="share of a GPU's memory that may be used (default 0.9)",
    )
    parser.add_argument("--json", type=arguments.path, metavar="F.json", help="write all numbers")
    parser.add_argument("--plot", type=arguments.path, metavar="F.png", help="draw them; also .svg, .pdf")
    _add_pins(parser)
    _add_shape(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    """Plan, print and write."""
    from megatron_dcp.planner import Workload, machine, make_plan
    from megatron_dcp.planner.render import render, to_dict

    _check_outputs(args)
    gpu = machine(args.gpu)
    name, model = _model(args)
    workload = Workload(
        context=args.context,
        batch=args.batch,
        weight_dtype=args.weight_dtype,
        memory_share=args.memory_share,
        chunk=args.prefill_chunk_size,
    )
    plan = make_plan(name, model, gpu, args.gpus, workload, _pins(args))
    print(render(plan, args.top), flush=True)
    if args.json is not None:
        text = json.dumps(to_dict(plan), indent=1, allow_nan=False)
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.plot is not None:
        from megatron_dcp.planner.plot import plot

        plot(plan, args.plot, args.top)


def _add_pins(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("only configurations with")
    arguments.add_sizes(
        group,
        ("--tp", "--tensor-model-parallel-size", "N", None, "ranks that split the weights"),
        ("--pp", "--pipeline-model-parallel-size", "N", None, "stages that split the layers"),
        ("--dcp", "--decode-context-parallel-size", "N", None, "ranks that split the KV cache of every sequence"),
        ("--ep", "--expert-model-parallel-size", "N", None, "ranks that the experts are dealt out over"),
        ("--expert-tp", "--expert-tensor-parallel-size", "N", None, "ranks that split one expert"),
        ("--kv-interleave", "--kv-interleave-size", "I", CacheConfig.kv_interleave_size, "interleave of the KV cache"),
        ("--block-size", None, "B", CacheConfig.block_size, "tokens of a block on one rank"),
    )
    group.add_argument("--layout", choices=get_args(DcpLayout), help="how dcp lies to tp")
    group.add_argument("--exchange", choices=get_args(ExchangeName), help="how partial attention is merged")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the shape of a dense model, instead of MODEL")
    arguments.add_sizes(
        group,
        *((name, None, "N", None, text) for name, text in _SHAPE),
        ("--num-query-groups", None, "N", None, "KV heads (default: as query heads)"),
        ("--kv-channels", None, "N", None, "head dim (default: hidden size / query heads)"),
    )


def _pins(args: argparse.Namespace) -> Pins:
    from megatron_dcp.planner import Pins

    return Pins(
        tp=args.tp,
        pp=args.pp,
        dcp=args.dcp,
        ep=args.ep,
        expert_tp=args.expert_tp,
        layout=args.layout,
        exchange=args.exchange,
        kv_cache_dtypes=("auto", "fp8_e4m3", "int8") if args.kv_cache_dtype == "all" else (args.kv_cache_dtype,),
        interleave=args.kv_interleave,
        block_size=args.block_size,
    )


def _model(args: argparse.Namespace) -> tuple[str, ModelConfig]:
    given = [name for name, _ in _SHAPE if getattr(args, name[2:].replace("-", "_")) is not None]
    if args.model is None:
        if missing := [name for name, _ in _SHAPE if name not in given]:
            raise ValueError(f"give a MODEL, or its shape: {', '.join(missing)} are missing")
        return "model", _shape(args)
    if given:
        raise ValueError(f"{given[0]} is for a model without a name; leave out {given[0]} or {args.model!r}")
    path = Path(args.model)
    if path.is_file() and path.suffix == ".json":
        return str(path.parent.name or path), _from_json(path)
    if path.is_dir():
        from megatron_dcp.checkpoint import read_config

        return path.resolve().name, read_config(path)
    if os.sep in args.model and not path.exists():
        raise ValueError(f"{args.model!r} does not exist; give a checkpoint, a config.json or the name of a model")
    from megatron_dcp.planner import known_model

    return known_model(args.model)


def _from_json(path: Path) -> ModelConfig:
    from megatron_dcp.checkpoint.hf_config import config_from_hf, read_json

    values = read_json(path)
    values.pop("quantization_config", None)  # says how weights are stored, for which there is --weight-dtype
    return config_from_hf(values, str(path))[0]


def _shape(args: argparse.Namespace) -> ModelConfig:
    from megatron_dcp.model_config import ModelConfig
    from megatron_dcp.model_tensors import padded_vocab_size

    return ModelConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups or args.num_attention_heads,
        kv_channels=args.kv_channels or max(1, args.hidden_size // args.num_attention_heads),
        vocab_size=args.vocab_size,
        padded_vocab_size=padded_vocab_size(args.vocab_size),
        max_position_embeddings=args.context,
        untie_embeddings_and_output_weights=True,
    )


def _check_outputs(args: argparse.Namespace) -> None:
    """Before anything is computed."""
    if args.plot is not None:
        from megatron_dcp.figures import check_plot

        check_plot(args.plot)
    if args.json is not None and not os.path.isdir(os.path.dirname(args.json) or "."):
        raise ValueError(f"{os.path.dirname(args.json)!r} is no directory; make it first")
