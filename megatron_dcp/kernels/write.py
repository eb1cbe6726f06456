"""Keys and values of new tokens to their slots in Triton: converted or quantised, both in one launch.

Shapes: ``t`` tokens, ``S`` slots, ``K`` KV heads, ``H`` head dim of the keys, ``V`` of the values; in the kernel ``M``
heads of a token, ``D`` dims.

What is stored is what torch stores (`megatron_dcp.shard.quantise`), bit for bit. Roundings to bfloat16 and e4m3 are
made of integers: the interpreter's own are not to nearest, and a GPU before capability 8.9 has none to e4m3.
"""

# mypy: disable-error-code="no-untyped-def", allow-untyped-decorators
# What Triton compiles is no Python that could be typed.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_dcp.kernels.twins import store_slots
from megatron_dcp.shard import is_quantised

TILE = 2048  # numbers of a program


@triton.jit
def _bfloat16(x):
    """To nearest, ties to even; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _e4m3_bits(x):
    """Of ``|x| <= 448``, to nearest, ties to even; NaN is 0x7f."""
    bits = x.to(tl.uint32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # exponent bias 127 to 7; a carry out of the 3 bits of mantissa steps the exponent, as it should
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # below 2^-6 steps are 2^-9: adding 2^14, whose own steps these are, rounds to them
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return (tl.where(x != x, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _store(
    x_KD, stored_KD, scale_K, head_M, live_M,
    x_K, stored_K, scale_stride, DIM: tl.constexpr, D: tl.constexpr, LARGEST_NUMBER: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Heads of one token. ``KIND``: what the pool stores, ``cast``, ``bfloat16``, ``float8_e4m3fn`` or ``int8``."""
    d_D = tl.arange(0, D)
    real_MD = live_M[:, None] & (d_D < DIM)[None, :]
    x_MD = tl.load(x_KD + head_M[:, None] * x_K + d_D[None, :], mask=real_MD, other=0.0).to(tl.float32)
    to_MD = stored_KD + head_M[:, None] * stored_K + d_D[None, :]
    if KIND == "cast":
        tl.store(to_MD, x_MD.to(stored_KD.dtype.element_ty), mask=real_MD)
    elif KIND == "bfloat16":
        tl.store(to_MD, _bfloat16(x_MD), mask=real_MD)
    else:
        bad_M = tl.max((x_MD != x_MD).to(tl.int32), 1) > 0  # a maximum of floats skips NaN
        peak_M = tl.where(bad_M, float("nan"), tl.max(tl.abs(x_MD), 1))
        scale_M = tl.where(peak_M == 0.0, 1.0, tl.div_rn(peak_M, tl.full(peak_M.shape, LARGEST_NUMBER, tl.float32)))
        ratio_MD = tl.div_rn(x_MD, tl.broadcast_to(scale_M[:, None], x_MD.shape))
        ratio_MD = tl.where(ratio_MD > LARGEST_NUMBER, LARGEST_NUMBER, ratio_MD)
        ratio_MD = tl.where(ratio_MD < -LARGEST_NUMBER, -LARGEST_NUMBER, ratio_MD)
        if KIND == "int8":
            # 1.5 * 2^23, whose steps are 1: adding it rounds to nearest, ties to even
            whole_MD = (ratio_MD + 12582912.0) - 12582912.0
            tl.store(to_MD, tl.where(ratio_MD != ratio_MD, 0.0, whole_MD).to(tl.int8), mask=real_MD)
        else:
            tl.store(to_MD, _e4m3_bits(ratio_MD), mask=real_MD)
        tl.store(scale_K + head_M * scale_stride, scale_M, mask=live_M)


@triton.jit
def _write_kv(
    slot_t, k_tKH, v_tKV, k_SKH, v_SKV, k_scale_SK, v_scale_SK,
    slots, heads, k_t, k_K, v_t, v_K, kS_S, kS_K, vS_S, vS_K, scale_S, scale_K,
    H: tl.constexpr, V: tl.constexpr, M: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    LARGEST_NUMBER: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One token and ``M`` of its heads; keys where the third index is 0, values where it is 1."""
    token = tl.program_id(0).to(tl.int64)
    head_M = tl.program_id(1) * M + tl.arange(0, M)
    live_M = head_M < heads
    head_M = head_M.to(tl.int64)
    slot = tl.load(slot_t + token).to(tl.int64)
    if (slot >= 0) & (slot < slots):
        scale = slot * scale_S
        if tl.program_id(2) == 0:
            k_KH, stored_KH = k_tKH + token * k_t, k_SKH + slot * kS_S
            _store(
                k_KH, stored_KH, k_scale_SK + scale, head_M, live_M, k_K, kS_K, scale_K, H, D_K, LARGEST_NUMBER, KIND
            )
        else:
            v_KV, stored_KV = v_tKV + token * v_t, v_SKV + slot * vS_S
            _store(
                v_KV, stored_KV, v_scale_SK + scale, head_M, live_M, v_K, vS_K, scale_K, V, D_V, LARGEST_NUMBER, KIND
            )


def launch_write(
    slot_t: Tensor, k_tKH: Tensor, v_tKV: Tensor | None,
    k_SKH: Tensor, v_SKV: Tensor, k_scale_SK: Tensor | None, v_scale_SK: Tensor | None,
) -> None:  # fmt: skip
    """See :meth:`megatron_dcp.cache.pool.KVPool.write`; any strides but for dims that lie side by side.

    Args:
        slot_t: int64 ``[t]``; what is below 0 or beyond the pool is skipped.
        v_tKV: ``None``: only keys are written.
    """
    t, K, H = k_tKH.shape
    V = v_SKV.shape[2]
    assert k_tKH.shape[1:] == k_SKH.shape[1:] and len(slot_t) == t, (k_tKH.shape, k_SKH.shape, slot_t.shape)
    assert v_tKV is None or v_tKV.shape == (t, *v_SKV.shape[1:]), (k_tKH.shape, v_SKV.shape)
    assert k_SKH.stride(2) == v_SKV.stride(2) == 1
    if not t:
        return
    k_tKH = k_tKH if k_tKH.stride(2) == 1 else k_tKH.contiguous()
    v = k_tKH if v_tKV is None else v_tKV if v_tKV.stride(2) == 1 else v_tKV.contiguous()
    quantised = is_quantised(k_SKH.dtype)
    k_scale, v_scale = (slot_t if x is None else x for x in (k_scale_SK, v_scale_SK))  # any address where there is none
    if k_SKH.dtype == torch.float8_e4m3fn:
        k_SKH, v_SKV = k_SKH.view(torch.uint8), v_SKV.view(torch.uint8)
        kind = "float8_e4m3fn"
    else:
        kind = {torch.int8: "int8", torch.bfloat16: "bfloat16"}.get(k_SKH.dtype, "cast")
    D_K, D_V = triton.next_power_of_2(H), triton.next_power_of_2(V)
    M = min(triton.next_power_of_2(K), max(1, TILE // max(D_K, D_V)))
    _write_kv[(t, triton.cdiv(K, M), 1 if v_tKV is None else 2)](
        slot_t, k_tKH, v, k_SKH, v_SKV, k_scale, v_scale,
        len(k_SKH), K, *k_tKH.stride()[:2], *v.stride()[:2], *k_SKH.stride()[:2], *v_SKV.stride()[:2],
        *(k_scale.stride()[:2] if quantised else (0, 0)),
        H=H, V=V, M=M, D_K=D_K, D_V=D_V, LARGEST_NUMBER=127.0 if kind == "int8" else 448.0, KIND=kind,
        num_warps=4 if M * D_K >= 512 else 1,
    )  # fmt: skip


@torch.library.custom_op(
    "megatron_dcp::write_kv", mutates_args=("k_SKH", "v_SKV", "k_scale_SK", "v_scale_SK"), device_types="cuda"
)
def write_kv(
    slot_t: Tensor, k_tKH: Tensor, v_tKV: Tensor | None,
    k_SKH: Tensor, v_SKV: Tensor | None, k_scale_SK: Tensor | None, v_scale_SK: Tensor | None,
) -> None:  # fmt: skip
    """:func:`launch_write` as one operator; without values ``v_SKV`` and its scales are ``None``. Its twin on a CPU."""
    launch_write(slot_t, k_tKH, v_tKV, k_SKH, k_SKH if v_SKV is None else v_SKV, k_scale_SK, v_scale_SK)


@write_kv.register_kernel("cpu")
def _(
    slot_t: Tensor, k_tKH: Tensor, v_tKV: Tensor | None,
    k_SKH: Tensor, v_SKV: Tensor | None, k_scale_SK: Tensor | None, v_scale_SK: Tensor | None,
) -> None:  # fmt: skip
    store_slots(slot_t, k_tKH, k_SKH, k_scale_SK)
    if v_tKV is not None:
        assert v_SKV is not None
        store_slots(slot_t, v_tKV, v_SKV, v_scale_SK)


@write_kv.register_fake
def _(*arguments):
    return None
