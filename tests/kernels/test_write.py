"""The kernel that writes keys and values: what is stored is what torch stores, bit for bit."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted

from megatron_dcp.cache.pool import KVPool, SlotOrder
from megatron_dcp.kernels.twins import store_slots
from megatron_dcp.shard import Shard

pytest.importorskip("triton", reason="triton is not installed")

ORDERS = ["slots_first", "heads_first"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """The same bits; any NaN is a NaN."""
    if one is None or other is None:
        return one is other
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.dtype.itemsize]
    equal = one.contiguous().view(bits) == other.contiguous().view(bits)
    return bool((equal | (one.float().isnan() & other.float().isnan())).all())


def twin(slot_t: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, shard: Shard) -> None:
    store_slots(slot_t, k, shard.k_SKH, shard.k_scale_SK)
    if v is not None:
        store_slots(slot_t, v, shard.v_SKV, shard.v_scale_SK)


def write_as_the_twin_does(order: SlotOrder, dtype: torch.dtype, source: torch.dtype, v_in_k: bool) -> None:
    from megatron_dcp.kernels.write import launch_write

    torch.manual_seed(0)
    kernel, torch_ = (KVPool(1, 5, 4, 3, 24, 16, v_in_k=v_in_k, dtype=dtype, order=order) for _ in range(2))
    for pool in (kernel, torch_):
        pool.clear()
    slot_t = torch.tensor([19, -1, 0, 7, 8, -1, 3])
    sizes = torch.tensor([1e-6, 1.0, 1.0, 100.0, 0.0, 1.0, 1.0])
    qkv = (torch.randn(7, 3, 60) * sizes[:, None, None]).to(source)
    qkv[6, 1, 13], qkv[6, 1, 50], qkv[6, 2, 20] = torch.nan, torch.nan, torch.inf
    k, v = qkv[..., 10:34], None if v_in_k else qkv[..., 40:56]
    launch_write(slot_t, k, v, *kernel.layer(0))
    twin(slot_t, k, v, torch_.layer(0))
    for name, one, other in zip(Shard._fields, kernel.layer(0), torch_.layer(0), strict=True):
        assert same(one, other), name
    assert kernel.layer(0).k_SKH[19].float().abs().sum() > 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("v_in_k", [False, True])
def test_write(order: SlotOrder, dtype: torch.dtype, source: torch.dtype, v_in_k: bool) -> None:
    interpreted(write_as_the_twin_does, order, dtype, source, v_in_k)


def round_as_torch_does(dtype: torch.dtype) -> None:
    """Heads whose largest number makes their scale 1, so that all others are rounded as they are."""
    from megatron_dcp.kernels.write import launch_write

    torch.manual_seed(0)
    shard, expected = (Shard(*(torch.zeros(64, 1, 256, dtype=dtype),) * 2, *(torch.zeros(64, 1),) * 2) for _ in "ab")
    largest = LARGEST.get(dtype, 1e30)
    if dtype == torch.bfloat16:
        bits = torch.arange(64 * 255) * 263717 % 2**31
        bits[::2] = bits[::2] & ~0xFFFF | 0x8000  # ties
        every = bits.to(torch.int32).view(torch.float32)
        shard, expected = (Shard(*(torch.zeros(64, 1, 256, dtype=dtype),) * 2) for _ in "ab")
    elif dtype == torch.int8:
        every = torch.cat([torch.arange(-127, 127) + 0.5, torch.randn(64 * 255 - 254) * 60])
    else:  # every number, every middle between two, and what is next to them
        codes = torch.arange(127, dtype=torch.uint8).view(dtype).float()
        middles = (codes[1:] + codes[:-1]) / 2
        edges = torch.cat([codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])])
        every = torch.cat([edges, -edges, torch.randn(64 * 255 - 2 * len(edges)) * 100])
    k = torch.cat([torch.full((64, 1, 1), largest), every.clamp(-largest, largest).view(64, 1, 255)], -1)
    launch_write(torch.arange(64), k, None, *shard)
    twin(torch.arange(64), k, None, expected)
    assert same(shard.k_SKH, expected.k_SKH)
    assert same(shard.k_scale_SK, expected.k_scale_SK)
    assert expected.k_scale_SK is None or (expected.k_scale_SK == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_roundings(dtype: torch.dtype) -> None:
    interpreted(round_as_torch_does, dtype)


def divide_as_torch_does(dtype: torch.dtype) -> None:
    """Heads of any scale, whose numbers are all at the middle between two that are stored, or next to it."""
    from megatron_dcp.kernels.write import launch_write

    torch.manual_seed(0)
    largest = LARGEST[dtype]
    whole = torch.arange(127.0) if dtype == torch.int8 else torch.arange(127, dtype=torch.uint8).view(dtype).float()
    middles = (whole[1:] + whole[:-1]) / 2
    peak_t1 = torch.rand(256, 1) * 100 + 1
    k = torch.cat([peak_t1, middles * (peak_t1 / largest)], -1).unsqueeze(1)
    assert k.shape == (256, 1, 127)
    shard, expected = (Shard(*(torch.zeros(256, 1, 127, dtype=dtype),) * 2, *(torch.zeros(256, 1),) * 2) for _ in "ab")
    launch_write(torch.arange(256), k, None, *shard)
    twin(torch.arange(256), k, None, expected)
    assert same(shard.k_SKH, expected.k_SKH) and same(shard.k_scale_SK, expected.k_scale_SK)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_divisions(dtype: torch.dtype) -> None:
    interpreted(divide_as_torch_does, dtype)


def write_far_and_nowhere() -> None:
    from megatron_dcp.kernels.write import launch_write

    pool = KVPool(1, 5, 4, 2, 6, dtype=torch.float32)
    pool.clear()
    ones = torch.ones(3, 2, 6)
    launch_write(torch.tensor([-2, 20, 2**40]), ones, ones, *pool.layer(0))
    launch_write(torch.empty(0, dtype=torch.int64), ones[:0], ones[:0], *pool.layer(0))
    assert all(part is None or (part == 0).all() for part in pool.layer(0))
    for k_shape, v_shape in [((1, 2, 5), (1, 2, 6)), ((1, 2, 6), (1, 2, 5)), ((2, 2, 6), (1, 2, 6))]:
        with pytest.raises(AssertionError):
            launch_write(torch.tensor([1]), torch.ones(k_shape), torch.ones(v_shape), *pool.layer(0))


def test_no_slot_outside_of_the_pool_is_written() -> None:
    interpreted(write_far_and_nowhere)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("v_in_k", [False, True])
def test_operator(dtype: torch.dtype, v_in_k: bool) -> None:
    """Its schema says what it changes, and on a CPU it is the twin."""
    from megatron_dcp.kernels.write import write_kv

    torch.manual_seed(0)
    pool, other = (KVPool(1, 5, 4, 2, 6, 4, v_in_k=v_in_k, dtype=dtype) for _ in range(2))
    for one in (pool, other):
        one.clear()
    slot_t, k, v = torch.tensor([3, -1, 17]), torch.randn(3, 2, 6), None if v_in_k else torch.randn(3, 2, 4)
    k_SKH, v_SKV, k_scale, v_scale = pool.layer(0)
    arguments = (slot_t, k, v, k_SKH, None if v_in_k else v_SKV, k_scale, None if v_in_k else v_scale)
    torch.library.opcheck(write_kv, arguments)
    write_kv(*arguments)
    other.write(0, slot_t, k, v)
    assert all(same(*parts) for parts in zip(pool.layer(0), other.layer(0), strict=True))
