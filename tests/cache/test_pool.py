"""KVPool: exact bytes, one storage, views without a copy, writes where they belong and nowhere else."""

import pytest
import torch

from megatron_dcp.cache.layout import KVLayout
from megatron_dcp.cache.pool import KVPool, bytes_per_block
from megatron_dcp.cache.sizes import blocks_in
from megatron_dcp.shard import quantise

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ORDERS = ["slots_first", "heads_first"]


def make(order: str = "slots_first", dtype: torch.dtype = torch.float32, v_dim: int | None = None) -> KVPool:
    """3 layers, 5 blocks of 4 slots, 2 KV heads of 6, poisoned."""
    pool = KVPool(3, 5, 4, 2, 6, v_dim, dtype=dtype, order=order)  # type: ignore[arg-type]
    for index in range(3):
        for tensor in pool.layer(index)[:2]:
            tensor.fill_(torch.nan)
    return pool


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_dim", [None, 4])
def test_bytes_are_what_was_asked_in_one_storage(order: str, dtype: torch.dtype, v_dim: int | None) -> None:
    shape = {"num_layers": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 6, "v_dim": v_dim, "dtype": dtype}
    pool = make(order, dtype, v_dim)
    expected = 3 * 5 * 4 * 2 * (6 + (v_dim or 6)) * torch.tensor([], dtype=dtype).element_size()
    assert pool.bytes == expected == 5 * bytes_per_block(**shape)
    tensors = [tensor for index in range(3) for tensor in pool.layer(index)[:2]]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(storages.values()) == pool.bytes and len(storages) == 1
    addresses: set[int] = set()
    for tensor in tensors:
        index = torch.arange(pool.bytes // dtype.itemsize).as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        addresses.update(index.flatten().tolist())
    assert len(addresses) == sum(tensor.numel() for tensor in tensors) == pool.bytes // dtype.itemsize


def test_blocks_in_floors_and_never_exceeds() -> None:
    assert [blocks_in(n, block_bytes=30)[0] for n in (30, 31, 59, 60, 303)] == [1, 1, 1, 2, 10]
    with pytest.raises(ValueError, match="29 bytes .* less than one block, 30 bytes; give at least 30"):
        blocks_in(29, block_bytes=30)


@pytest.mark.parametrize("block_bytes", [7, 30])
@pytest.mark.parametrize("window_bytes", [1, 50])
@pytest.mark.parametrize("window_limit", [1, 4, 1000])
def test_blocks_in_with_a_window(block_bytes: int, window_bytes: int, window_limit: int) -> None:
    one = block_bytes + window_bytes
    for num_bytes in range(one, 40 * one):
        blocks, in_window = blocks_in(
            num_bytes, block_bytes=block_bytes, window_bytes=window_bytes, window_limit=window_limit
        )
        assert blocks is not None and 1 <= in_window <= blocks
        assert blocks * block_bytes + min(in_window, window_limit) * window_bytes <= num_bytes
        assert (blocks + 1) * block_bytes + in_window * window_bytes > num_bytes or blocks == in_window
        # no worse than if all layers saw everything
        assert blocks >= num_bytes // one and in_window >= min(window_limit, num_bytes // one, num_bytes // (2 * one))


def test_blocks_in_where_every_layer_has_a_window() -> None:
    sizes = [blocks_in(n, block_bytes=0, window_bytes=10, window_limit=4) for n in (10, 39, 40, 1000)]
    assert sizes == [(None, 1), (None, 3), (None, 4), (None, 4)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_dim", [None, 4])
def test_writes_land_in_their_slots_and_nowhere_else(order: str, dtype: torch.dtype, v_dim: int | None) -> None:
    pool = make(order, dtype, v_dim)
    slot_t = torch.tensor([19, 0, 7, 8])
    k_tKH, v_tKV = torch.randn(4, 2, 6).to(dtype), torch.randn(4, 2, v_dim or 6).to(dtype)
    pool.write(1, slot_t, k_tKH, v_tKV)
    for index in range(3):
        for held, new in zip(pool.layer(index)[:2], (k_tKH, v_tKV), strict=True):
            assert held.shape == (20, 2, new.shape[-1]) and held.dtype == dtype
            written = torch.zeros(20, dtype=torch.bool)
            if index == 1:
                assert torch.equal(held[slot_t], new)
                written[slot_t] = True
            assert held[~written].isnan().all()


def test_physical_order() -> None:
    k_SKH, v_SKV = make("slots_first").layer(0)[:2]
    assert k_SKH.is_contiguous() and v_SKV.is_contiguous()
    k_SKH, v_SKV = make("heads_first").layer(0)[:2]
    assert k_SKH.transpose(0, 1).is_contiguous() and v_SKV.transpose(0, 1).is_contiguous()
    assert not k_SKH.is_contiguous()


@pytest.mark.parametrize("order", ORDERS)
def test_layer_is_a_view(order: str) -> None:
    pool = make(order)
    before = pool.layer(2)
    pool.write(2, torch.tensor([3]), torch.ones(1, 2, 6), torch.full((1, 2, 6), 2.0))
    assert (before[0][3] == 1).all() and (before[1][3] == 2).all()
    assert pool.layer(2)[0].data_ptr() == before[0].data_ptr()


@pytest.mark.parametrize("order", ORDERS)
def test_no_token_is_a_legal_write(order: str) -> None:
    pool = make(order)
    pool.write(0, torch.empty(0, dtype=torch.int64), torch.empty(0, 2, 6), torch.empty(0, 2, 6))
    assert all(tensor.isnan().all() for index in range(3) for tensor in pool.layer(index)[:2])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("slot", [-2, 20, 2**40])
def test_a_foreign_slot_raises_and_writes_nothing(order: str, slot: int) -> None:
    pool = make(order)
    with pytest.raises(IndexError):
        pool.write(1, torch.tensor([slot]), torch.ones(1, 2, 6), torch.ones(1, 2, 6))
    assert all(tensor.isnan().all() for index in range(3) for tensor in pool.layer(index)[:2])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_slot_minus_one_is_skipped(order: str, dtype: torch.dtype) -> None:
    pools = [KVPool(1, 5, 4, 2, 6, dtype=dtype, order=order) for _ in range(2)]  # type: ignore[arg-type]
    k_tKH, v_tKV = torch.randn(4, 2, 6), torch.randn(4, 2, 6)
    for pool, slots in zip(pools, ([-1, 19, -1, 0], [19, 0]), strict=True):
        pool.clear()
        kept = [i for i in range(4) if len(slots) == 4 or i in (1, 3)]
        pool.write(0, torch.tensor(slots), k_tKH[kept], v_tKV[kept])
    for one, other in zip(*(pool.layer(0) for pool in pools), strict=True):
        assert one is other is None or torch.equal(one.float(), other.float())
    assert pools[0].layer(0)[0].float().abs().sum((1, 2)).nonzero().flatten().tolist() == [0, 19]
    pools[0].write(0, torch.tensor([-1]), k_tKH[:1], v_tKV[:1])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v_dim,v_in_k", [(None, False), (4, False), (4, True)])
def test_what_is_packed_is_unpacked_elsewhere(order: str, dtype: torch.dtype, v_dim: int | None, v_in_k: bool) -> None:
    """As another rank does, whose pool has as large blocks but more of them."""
    sizes = dict(num_layers=2, block_size=5, num_kv_heads=2, head_dim=6, v_dim=v_dim, v_in_k=v_in_k, dtype=dtype)
    pool, other = (KVPool(num_blocks=count, order=order, **sizes) for count in (4, 9))
    slot_t = torch.tensor([19, 0, 7, 8])
    k, v = torch.randn(4, 2, 6).to(dtype), None if v_in_k else torch.randn(4, 2, v_dim or 6).to(dtype)
    pool.write(1, slot_t, k, v)
    packed = pool.pack(1, slot_t)
    assert packed.nbytes == 4 * pool.bytes_per_key
    assert pool.bytes == 2 * 20 * pool.bytes_per_key
    k_SKH, v_SKV = other.unpack(packed)[:2]
    assert torch.equal(k_SKH, k) and torch.equal(v_SKV, k[..., :4] if v is None else v)
    assert k_SKH.stride(1) == (6 if order == "slots_first" else 4 * 6)


def test_wrong_shapes_raise() -> None:
    pool = make(v_dim=4)
    one = torch.tensor([1])
    for k_shape, v_shape in [((1, 2, 5), (1, 2, 4)), ((1, 2, 6), (1, 2, 6)), ((2, 2, 6), (2, 2, 4)), ((1, 1, 6),) * 2]:
        with pytest.raises((RuntimeError, IndexError)):
            pool.write(0, one, torch.ones(k_shape), torch.ones(v_shape))


def test_write_takes_other_dtypes_and_strided_views() -> None:
    pool = make("heads_first", torch.bfloat16)
    qkv = torch.randn(3, 2, 18)
    k_tKH, v_tKV = qkv[..., 6:12], qkv[..., 12:]
    slot_t = torch.tensor([2, 4, 6])
    pool.write(0, slot_t, k_tKH, v_tKV)
    assert torch.equal(pool.layer(0)[0][slot_t], k_tKH.bfloat16())
    assert torch.equal(pool.layer(0)[1][slot_t], v_tKV.bfloat16())


def test_a_pool_keeps_no_graph_and_lives_in_and_out_of_inference_mode() -> None:
    with torch.inference_mode():
        pool = make()
        inside = torch.ones(1, 2, 6)
        pool.write(0, torch.tensor([0]), inside, inside)
    grad = torch.ones(1, 2, 6, requires_grad=True) * 2
    pool.write(0, torch.tensor([1]), grad, grad)
    for held in pool.layer(0)[:2]:
        assert not held.requires_grad
        assert (held[0] == 1).all() and (held[1] == 2).all()


def test_shards_of_all_ranks_make_the_sequence() -> None:
    """Write a sequence in uneven steps through the layout and one table, then read it back by position."""
    layout, table, length = KVLayout(dcp_size=3, interleave=2, block_size=4), [4, 1, 3], 29
    k_THK = torch.randn(length, 2, 6)
    pools = [make() for _ in range(3)]
    for start, stop in [(0, 1), (1, 2), (2, 13), (13, 14), (14, 29)]:
        for rank, pool in enumerate(pools):
            mine = layout.local_range(start, stop, rank)
            local_t = torch.arange(mine.start, mine.stop)
            new = k_THK[layout.global_position(local_t, rank)]
            pool.write(0, layout.slot(torch.tensor(table)[local_t // 4], local_t), new, -new)
    for position in range(length):
        local = layout.local_index(position)
        k_SKH, v_SKV = pools[layout.owner(position)].layer(0)[:2]
        slot = table[local // 4] * 4 + local % 4
        assert torch.equal(k_SKH[slot], k_THK[position]) and torch.equal(v_SKV[slot], -k_THK[position])
    assert sum(int((~pool.layer(0)[0][:, 0, 0].isnan()).sum()) for pool in pools) == length


@pytest.mark.parametrize("name", ["num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim", "v_dim"])
def test_bad_sizes_are_named(name: str) -> None:
    sizes = dict.fromkeys(("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim", "v_dim"), 2)
    with pytest.raises(ValueError, match=f"{name}=0"):
        KVPool(**(sizes | {name: 0}), dtype=torch.float32)


def test_unknown_order_and_too_large_a_pool() -> None:
    with pytest.raises(ValueError, match="order='tokens_first'.*slots_first, heads_first"):
        KVPool(1, 1, 1, 1, 1, dtype=torch.float32, order="tokens_first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bytes could not be allocated on cpu .*lower num_blocks"):
        KVPool(1, 2**50, 1, 1, 1, dtype=torch.float32)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_latent_is_stored_once(order: str, dtype: torch.dtype) -> None:
    """Values that are the keys' first dims take no memory, and follow every write."""
    shape = {"num_layers": 3, "block_size": 4, "num_kv_heads": 1, "head_dim": 6, "v_dim": 4, "v_in_k": True}
    pool = KVPool(num_blocks=5, dtype=dtype, order=order, **shape)  # type: ignore[arg-type]
    assert pool.bytes == 3 * 5 * 4 * 6 * dtype.itemsize == 5 * bytes_per_block(dtype=dtype, **shape)
    k_tKH = torch.randn(2, 1, 6).to(dtype)
    pool.write(1, torch.tensor([7, 19]), k_tKH)
    k_SKH, v_SKV = pool.layer(1)[:2]
    assert v_SKV.shape == (20, 1, 4) and v_SKV.data_ptr() == k_SKH.data_ptr()
    assert torch.equal(k_SKH[[7, 19]], k_tKH) and torch.equal(v_SKV[[7, 19]], k_tKH[..., :4])


def test_values_wider_than_the_keys_cannot_be_part_of_them() -> None:
    with pytest.raises(ValueError, match="v_dim=8 is above head_dim=6"):
        KVPool(1, 1, 4, 1, 6, 8, v_in_k=True, dtype=torch.float32)


QUANTISED = [torch.float8_e4m3fn, torch.int8]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("v_dim,v_in_k", [(None, False), (5, False), (5, True)])
def test_eight_bits_with_their_scales(order: str, dtype: torch.dtype, v_dim: int | None, v_in_k: bool) -> None:
    """Written, read, packed and unpacked elsewhere; their bytes counted."""
    sizes = dict(num_layers=2, block_size=5, num_kv_heads=3, head_dim=7, v_dim=v_dim, v_in_k=v_in_k, dtype=dtype)
    pool, other = (KVPool(num_blocks=count, order=order, **sizes) for count in (4, 9))
    per_head = 7 + 4 if v_in_k else 7 + 4 + (v_dim or 7) + 4
    assert pool.bytes_per_key == 3 * per_head
    assert pool.bytes == 2 * 20 * 3 * per_head == 4 * bytes_per_block(**sizes)
    pool.clear()
    slot_t = torch.tensor([19, 0, 7, 8])
    k, v = torch.randn(4, 3, 7), None if v_in_k else torch.randn(4, 3, v_dim or 7)
    pool.write(1, slot_t, k, v)
    packed = pool.pack(1, slot_t)
    assert packed.nbytes == 4 * pool.bytes_per_key
    here, there = pool.layer(1), other.unpack(packed)
    wanted_k = quantise(k, dtype)
    wanted_v = (wanted_k[0][..., :5], wanted_k[1]) if v is None else quantise(v, dtype)
    for shard, slots in ((here, slot_t), (there, torch.arange(4))):
        for stored, scale, wanted in zip(shard[:2], shard[2:], (wanted_k, wanted_v), strict=True):
            assert stored.dtype == dtype and scale is not None
            assert torch.equal(stored.view(torch.uint8)[slots], wanted[0].view(torch.uint8))
            assert torch.equal(scale[slots], wanted[1])
    untouched = [slot for slot in range(20) if slot not in slot_t]
    assert all((part.float()[untouched] == 0).all() for part in here if part is not None)
    assert all((part.float() == 0).all() for part in pool.layer(0) if part is not None)
