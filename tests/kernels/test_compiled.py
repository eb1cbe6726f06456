"""Every kernel compiled for real GPUs, without one: what the interpreter forgives (types, tile sizes, shared memory).

A launcher is called with a recorder in the kernel's place, and what it would have launched is compiled.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: nothing can be compiled", allow_module_level=True)

from megatron_dcp.kernels import attention, merging, write  # noqa: E402

SHARED_BYTES = {
    80: 163 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # of a block: CUDA programming guide, "compute capabilities"
SPILL_BYTES = 64  # of a thread's stack; a tile that is too large takes hundreds
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Recorder:
    """In a kernel's place: keeps what it is launched with."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            assert not self.named, "one launch"
            self.arguments, self.named = arguments, named

        return launch


def compiled(module: Any, name: str, target: int, launch: Callable[[], Any], where: Path) -> Any:
    """The kernel as Triton's launcher would specialise it: aligned pointers, ints that are 1 or multiples of 16."""
    kernel, recorder = getattr(module, name), Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, recorder)
        patch.setenv("TRITON_CACHE_DIR", str(where))
        launch()
        named = dict(recorder.named)
        options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
        values = dict(zip(kernel.arg_names, recorder.arguments, strict=False)) | named
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            varies = parameter.do_not_specialize
            if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not varies):
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = value
                continue
            signature[parameter.name] = (
                TYPES[value.dtype] if isinstance(value, Tensor) else "i32" if isinstance(value, int) else "fp32"
            )
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and not varies):
                attributes[index,] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
        gpu = triton.backends.compiler.GPUTarget("cuda", target, 32)
        return triton.compile(source, target=gpu, options=options)


def check(kernel: Any, target: int, where: Path) -> None:
    assert f".target sm_{target}" in kernel.asm["ptx"] and len(kernel.asm["cubin"]) > 1000
    assert kernel.metadata.shared <= SHARED_BYTES[target]
    binary = where / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True).stdout
    print(f"sm_{target} {kernel.metadata.name}: {kernel.metadata.shared} B shared, {usage.splitlines()[-1].strip()}")
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    if target == 90:
        assert int(stack) <= SPILL_BYTES, usage


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
GQA = (32, 8, 128, 128, False)
LATENT = (128, 1, 576, 512, True)
Shape = tuple[int, int, int, int, bool]
ATTENTION: list[tuple[int, Shape, int, torch.dtype, torch.dtype, bool]] = [
    # target, heads .. v_in_k, tokens of a sequence, queries, pool, window
    *((target, shape, 1, BF16, BF16, False) for target in (80, 90, 100) for shape in (GQA, LATENT)),
    *((90, shape, 1, BF16, FP8, False) for shape in (GQA, LATENT)),
    (80, GQA, 1, BF16, torch.int8, False),
    (100, GQA, 1, BF16, FP8, False),
    (90, GQA, 64, torch.float16, torch.float16, True),
    (90, (16, 16, 192, 128, False), 16, BF16, torch.int8, True),
    (90, LATENT, 4, torch.float32, torch.float32, False),
    *((90, shape, 64, torch.float32, dtype, False) for shape in (GQA, LATENT) for dtype in (BF16, torch.int8)),
    (80, LATENT, 1, torch.float32, FP8, False),
    (90, (8, 4, 256, 256, False), 16, torch.float32, torch.int8, True),
    (90, GQA, 1, torch.float16, BF16, False),
    (90, (4, 4, 576, 512, False), 1, BF16, BF16, False),  # the widest
]


@pytest.mark.parametrize("target,shape,tokens,q_dtype,dtype,windows", ATTENTION)
def test_attention(
    target: int, shape: Shape, tokens: int, q_dtype: torch.dtype, dtype: torch.dtype, windows: bool, tmp_path: Path
) -> None:
    N, K, H, V, v_in_k = shape
    q_TNH = torch.zeros(tokens, N, H, dtype=q_dtype)
    k_SKH = torch.zeros(64, K, H, dtype=dtype)
    v_SKV = k_SKH[..., :V] if v_in_k else torch.zeros(64, K, V, dtype=dtype)
    scale_SK = torch.zeros(64, K) if dtype.itemsize == 1 else None
    ints = torch.zeros(64, dtype=torch.int32)
    rows = attention.tiling(H, V, v_in_k, attention.tile_dtype(q_dtype, dtype), tokens * N // K).rows

    def launch() -> None:
        attention.launch_attention(
            q_TNH, k_SKH, v_SKV, scale_SK, scale_SK, ints.view(-1, 2), ints, ints, ints if windows else None,
            ints.view(1, -1), 64, v_in_k, tokens > 1, 1, rows, 0.1,
        )  # fmt: skip

    check(compiled(attention, "_paged_attention", target, launch, tmp_path), target, tmp_path)


@pytest.mark.parametrize(
    "target,dtype,v_in_k",
    [
        (80, BF16, False),
        (80, FP8, False),
        (90, BF16, True),
        (90, FP8, False),
        (90, torch.int8, True),
        (100, FP8, False),
    ],
)
def test_write(target: int, dtype: torch.dtype, v_in_k: bool, tmp_path: Path) -> None:
    K, H, V = (1, 576, 512) if v_in_k else (8, 128, 128)
    k_tKH, v_tKV = torch.zeros(4, K, H, dtype=BF16), None if v_in_k else torch.zeros(4, K, V, dtype=BF16)
    k_SKH = torch.zeros(64, K, H, dtype=dtype)
    v_SKV = k_SKH[..., :V] if v_in_k else torch.zeros(64, K, V, dtype=dtype)
    scale_SK = torch.zeros(64, K) if dtype.itemsize == 1 else None
    slot_t = torch.arange(4)

    def launch() -> None:
        write.launch_write(slot_t, k_tKH, v_tKV, k_SKH, v_SKV, scale_SK, scale_SK)

    check(compiled(write, "_write_kv", target, launch, tmp_path), target, tmp_path)


@pytest.mark.parametrize(
    "target,name", [(80, "_merge"), (90, "_merge"), (90, "_merge of splits"), (90, "_share"), (90, "_pack")]
)
def test_merging(target: int, name: str, tmp_path: Path) -> None:
    packed = torch.zeros(8, 64, 32, 129)
    out_PTNH, lse_PTN = packed[..., :128], packed[..., 128]

    def launch() -> None:
        if name == "_merge":
            merging.launch_merge(out_PTNH, lse_PTN)
        elif name == "_merge of splits":
            merging.launch_merge(torch.zeros(66, 1, 128, 512), torch.zeros(66, 1, 128))
        elif name == "_share":
            merging.launch_share(out_PTNH[0], lse_PTN, 3, torch.zeros(32, 64, 128).transpose(0, 1))
        else:
            merging.launch_pack(out_PTNH[0], lse_PTN[0])

    check(compiled(merging, name.split()[0], target, launch, tmp_path), target, tmp_path)
