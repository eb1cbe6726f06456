"""The tensors of one rank's KV cache: every layer's keys and values in one allocation of exactly the size asked for.

Shapes: ``S`` slots of the pool (``num_blocks * block_size``), ``t`` tokens written, ``K`` KV heads of this rank,
``H`` head dim of the keys, ``V`` head dim of the values.

Of a latent cache (MLA) the values are the first ``V`` dims of the keys: they are stored once.

Physical block ``b`` is the slots ``[b * block_size, (b + 1) * block_size)`` of every layer. Keys are written already
rotated by their global positions.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_dcp.cache.sizes import SCALE_BYTES, bytes_per_head, scales_per_head
from megatron_dcp.config import check_at_least, check_choice
from megatron_dcp.kernels import unusable
from megatron_dcp.kernels.twins import store_slots
from megatron_dcp.shard import Shard, is_quantised

SlotOrder = Literal["slots_first", "heads_first"]


def bytes_per_block(
    *,
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    v_dim: int | None = None,
    v_in_k: bool = False,
    dtype: torch.dtype,
) -> int:
    """Bytes that one physical block takes on one rank: keys, values and their scales, of all layers."""
    width = head_dim if v_in_k else head_dim + (head_dim if v_dim is None else v_dim)
    return num_layers * block_size * num_kv_heads * _bytes_per_head(width, dtype, v_in_k)


def _bytes_per_head(width: int, dtype: torch.dtype, v_in_k: bool) -> int:
    """Of one token in one layer."""
    return bytes_per_head(width, dtype.itemsize, _scales_per_head(dtype, v_in_k))


def _scales_per_head(dtype: torch.dtype, v_in_k: bool) -> int:
    return scales_per_head(v_in_k) if is_quantised(dtype) else 0


class KVPool:
    """Keys and values of all layers of one rank, by slot; in 8 bits with scales (`megatron_dcp.shard`) or as they are.

    On a CPU the system maps a page when it is first written, so the unused part of a pool costs next to nothing. A slot
    that was never written, or that belonged to a freed sequence, holds anything, and after a model that computed NaN
    that too: no reader may look at it, not even to multiply it with 0. (On a GPU the memory starts as zeros, since that
    cannot be said of every library.)

    Args:
        num_layers: Layers of this rank.
        num_blocks: Physical blocks.
        block_size: Slots of one block.
        num_kv_heads: KV heads of this rank.
        head_dim: ``H``.
        v_dim: ``V``; ``None``: as ``head_dim``.
        v_in_k: The values are the first ``V <= H`` dims of the keys and take no memory of their own.
        order: How a layer lies in memory. ``slots_first``: ``[S, K, H]``, a token's heads side by side;
            ``heads_first``: ``[K, S, H]``, a head's tokens side by side. ``layer`` gives the same shapes for both.

    Raises:
        ValueError: A size is below 1, ``V`` of a shared cache is above ``H``, the order is unknown, or the device has
            not enough memory.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_dim: int | None = None,
        *,
        v_in_k: bool = False,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        order: SlotOrder = "slots_first",
    ) -> None:
        v_dim = head_dim if v_dim is None else v_dim
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "v_dim": v_dim,
        }
        for name, size in sizes.items():
            check_at_least(name, size, 1)
        check_choice("order", order, get_args(SlotOrder))
        if v_in_k and v_dim > head_dim:
            raise ValueError(f"v_dim={v_dim} is above head_dim={head_dim}; values that are part of the keys cannot be")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.dtype = dtype
        self.order = order
        self.v_in_k = v_in_k
        per_head = self.num_slots * num_kv_heads
        width = head_dim if v_in_k else head_dim + v_dim
        self._kv_heads, self._head_dim, self._v_dim, self._width = num_kv_heads, head_dim, v_dim, width
        self._scales_per_head = _scales_per_head(dtype, v_in_k)
        # Made under inference_mode, the tensors could never be written outside it.
        with torch.inference_mode(False):
            parts = [_allocate(num_layers * per_head * width, dtype, torch.device(device)).chunk(num_layers)]
            if self._scales_per_head:
                scales = _allocate(num_layers * per_head * self._scales_per_head, torch.float32, torch.device(device))
                parts.append(scales.chunk(num_layers))
            self._layers = [self._as_shard(self.num_slots, *layer) for layer in zip(*parts, strict=True)]
        self._memory = [part[0].untyped_storage() for part in parts]

    @property
    def bytes(self) -> int:
        """Bytes of the pool on this rank: ``num_blocks * bytes_per_block``, and nothing else."""
        return sum(memory.nbytes() for memory in self._memory)

    @property
    def bytes_per_key(self) -> int:
        """Bytes of one token in one layer."""
        return self._kv_heads * _bytes_per_head(self._width, self.dtype, self.v_in_k)

    def layer(self, index: int) -> Shard:
        """Keys and values of a layer: views of the pool, contiguous only for ``order="slots_first"``."""
        return self._layers[index]

    def clear(self) -> None:
        """Zero all keys and values."""
        for layer in self._layers:
            for part in layer:
                if part is not None:
                    part.zero_()

    def write(self, index: int, slot_t: Tensor, k_tKH: Tensor, v_tKV: Tensor | None = None) -> None:
        """Write the keys and values of ``t >= 0`` tokens of a layer to their slots, in the pool's dtype.

        Args:
            index: Layer of this rank.
            slot_t: Slots, int64 ``[t]``, on the pool's device, each at most once; -1: the token is not kept here, which
                is how a CUDA graph of fixed size writes fewer.
            k_tKH: Rotated keys.
            v_tKV: Values; none for a pool with ``v_in_k``.

        Raises:
            IndexError: On a CPU, another slot that the pool does not have; our kernel skips it, and a GPU without it
                stops with a device-side assertion.
        """
        k_SKH, v_SKV, k_scale_SK, v_scale_SK = self._layers[index]
        assert (v_tKV is None) == self.v_in_k, "values are part of the keys, or they are given"
        # Without detach the pool would keep the autograd graph of a model that is being trained.
        k_tKH, v_tKV = k_tKH.detach(), None if v_tKV is None else v_tKV.detach()
        if k_SKH.is_cuda and self.dtype.itemsize <= 4 and unusable(k_SKH.device) is None:
            from megatron_dcp.kernels.write import write_kv

            own = (None, None) if v_tKV is None else (v_SKV, v_scale_SK)
            write_kv(slot_t, k_tKH, v_tKV, k_SKH, own[0], k_scale_SK, own[1])
            return
        store_slots(slot_t, k_tKH, k_SKH, k_scale_SK)
        if v_tKV is not None:
            store_slots(slot_t, v_tKV, v_SKV, v_scale_SK)

    def pack(self, index: int, slot_c: Tensor) -> Tensor:
        """What is stored of some slots of a layer, one part after the other, in memory of its own. See ``unpack``."""
        layer = self._layers[index]
        per_slot = self._kv_heads * _bytes_per_head(self._width, self.dtype, self.v_in_k)
        packed = torch.empty(len(slot_c) * per_slot, dtype=torch.uint8, device=layer.k_SKH.device)
        for name, part in self.unpack(packed)._asdict().items():
            whole = getattr(layer, name)
            if whole is None or (self.v_in_k and name.startswith("v_")):
                continue
            whole, part = (x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (whole, part))
            if self.order == "slots_first":
                torch.index_select(whole, 0, slot_c, out=part)
            else:
                torch.index_select(whole.transpose(0, 1), 1, slot_c, out=part.transpose(0, 1))
        return packed

    def unpack(self, packed: Tensor) -> Shard:
        """What another rank has packed, by its place among the slots: a view."""
        slots = packed.numel() // self.bytes_per_key
        scales = slots * self._kv_heads * self._scales_per_head * SCALE_BYTES  # first, where they are aligned
        data = packed[scales:].view(self.dtype)
        return (
            self._as_shard(slots, data, packed[:scales].view(torch.float32)) if scales else self._as_shard(slots, data)
        )

    def _as_shard(self, slots: int, data: Tensor, scales: Tensor | None = None) -> Shard:
        keys = slots * self._kv_heads * self._head_dim
        k_SKH = self._by_slot(data[:keys], slots)
        v_SKV = k_SKH[..., : self._v_dim] if self.v_in_k else self._by_slot(data[keys:], slots)
        if scales is None:
            return Shard(k_SKH, v_SKV)
        per_part = scales.split(slots * self._kv_heads)
        k_scale, v_scale = (self._by_slot(part, slots).squeeze(-1) for part in (per_part[0], per_part[-1]))
        return Shard(k_SKH, v_SKV, k_scale, k_scale if self.v_in_k else v_scale)

    def _by_slot(self, flat: Tensor, slots: int) -> Tensor:
        if self.order == "slots_first":
            return flat.view(slots, self._kv_heads, -1)
        return flat.view(self._kv_heads, slots, -1).transpose(0, 1)


def _allocate(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        if device.type == "cpu":
            return _map_memory(num_elements, dtype)
        # zeros: a kernel may multiply what lies behind a sequence's last key with a weight of 0, which keeps a NaN
        return torch.zeros(num_elements, dtype=dtype, device=device)
    except (RuntimeError, OSError, OverflowError) as error:  # torch.OutOfMemoryError on a GPU is the first
        raise ValueError(
            f"the KV pool of {num_elements * dtype.itemsize} bytes could not be allocated on {device} ({error}); "
            "lower num_blocks or bytes_per_rank, or raise decode_context_parallel_size"
        ) from error


def _map_memory(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Memory that the system maps when it is first written, in huge pages where it has them.

    Tokens are written to all heads in turn. With small pages, mapped in that order, a head's keys end up scattered over
    the memory, and attention reads them at half the speed (measured).
    """
    memory = mmap.mmap(-1, num_elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements)
