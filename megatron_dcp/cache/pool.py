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

from megatron_dcp.config import check_at_least, check_choice

SlotOrder = Literal["slots_first", "heads_first"]
Shard = tuple[Tensor, Tensor]
"""Keys and values of one layer, ``(k_SKH, v_SKV)``, any strides."""


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
    """Bytes that one physical block takes on one rank: keys and values of all layers."""
    width = head_dim if v_in_k else head_dim + (head_dim if v_dim is None else v_dim)
    return num_layers * block_size * num_kv_heads * width * dtype.itemsize


def blocks_in(
    num_bytes: int, *, block_bytes: int, window_bytes: int = 0, window_limit: int = 0
) -> tuple[int | None, int]:
    """How many blocks of either kind of layer fit into ``num_bytes`` on one rank.

    Layers with a sliding window get what they can use, but no more than half of the memory, unless the others could not
    use the rest either.

    Args:
        block_bytes: Of a block, of all layers that see everything.
        window_bytes: Of a block, of all layers with a sliding window.
        window_limit: Most blocks that the windows of all sequences need.

    Returns:
        Blocks of the layers that see everything, ``None``: any number, as there are none; of those with a window.

    Raises:
        ValueError: Not even one block fits.
    """
    one = block_bytes + window_bytes
    if num_bytes < one:
        raise ValueError(
            f"{num_bytes} bytes of KV cache per rank are less than one block, {one} bytes; give at least {one}, or a "
            "smaller block_size"
        )
    if not window_bytes:
        return num_bytes // one, window_limit
    if not block_bytes:
        return None, min(window_limit, num_bytes // window_bytes)
    in_window = min(window_limit, num_bytes // (2 * window_bytes))
    blocks = (num_bytes - in_window * window_bytes) // block_bytes
    return (blocks, in_window) if blocks >= in_window >= 1 else (num_bytes // one, num_bytes // one)


class KVPool:
    """Keys and values of all layers of one rank, by slot.

    The memory is not initialised (on a CPU the system maps a page when it is first written, so the unused part of a
    pool costs next to nothing). A slot that was never written, or that belonged to a freed sequence, holds garbage, NaN
    included: no reader may look at it, not even to multiply it with 0.

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
        self._layers: list[Shard] = []
        # Made under inference_mode, the tensors could never be written outside it.
        with torch.inference_mode(False):
            self._buffer = _allocate(num_layers * per_head * width, dtype, torch.device(device))
            for layer in self._buffer.chunk(num_layers):
                self._layers.append(self._as_shard(layer, self.num_slots))

    @property
    def bytes(self) -> int:
        """Bytes of the pool on this rank: ``num_blocks * bytes_per_block``, and nothing else."""
        return self._buffer.untyped_storage().nbytes()

    @property
    def bytes_per_key(self) -> int:
        """Bytes of one token in one layer."""
        return self._kv_heads * self._width * self.dtype.itemsize

    def layer(self, index: int) -> Shard:
        """``(k_SKH, v_SKV)`` of a layer: views of the pool, contiguous only for ``order="slots_first"``."""
        return self._layers[index]

    def write(self, index: int, slot_t: Tensor, k_tKH: Tensor, v_tKV: Tensor | None = None) -> None:
        """Write the keys and values of ``t >= 0`` tokens of a layer to their slots, in the pool's dtype.

        Args:
            index: Layer of this rank.
            slot_t: Slots, int64 ``[t]``, on the pool's device, each at most once.
            k_tKH: Rotated keys.
            v_tKV: Values; none for a pool with ``v_in_k``.

        Raises:
            IndexError: On a CPU, a slot that the pool does not have; a GPU stops with a device-side assertion.
        """
        k_SKH, v_SKV = self._layers[index]
        # index_copy_ refuses negative slots, where an indexed assignment would write to the pool's end. Without detach
        # the pool would keep the autograd graph of a model that is being trained.
        k_SKH.index_copy_(0, slot_t, k_tKH.detach().to(self.dtype))
        assert (v_tKV is None) == self.v_in_k, "values are part of the keys, or they are given"
        if v_tKV is not None:
            v_SKV.index_copy_(0, slot_t, v_tKV.detach().to(self.dtype))

    def pack(self, index: int, slot_c: Tensor) -> Tensor:
        """Keys and values of some slots of a layer, one after the other, in memory of their own. See ``unpack``."""
        packed = self._buffer.new_empty(len(slot_c) * self._kv_heads * self._width)
        pairs = zip(self._as_shard(packed, len(slot_c)), self._layers[index], strict=True)
        for part, whole in list(pairs)[: 1 if self.v_in_k else 2]:
            if self.order == "slots_first":
                torch.index_select(whole, 0, slot_c, out=part)
            else:
                torch.index_select(whole.transpose(0, 1), 1, slot_c, out=part.transpose(0, 1))
        return packed

    def unpack(self, packed: Tensor) -> Shard:
        """What another rank has packed, by its place among the slots: a view."""
        return self._as_shard(packed, packed.numel() // (self._kv_heads * self._width))

    def _as_shard(self, flat: Tensor, slots: int) -> Shard:
        keys = slots * self._kv_heads * self._head_dim
        k_SKH = self._by_slot(flat[:keys], slots)
        return k_SKH, k_SKH[..., : self._v_dim] if self.v_in_k else self._by_slot(flat[keys:], slots)

    def _by_slot(self, flat: Tensor, slots: int) -> Tensor:
        if self.order == "slots_first":
            return flat.view(slots, self._kv_heads, -1)
        return flat.view(self._kv_heads, slots, -1).transpose(0, 1)


def _allocate(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        if device.type == "cpu":
            return _map_memory(num_elements, dtype)
        return torch.empty(num_elements, dtype=dtype, device=device)
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
