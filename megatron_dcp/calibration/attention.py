"""How fast the attention of one query reads a cache, by the back end that a run would choose; alone and in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from megatron_dcp.attention import AttentionBatch, AttentionSpec, choose_backend
from megatron_dcp.cache.pool import KVPool, SlotOrder
from megatron_dcp.calibration.clock import Clock
from megatron_dcp.comm.collectives import all_gather
from megatron_dcp.engine.runner import KV_DTYPES
from megatron_dcp.planner.machine import AttentionRate, ChunkRate

BLOCK = 64
CHUNK_ROWS = 4  # query heads of a KV head


class _Sizes(NamedTuple):
    """Bytes that keys and values take in fp32, dealt out over layers: more than the device's caches hold. And tokens of
    a prompt's chunk, with the keys that its last one sees.
    """

    kv_bytes: int
    layers: int
    chunk: int
    chunk_keys: int


_ON_CPU = _Sizes(kv_bytes=96 << 20, layers=3, chunk=512, chunk_keys=4096)
_ON_GPU = _Sizes(kv_bytes=8 << 30, layers=4, chunk=2048, chunk_keys=16384)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    kv_heads: int
    head_dim: int
    v_dim: int
    latent: bool
    rows: tuple[int, ...]


# Heads of today's models, and the latent of DeepSeek's; rows: query heads per KV head.
_SHAPES = (
    _Shape(kv_heads=2, head_dim=64, v_dim=64, latent=False, rows=(1, 2, 4, 8)),
    _Shape(kv_heads=2, head_dim=128, v_dim=128, latent=False, rows=(1, 2, 4, 8, 16)),
    _Shape(kv_heads=1, head_dim=576, v_dim=512, latent=True, rows=(16, 128)),
)


def attention_rates(clock: Clock) -> Iterator[AttentionRate]:
    """Of one query over many keys, for every dtype of a cache; float16 is read as bfloat16 is."""
    for kv_dtype in KV_DTYPES:
        if kv_dtype == "float16":
            continue
        for shape in _SHAPES:
            cache = _Cache(clock.device, shape, kv_dtype)
            for rows in shape.rows:
                seconds = clock.seconds(cache.attention(rows), aim_s=0.05)
                rate = AttentionRate(
                    kv_dtype=kv_dtype, head_dim=shape.head_dim, rows=rows, latent=shape.latent,
                    bytes_per_s=cache.num_bytes / seconds,
                )  # fmt: skip
                yield rate
                if kv_dtype == "bfloat16":
                    yield replace(rate, kv_dtype="float16")


def chunk_rates(clock: Clock) -> Iterator[ChunkRate]:
    """Of a chunk of a prompt, at the end of many keys: most of them every token sees."""
    sizes = _sizes(clock.device)
    mean = sizes.chunk_keys - (sizes.chunk - 1) / 2
    for dtype in ("float32", "bfloat16"):
        for shape in _SHAPES:
            if shape.latent:  # expanded for a chunk, to keys and values like the others
                continue
            cache = _Cache(clock.device, shape, dtype, query_dtype=dtype)
            call = cache.attention(CHUNK_ROWS, blocks=sizes.chunk_keys // BLOCK, tokens=sizes.chunk)
            operations = 2 * sizes.chunk * mean * CHUNK_ROWS * shape.kv_heads * (shape.head_dim + shape.v_dim)
            seconds = clock.seconds(call, aim_s=0.1)
            yield ChunkRate(dtype=dtype, head_dim=shape.head_dim, flops=cache.layers * operations / seconds)


def imbalance(clock: Clock) -> float:
    """How much longer the slowest rank attends to a layer than a rank that nobody waits for; 1 if no longer.

    Ranks gather a few numbers after every layer. What that takes itself is left out: few keys are compared with many.
    """
    if clock.world.size() == 1:
        return 1.0
    cache = _Cache(clock.device, _SHAPES[0], "bfloat16" if clock.device.type == "cuda" else "float32")
    few = torch.zeros(16, device=clock.device)
    alone, together = (
        clock.seconds(cache.attention(2, after=after), aim_s=0.5)
        - clock.seconds(cache.attention(2, blocks=1, after=after), aim_s=0.2)
        for after in (None, lambda: all_gather(few, clock.world))
    )
    return max(1.0, together / alone) if alone > 0 else 1.0


def _sizes(device: torch.device) -> _Sizes:
    return _ON_GPU if device.type == "cuda" else _ON_CPU


class _Cache:
    """Keys and values of some layers, all slots written: memory that never was is not read from memory."""

    def __init__(self, device: torch.device, shape: _Shape, kv_dtype: str, query_dtype: str | None = None) -> None:
        self.device, self.shape, self.dtype = device, shape, KV_DTYPES[kv_dtype]
        own = "bfloat16" if device.type == "cuda" else "float32"
        self.query_dtype, sizes = getattr(torch, query_dtype or own), _sizes(device)
        key_bytes = 4 * shape.kv_heads * (shape.head_dim if shape.latent else shape.head_dim + shape.v_dim)
        self.layers, self.blocks = sizes.layers, sizes.kv_bytes // (sizes.layers * key_bytes * BLOCK)
        if device.type == "cpu" and (kv_dtype != "float32" or shape.latent):
            self.layers = 1  # converted or computed with for longer than they are read
        self._pool: KVPool | None = None

    @property
    def num_bytes(self) -> int:
        """That attention to all blocks of all layers reads, scales counted."""
        assert self._pool is not None
        return self.layers * self.blocks * BLOCK * self._pool.bytes_per_key

    def attention(
        self, rows: int, *, blocks: int | None = None, tokens: int = 1, after: Callable[[], object] | None = None
    ) -> Callable[[], None]:
        """A call that attends to the keys of every layer.

        Args:
            rows: Query heads of a KV head.
            blocks: Of a layer; ``None``: all.
            tokens: Queries, the last ones of the sequence.
            after: Called after each layer.
        """
        shape = self.shape
        spec = AttentionSpec(
            heads=rows * shape.kv_heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, v_dim=shape.v_dim,
            v_in_k=shape.latent, dtype=self.dtype, query_dtype=self.query_dtype, device=self.device, block_size=BLOCK,
        )  # fmt: skip
        attention = choose_backend("auto", spec)
        pool = self._filled(attention.backend.pool_order)
        count = blocks or self.blocks
        visible = tuple(range(count * BLOCK - tokens + 1, count * BLOCK + 1))
        plan = attention.plan(AttentionBatch((tokens,), visible, (tuple(range(count)),), BLOCK))
        query = torch.randn(tokens, spec.heads, shape.head_dim, device=self.device).to(self.query_dtype)

        def attend() -> None:
            for layer in range(self.layers):
                plan.attend(query, pool.layer(layer), scale=shape.head_dim**-0.5)
                if after is not None:
                    after()

        return attend

    def _filled(self, order: SlotOrder) -> KVPool:
        if self._pool is None or self._pool.order != order:
            shape = self.shape
            pool = self._pool = KVPool(
                self.layers, self.blocks, BLOCK, shape.kv_heads, shape.head_dim, shape.v_dim, v_in_k=shape.latent,
                dtype=self.dtype, device=self.device, order=order,
            )  # fmt: skip
            keys = torch.randn(pool.num_slots, shape.kv_heads, shape.head_dim, device=self.device)
            slots = torch.arange(pool.num_slots, device=self.device)
            for layer in range(self.layers):
                pool.write(layer, slots, keys, None if shape.latent else keys[..., : shape.v_dim])
        return self._pool
