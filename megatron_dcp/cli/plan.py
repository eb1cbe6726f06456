"""``megatron-dcp plan``: which tp, dcp, pp and dp for a model on some GPUs; what fits, and what it costs."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megatron_dcp.cli import arguments
from megatron_dcp.cli.calibration import check_machine_file, measure, ranks_here, start_ranks
from megatron_dcp.config import CacheConfig, DcpLayout, EngineConfig, ExchangeName, KVCacheDtype

if TYPE_CHECKING:
    from megatron_dcp.model_config import ModelConfig
    from megatron_dcp.planner import Machine, Pins, Plan

EXAMPLE = "  megatron-dcp plan qwen2.5-72b --gpu H200 --gpus 8 --context 131072 --batch 8"
GPUS = 8  # of a data sheet, unless --gpus says otherwise
_OUTPUTS = ("calibrate", "json", "plot")
_PINS = ("tp", "pp", "dcp", "ep", "expert_tp", "layout", "exchange")
_SHAPE = (
    ("--num-layers", "layers"),
    ("--hidden-size", "size of the hidden states"),
    ("--ffn-hidden-size", "inner size of the MLPs, which have a gate"),
    ("--num-attention-heads", "query heads"),
    ("--vocab-size", "tokens that exist"),
)
_MORE_SHAPE = (
    ("--num-query-groups", "KV heads (default: as query heads)"),
    ("--kv-channels", "head dim (default: hidden size / query heads)"),
)


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = arguments.new_parser(
        commands,
        "plan",
        "List what fits on some GPUs, with bytes, traffic and time, and recommend one.",
        "Needs no GPU.\n\n"
        "MODEL is a well-known model, a checkpoint, or a config.json of Hugging Face; without it, give the shape.\n"
        "Times are estimates (docs/planner.md): a roofline, and latencies that are assumed. --calibrate F.json\n"
        "measures this machine instead, for --gpu F.json from then on: in less than a minute, with a process on\n"
        "every GPU, or two where there is none, or those of torchrun.",
        EXAMPLE,
    )
    parser.add_argument(
        "model", nargs="?", type=arguments.path, metavar="MODEL", help="name, checkpoint or config.json"
    )
    device = parser.add_mutually_exclusive_group(required=True)
    device.add_argument(
        "--gpu",
        type=arguments.path,
        metavar="NAME",
        help="A100-40GB, A100-80GB, H100, H200, B200, GB200, or the file of a machine that --calibrate measured",
    )
    device.add_argument(
        "--calibrate",
        type=arguments.path,
        metavar="F.json",
        help="measure this machine and write what it can do; with a MODEL, plan for it",
    )
    parser.add_argument("--context", type=arguments.whole(1), metavar="N", help="tokens of a sequence")
    engine = EngineConfig()
    arguments.add_sizes(
        parser,
        ("--gpus", None, "N", None, f"how many GPUs (default {GPUS}, or as many as measured)"),
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


def run(args: argparse.Namespace) -> int | None:
    """Measure if asked to; plan, print and write."""
    from megatron_dcp.planner import machine

    args.options["world_size"] = "--gpus"  # nothing else says how many ranks a plan is for
    if args.calibrate is None:
        _check_outputs(args)
        _write(args, _make(args, machine(args.gpu)))
        return None
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        ranks = ranks_here(args.gpus)
        _check(args, ranks)
        return start_ranks(ranks, args.argv)
    measured = measure(args.calibrate, partial(_check, args, int(os.environ["WORLD_SIZE"])))
    if measured is not None and _plans(args):
        _write(args, _make(args, measured))
    return None


def _check(args: argparse.Namespace, ranks: int) -> None:
    """All that can be wrong, before anything is measured: a plan is made for another machine."""
    from megatron_dcp.planner import machine

    _check_outputs(args)
    if _plans(args):
        _make(args, replace(machine("H200"), name="this machine", ranks=ranks))
        return
    options = [word.partition("=")[0] for word in args.argv if word.startswith("--")]
    if unused := [option for option in options if option not in ("--calibrate", "--gpus", "--debug")]:
        raise ValueError(f"{unused[0]} is for a plan; give a MODEL, or leave it out")


def _check_outputs(args: argparse.Namespace) -> None:
    given = {f"--{name}": path for name in _OUTPUTS if (path := getattr(args, name)) is not None}
    for option, path in given.items():
        arguments.check_output(option, path)
    if len(set(map(os.path.realpath, given.values()))) < len(given):
        raise ValueError(f"{' and '.join(given)} are to be different files")
    if args.calibrate is not None:
        check_machine_file(args.calibrate)
    if args.plot is not None:
        from megatron_dcp.figures import check_plot

        check_plot(args.plot)


def _plans(args: argparse.Namespace) -> bool:
    """Whether there is a model to plan for."""
    return args.calibrate is None or args.model is not None or bool(_given_shape(args))


def _make(args: argparse.Namespace, machine: Machine) -> Plan:
    from megatron_dcp.planner import Workload, make_plan

    if args.context is None:
        raise ValueError("give --context, the tokens of a sequence")
    name, model = _model(args)
    workload = Workload(
        context=args.context,
        batch=args.batch,
        weight_dtype=args.weight_dtype,
        memory_share=args.memory_share,
        chunk=args.prefill_chunk_size,
    )
    return make_plan(name, model, machine, args.gpus or machine.ranks or GPUS, workload, _pins(args))


def _write(args: argparse.Namespace, plan: Plan) -> None:
    from megatron_dcp.planner.render import render, to_dict

    print(render(plan, args.top), flush=True)
    if args.json is not None:
        arguments.write_output("--json", args.json, json.dumps(to_dict(plan), indent=1, allow_nan=False) + "\n")
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
    group.add_argument("--layout", "--dcp-layout", choices=get_args(DcpLayout), help="how dcp lies to tp")
    group.add_argument("--exchange", choices=get_args(ExchangeName), help="how partial attention is merged")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the shape of a dense model, instead of MODEL")
    arguments.add_sizes(
        group,
        *((name, None, "N", None, text) for name, text in (*_SHAPE, *_MORE_SHAPE)),
    )


def _pins(args: argparse.Namespace) -> Pins:
    from megatron_dcp.planner import Pins

    return Pins(
        **{name: getattr(args, name) for name in _PINS},
        kv_cache_dtypes=("auto", "fp8_e4m3", "int8") if args.kv_cache_dtype == "all" else (args.kv_cache_dtype,),
        interleave=args.kv_interleave,
        block_size=args.block_size,
    )


def _given_shape(args: argparse.Namespace) -> list[str]:
    return [name for name, _ in (*_SHAPE, *_MORE_SHAPE) if getattr(args, arguments.parameter_of(name)) is not None]


def _model(args: argparse.Namespace) -> tuple[str, ModelConfig]:
    given = _given_shape(args)
    if args.model is None:
        if missing := [name for name, _ in _SHAPE if name not in given]:
            raise ValueError(f"give a MODEL, or its shape: {', '.join(missing)} are missing")
        args.options.update({arguments.parameter_of(name): name for name in given})  # errors shall speak of them
        return "model", _shape(args)
    if given:
        raise ValueError(f"{given[0]} is for a model without a name; leave out {given[0]} or {args.model!r}")
    path = Path(args.model)
    if path.is_file() and path.suffix == ".json":
        return str(path.parent.name or path), _from_json(path)
    if path.is_dir():
        from megatron_dcp.checkpoint import read_config

        return path.resolve().name, read_config(path)
    if path.exists():
        raise ValueError(f"{args.model!r} is neither a checkpoint nor a config.json; give one of these, or a name")
    if os.sep in args.model:
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

    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is no multiple of --num-attention-heads {args.num_attention_heads}; "
            "give the head dim as --kv-channels"
        )
    return ModelConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups or args.num_attention_heads,
        kv_channels=args.kv_channels or args.hidden_size // args.num_attention_heads,
        vocab_size=args.vocab_size,
        padded_vocab_size=padded_vocab_size(args.vocab_size),
        max_position_embeddings=args.context,
        untie_embeddings_and_output_weights=True,
    )
