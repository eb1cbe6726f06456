"""A machine that was measured, as a file: what `megatron_dcp.calibration` writes and the planner reads."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron_dcp.planner.machine import AttentionRate, CollectiveRate, Machine

FORMAT = "megatron_dcp machine 1"
_REMEDY = "write it anew with `megatron-dcp plan --calibrate FILE.json`"


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
        ValueError: The file is another one, or broken.
        OSError: It cannot be read.
    """
    text = Path(path).read_bytes()
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)!r} is no measured machine; {_REMEDY}")
    try:
        return _read(content["machine"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)!r} is a broken measurement ({error}); {_REMEDY}") from None


def _read(values: dict[str, Any]) -> Machine:
    values = dict(values)
    attention = tuple(AttentionRate(**each) for each in values.pop("attention"))
    collectives = tuple(CollectiveRate(**each) for each in values.pop("collectives"))
    machine = Machine(**values, attention=attention, collectives=collectives)
    for name, value in _numbers(machine):
        zero = name.endswith("_s") and name != "bytes_per_s"  # times may be too short to measure, rates may not
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is no number")
        if value < 0 or (value == 0 and not zero) or (name == "imbalance" and value < 1):
            raise ValueError(f"{name} is {value}")
    if not {"float32", "bfloat16", "fp8"} <= set(machine.flops):
        raise ValueError("flops lack a dtype")
    return machine


def _numbers(machine: Machine) -> list[tuple[str, Any]]:
    own = [(each.name, getattr(machine, each.name)) for each in fields(machine)]
    numbers = [pair for pair in own if pair[0] not in ("name", "flops", "attention", "collectives")]
    numbers += [("flops", value) for value in machine.flops.values()]
    for rate in (*machine.attention, *machine.collectives):
        numbers += [pair for pair in vars(rate).items() if pair[0] not in ("kv_dtype", "latent", "op")]
    return numbers
