"""``megatron-dcp env``: what is installed here, and which attention back end can serve what, or why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_dcp.cli import arguments

if TYPE_CHECKING:
    from megatron_dcp.attention import AttentionSpec
    from megatron_dcp.attention.libraries import Library

EXAMPLE = "  megatron-dcp env --json"


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = arguments.new_parser(
        commands,
        "env",
        "Show versions, GPUs, and which attention back ends can be used here.",
        "For a typical KV pool of each kind it says which back end is chosen, and why others are not.",
        EXAMPLE,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print; the exit code."""
    found = collect()
    print(json.dumps(found, indent=1) if args.json else render(found), flush=True)
    return 0


def collect() -> dict[str, Any]:
    """What the command shows, for JSON. For every back end and kind of pool: ``None`` if it serves it, else why not."""
    import torch

    from megatron_dcp import __version__
    from megatron_dcp.attention import BACKENDS, VARIABLE

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    pools = typical_pools(torch.device("cuda", 0) if gpus else torch.device("cpu"))
    choices = {name: _choose(spec) for name, spec in pools.items()}
    return {
        "megatron_dcp": __version__,
        "python": platform.python_version(),
        "megatron_core": _version("megatron-core"),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "gpus": [
            {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory_bytes": gpu.total_memory}
            for gpu in gpus
        ],
        "libraries": {name: _describe(names, library) for name, names, library in _libraries()},
        VARIABLE: os.environ.get(VARIABLE),
        "backends": {kind.name: {name: kind().supports(spec) for name, spec in pools.items()} for kind in BACKENDS},
        "chosen": {name: chosen for name, (chosen, _) in choices.items()},
        "problems": {name: problem for name, (_, problem) in choices.items() if problem is not None},
    }


def typical_pools(device: Any) -> dict[str, AttentionSpec]:
    """A pool of each kind on a device, with the default size of blocks."""
    import torch

    from megatron_dcp.attention import AttentionSpec
    from megatron_dcp.config import CacheConfig

    heads = AttentionSpec(
        heads=32,
        kv_heads=8,
        head_dim=128,
        v_dim=128,
        dtype=torch.bfloat16,
        device=device,
        block_size=CacheConfig().block_size,
    )
    return {
        "GQA bf16": heads,
        "MLA bf16": replace(heads, heads=16, kv_heads=1, head_dim=576, v_dim=512, v_in_k=True),
        "GQA fp8": replace(heads, dtype=torch.float8_e4m3fn),
        "windows bf16": replace(heads, windows=True),
    }


def _libraries() -> list[tuple[str, tuple[str, ...], Callable[[], Library] | None]]:
    """Name, distributions that may bring it, and how it is imported (``None``: it is not, here)."""
    from megatron_dcp.attention import flash, flash_mla, flashinfer, te

    return [
        ("TransformerEngine", ("transformer_engine",), te.library),
        ("FlashAttention 3", ("flash_attn_3",), flash.library_3),
        ("FlashAttention 2", ("flash_attn",), flash.library_2),
        ("FlashInfer", ("flashinfer-python",), flashinfer.library),
        ("FlashMLA", ("flash_mla",), flash_mla.library),
        ("Triton", ("triton",), None),
    ]


def _describe(names: tuple[str, ...], library: Callable[[], Library] | None) -> dict[str, str | None]:
    version = next((found for found in map(_version, names) if found is not None), None)
    if library is None:
        return {"version": version, "problem": None if version is not None else "not installed"}
    return {"version": version, "problem": library().missing}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _choose(spec: AttentionSpec) -> tuple[str | None, str | None]:
    """The back end's name, or why there is none."""
    from megatron_dcp.attention import choose_backend

    try:
        return choose_backend("auto", spec).backend.name, None
    except ValueError as error:
        return None, str(error)


def render(found: dict[str, Any]) -> str:
    """The same for people."""
    from megatron_dcp.attention import VARIABLE

    gpus = [f"{gpu['name']} ({gpu['capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in found["gpus"]]
    versions = [("megatron-dcp", "megatron_dcp"), ("Python", "python"), ("Megatron-Core", "megatron_core")]
    versions += [("torch", "torch"), ("CUDA", "cuda"), ("cuDNN", "cudnn")]
    head = [[label, str(found[key] or "none")] for label, key in versions]
    lines = _table([*head, *(["GPU" if len(gpus) < 2 else f"GPU {i}", gpu] for i, gpu in enumerate(gpus or ["none"]))])
    lines += ["", *_table([["library", "version"], *map(_library_row, found["libraries"].items())])]
    pools = list(found["chosen"])
    yes = [[name, *("no" if row[pool] else "yes" for pool in pools)] for name, row in found["backends"].items()]
    known = [name or "none" for name in found["chosen"].values()]
    lines += ["", *_table([["back end", *pools], *yes, ["chosen", *known]])]
    if found[VARIABLE]:
        lines += ["", f"{VARIABLE}={found[VARIABLE]}"]
    lines += [f"{pool}: {problem}" for pool, problem in found["problems"].items()]
    reasons = [
        f"{name}: {reason} [{', '.join(pool for pool in pools if row[pool] == reason)}]"
        for name, row in found["backends"].items()
        for reason in dict.fromkeys(filter(None, row.values()))
    ]
    return "\n".join([*lines, *(["", "why not:", *(f"  {reason}" for reason in reasons)] if reasons else [])])


def _library_row(item: tuple[str, dict[str, str | None]]) -> list[str]:
    name, about = item
    problem = about["problem"]
    if about["version"] is None and problem is not None and "not installed" in problem:
        return [name, "not installed"]
    return [name, (about["version"] or "unknown") + (f": {problem}" if problem else "")]


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
