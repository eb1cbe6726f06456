"""Machines of known GPUs, from NVIDIA's data sheets. What is assumed on top of them stands in `REACHED` and below."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_dcp.planner.closest import look_up
from megatron_dcp.planner.machine import Machine
from megatron_dcp.planner.measured import load_machine

# Assumptions: shares of the data sheet's rates that large kernels and large messages reach.
REACHED = {"memory": 0.8, "flops": 0.6, "link": 0.75, "network": 0.8}
# Assumptions, about what NCCL and captured CUDA graphs take: 14 us for a small all-reduce of 8 GPUs over NVLink, and a
# dozen kernels of some 1.5 us for a layer.
COLLECTIVE_S = 8e-6
LINK_STEP_S = 1e-6
NETWORK_STEP_S = 5e-6
LAYER_S = 20e-6
STEP_S = 500e-6
TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True)
class _Sheet:
    """A data sheet.

    Attributes:
        memory: Bytes. ``bandwidth``: bytes/s. ``fp32``: FLOP/s outside tensor cores. ``bf16`` and ``fp8``: dense, that
            is half of what a sheet states with sparsity; without fp8, products run in bf16.
        link: NVLink bytes/s in one direction, half of what a sheet states. ``domain``: GPUs that NVLink connects.
        network: Bytes/s of the network adapters that the vendor's own system has for each GPU.
    """

    memory: float
    bandwidth: float
    fp32: float
    bf16: float
    fp8: float
    link: float
    domain: int
    network: float


_SHEETS = {
    # "NVIDIA A100 Tensor Core GPU" data sheet; DGX A100: one 200 Gb/s ConnectX-6 per GPU
    "A100-40GB": _Sheet(40 * GIGA, 1.555 * TERA, 19.5 * TERA, 312 * TERA, 312 * TERA, 300 * GIGA, 8, 25 * GIGA),
    "A100-80GB": _Sheet(80 * GIGA, 2.039 * TERA, 19.5 * TERA, 312 * TERA, 312 * TERA, 300 * GIGA, 8, 25 * GIGA),
    # "NVIDIA H100 Tensor Core GPU" data sheet, SXM; DGX H100: one 400 Gb/s ConnectX-7 per GPU
    "H100": _Sheet(80 * GIGA, 3.35 * TERA, 67 * TERA, 989 * TERA, 1979 * TERA, 450 * GIGA, 8, 50 * GIGA),
    # "NVIDIA H200 Tensor Core GPU" data sheet, SXM; DGX H200 as above
    "H200": _Sheet(141 * GIGA, 4.8 * TERA, 67 * TERA, 989 * TERA, 1979 * TERA, 450 * GIGA, 8, 50 * GIGA),
    # "NVIDIA DGX B200" data sheet: 1,440 GB and 64 TB/s over 8 GPUs, NVLink 14.4 TB/s; HGX B200 FLOP/s per GPU
    "B200": _Sheet(180 * GIGA, 8 * TERA, 80 * TERA, 2250 * TERA, 4500 * TERA, 900 * GIGA, 8, 50 * GIGA),
    # "NVIDIA GB200 NVL72" data sheet, a 72nd of the rack: 13.4 TB, 576 TB/s, 360 PFLOP/s bf16 and 720 fp8 (sparse)
    "GB200": _Sheet(186 * GIGA, 8 * TERA, 80 * TERA, 2500 * TERA, 5000 * TERA, 900 * GIGA, 72, 50 * GIGA),
}
_ALIASES = {"A100": "A100-80GB", "A100-40": "A100-40GB", "A100-80": "A100-80GB", "H100-SXM": "H100", "H200-SXM": "H200"}
NAMES = tuple(_SHEETS)


def machine(name: str) -> Machine:
    """The machine of GPUs of this name, in any case; or one that was measured, by the name of its file.

    Raises:
        ValueError: No such GPU is known; the closest ones are named. Or the file is not a measured machine.
    """
    if name.lower().endswith(".json") or os.sep in name or os.path.isfile(name):
        return load_machine(name)
    known = look_up("GPU", name, _SHEETS, _ALIASES)
    sheet = _SHEETS[known]
    rates = {"float32": sheet.fp32, "bfloat16": sheet.bf16, "fp8": sheet.fp8}
    return Machine(
        name=known,
        memory_bytes=sheet.memory,
        memory_bandwidth=sheet.bandwidth * REACHED["memory"],
        flops={dtype: rate * REACHED["flops"] for dtype, rate in rates.items()},
        link_bandwidth=sheet.link * REACHED["link"],
        link_gpus=sheet.domain,
        network_bandwidth=sheet.network * REACHED["network"],
        collective_s=COLLECTIVE_S,
        link_step_s=LINK_STEP_S,
        network_step_s=NETWORK_STEP_S,
        layer_s=LAYER_S,
        step_s=STEP_S,
    )
