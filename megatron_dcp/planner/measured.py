"""A machine that was measured, as a file: what `megatron_dcp.calibration` writes and the planner reads."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from megatron_dcp.config import KVCacheDtype
from megatron_dcp.planner.machine import AttentionRate, ChunkRate, CollectiveRate, Machine

FORMAT = "megatron_dcp machine 1"
MOST_BYTES = 16 << 20  # of a file that is worth reading
_COMMAND = "`megatron-dcp plan --calibrate FILE.json`"
_REMEDY = f"write it anew with {_COMMAND}"


def save_machine(machine: Machine, path: str | os.PathLike[str], about: dict[str, Any]) -> None:
    """Write a measured machine, the whole file or nothing.

    Args:
        about: How it was measured, for the reader.
    """
    content = {"format": FORMAT, "about": about, "machine": asdict(machine)}
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load_machine(path: str | os.PathLike[str]) -> Machine:
    """Read what `save_machine` wrote.

    Raises:
        ValueError: There is no such file, or it is another one, or broken.
    """
    name = repr(os.fspath(path))
    if not os.path.isfile(path):
        what = "is no file" if os.path.exists(path) else "does not exist"
        raise ValueError(f"{name} {what}; write it with {_COMMAND}")
    try:
        content = json.loads(Path(path).read_bytes()) if os.path.getsize(path) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        content = None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}; {_REMEDY}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{name} is no measured machine; {_REMEDY}")
    try:
        return _machine(content.get("machine"))
    except ValueError as error:
        raise ValueError(f"{name} is a broken measurement: {error}; {_REMEDY}") from None


def _machine(values: Any) -> Machine:
    own = _checked("machine", values, Machine)
    for name, kind in _LISTS.items():
        if not isinstance(own[name], list):
            raise ValueError(f"{name} is no list")
        own[name] = tuple(kind(**_checked(name, each, kind)) for each in own[name])
    machine = Machine(**own)
    _distinct("attention", [(one.kv_dtype, one.head_dim, one.latent, one.rows) for one in machine.attention])
    _distinct("chunks", [(one.dtype, one.head_dim) for one in machine.chunks])
    _distinct("collectives", [(one.op, one.ranks, one.span, one.bytes) for one in machine.collectives])
    return machine


def _checked(what: str, values: Any, kind: type) -> dict[str, Any]:
    """The fields of ``kind``, all of them and no others, each of its kind and within its bounds."""
    names = {each.name for each in fields(kind)}
    if not isinstance(values, dict) or set(values) != names:
        missing = sorted(names - set(values)) if isinstance(values, dict) else sorted(names)
        raise ValueError(
            f"{what} lacks {missing[0]}" if missing else f"{what} has more than {', '.join(sorted(names))}"
        )
    for name, value in values.items():
        if name == "flops" and kind is Machine:
            if not isinstance(value, dict) or set(value) != {"float32", "bfloat16", "fp8"}:
                raise ValueError("flops are to be those of float32, bfloat16 and fp8")
            for dtype, rate in value.items():
                _check_number(f"flops of {dtype}", rate, *_RATE)
        elif name in _CHOICES:
            if value not in _CHOICES[name]:
                raise ValueError(f"{name} is {value!r:.40}, not one of {', '.join(map(str, _CHOICES[name]))}")
        elif name == "name":
            if not isinstance(value, str) or not value.isprintable() or len(value) > 200:
                raise ValueError("name is no line of text")
        elif name not in _LISTS:
            _check_number(name, value, *_BOUNDS.get(name, _TIME))
    return dict(values)


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    whole = name in _WHOLE
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r:.40}, not a {'whole ' if whole else ''}number from {low:g} to {high:g}")


def _distinct(what: str, points: list[Any]) -> None:
    if len(set(points)) < len(points):
        raise ValueError(f"{what} has two rates of the same")


_LISTS = {"attention": AttentionRate, "chunks": ChunkRate, "collectives": CollectiveRate}
_TIME, _RATE, _COUNT = (0, 1e6), (1, 1e24), (1, 1e6)
_WHOLE = ("ranks", "span", "link_gpus", "rows", "head_dim")
_BOUNDS = {
    **dict.fromkeys(
        ("memory_bytes", "memory_bandwidth", "link_bandwidth", "network_bandwidth", "bytes_per_s", "flops"), _RATE
    ),
    **dict.fromkeys(_WHOLE, _COUNT),
    "bytes": _RATE,
    "seconds": (1e-12, 1e6),
    "imbalance": (1, 1e6),
}
_CHOICES = {
    "kv_dtype": get_args(KVCacheDtype)[1:],  # all but auto
    "dtype": ("float32", "bfloat16"),
    "op": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring"),
    "latent": (True, False),
}
