"""Bytes of the cache and of the work space of its exchanges, from sizes alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dcp.cache.layout import KVLayout
from megatron_dcp.config import PrefillName

SCALE_BYTES = 4  # fp32, of 8-bit keys or values
SLAB_BYTES = 4 << 20  # keys and values of one layer that travel together
RING_BUFFERS = 3  # slabs of a ring (`megatron_dcp.comm.ring`) that are alive at once: one is read, two are on their way


def bytes_per_head(width: int, itemsize: int, scales: int) -> int:
    """Bytes of one token and KV head in one layer: ``width`` numbers of keys and values, and their scales."""
    return width * itemsize + SCALE_BYTES * scales


def scales_per_head(v_in_k: bool) -> int:
    """Scales of one token and head of an 8-bit cache: one of a latent, whose values are part of its keys, else two."""
    return 1 if v_in_k else 2


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


@dataclass(frozen=True, kw_only=True)
class StripeSizes:
    """Bytes that decide what travels.

    Attributes:
        per_key: Of one cached token in one layer.
        per_query: Of one token's queries, and of its partial with its LSE.
    """

    per_key: int
    per_query: int


def exchange_work_bytes(
    sizes: StripeSizes, layout: KVLayout, name: PrefillName, *, prefill_chunk_size: int, replicated: int
) -> int:
    """Most bytes per rank that queries, partials and slabs of a step take, whatever the context.

    Args:
        prefill_chunk_size: Most prompt tokens of a step, over all ranks.
        replicated: Most other tokens, at least one for each sequence of a step.
    """
    chunk = prefill_chunk_size
    slabs = 0
    if name == "pass_kv":
        turn = layout.dcp_size * layout.interleave  # of each sequence a rank may have a part of one more than others
        chunk = -(-chunk // layout.dcp_size) + min(chunk // turn, replicated) * layout.interleave
    if name in ("auto", "pass_kv") and layout.dcp_size > 1:
        slabs = RING_BUFFERS * slab_blocks(sizes, layout) * layout.block_size * sizes.per_key
    return 2 * sizes.per_query * (chunk + replicated) + slabs  # twice: partials are packed for their way


def slab_blocks(sizes: StripeSizes, layout: KVLayout) -> int:
    """Blocks of a slab of the ring."""
    return max(1, SLAB_BYTES // (sizes.per_key * layout.block_size))
