"""Everything that is measured, in order, as a `Machine`."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import distributed

from megatron_dcp import parallel_state
from megatron_dcp._cpu import default_device
from megatron_dcp.calibration.attention import attention_rates, chunk_rates, imbalance
from megatron_dcp.calibration.clock import Clock
from megatron_dcp.calibration.rates import collective_rates, groups_of_world, memory_bandwidth, product_rate
from megatron_dcp.calibration.steps import activations, overheads, shared_overheads
from megatron_dcp.comm.collectives import gather_objects
from megatron_dcp.planner.machine import CollectiveRate, Machine, num_steps

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def calibrate() -> Machine:
    """Measure this machine with all ranks of the world, each on its GPU or with its threads. All ranks call it.

    Makes and destroys process groups of its own.

    Returns:
        The same on every rank.

    Raises:
        ValueError: On every rank: Megatron's or this package's groups exist already.
        RuntimeError: ``torch.distributed`` is not initialised.
    """
    if not distributed.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call initialize_distributed() first")
    if parallel_state.megatron_is_initialized() or parallel_state.is_initialized():
        raise ValueError("process groups exist already; calibrate before initialize_model_parallel, or in a new run")
    clock = Clock(default_device())
    world, local = clock.world.size(), int(os.environ.get("LOCAL_WORLD_SIZE", clock.world.size()))
    dtype = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
    flops = {name: product_rate(clock, getattr(torch, name)) for name in ("float32", "bfloat16")}
    memory = memory_bandwidth(clock, dtype)
    attention, chunks = tuple(attention_rates(clock)), tuple(chunk_rates(clock))
    groups = groups_of_world()
    try:
        collectives = tuple(collective_rates(clock, groups))
    finally:
        for group in groups.values():
            distributed.destroy_process_group(group)
    # Groups differ from rank to rank, and their numbers a little: the first rank's are everybody's.
    collectives = gather_objects(collectives, clock.world)[0]
    inside = _fit([one for one in collectives if one.span <= local])
    between = _fit([one for one in collectives if one.span > local])
    start, step, bandwidth = inside or between or (0.0, 0.0, memory)
    _, network_step, network = between or (start, step, bandwidth)
    machine = Machine(
        name=device_name(clock.device),
        memory_bytes=_memory_bytes(clock.device, local),
        memory_bandwidth=memory,
        flops={**flops, "fp8": flops["bfloat16"]},
        link_bandwidth=bandwidth,
        link_gpus=local,
        network_bandwidth=network,
        collective_s=start,
        link_step_s=step,
        network_step_s=network_step,
        layer_s=0.0,
        step_s=0.0,
        attention=attention,
        chunks=chunks,
        imbalance=imbalance(clock),
        collectives=collectives,
        ranks=world,
    )
    machine = replace(machine, **overheads(clock, dtype, machine)._asdict())
    if world > 1:
        followers, merge = shared_overheads(clock, dtype, machine)
        machine = replace(machine, followers_s=followers, merge_s=merge)
    machine = replace(machine, activations=activations(clock, dtype, machine))
    again = memory_bandwidth(clock, dtype)
    return replace(machine, drift=max(memory, again) / min(memory, again) - 1)


def about_machine() -> dict[str, Any]:
    """How a measurement is made, for its reader."""
    return {
        "device": device_name(default_device()),
        "ranks": distributed.get_world_size(),
        "threads_per_rank": torch.get_num_threads(),
        "communication": distributed.get_backend(),
        "torch": torch.__version__,
    }


def device_name(device: torch.device) -> str:
    """What the system calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _memory_bytes(device: torch.device, local_ranks: int) -> float:
    """Of a rank: its GPU's, or its share of what this machine, or its container, has."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        total = min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        pass  # no container, or "max"
    return total / local_ranks


def _fit(rates: Sequence[CollectiveRate]) -> tuple[float, float, float] | None:
    """Start of a collective, time of one of its steps, and bandwidth: for groups that were not measured."""
    if not rates:
        return None
    kinds: dict[tuple[str, int, int], list[CollectiveRate]] = {}
    for one in rates:
        kinds.setdefault((one.op, one.ranks, one.span), []).append(one)
    counts = [num_steps(op, ranks) for op, ranks, _ in kinds]
    smallest, largest = ([sizes[index] for sizes in kinds.values()] for index in (0, -1))
    middle, latency = mean(counts), mean(one.seconds for one in smallest)
    spread = sum((count - middle) ** 2 for count in counts)
    slope = sum((count - middle) * one.seconds for count, one in zip(counts, smallest, strict=True)) / (spread or 1.0)
    step = max(0.0, slope)
    return max(0.0, latency - step * middle), step, median(one.bytes / one.seconds for one in largest)
