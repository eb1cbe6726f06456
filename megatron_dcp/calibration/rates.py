"""What a rank reads and computes per second, and how long collectives take.

Shapes: ``S`` keys, ``N`` query heads, ``K`` KV heads, ``H`` head dim, ``V`` dim of the values, ``P`` ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from megatron_dcp.attention import AttentionBatch, AttentionSpec, Planned, choose_backend
from megatron_dcp.cache.pool import KVPool
from megatron_dcp.calibration.clock import Clock
from megatron_dcp.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter_sum, send_receive
from megatron_dcp.engine.runner import KV_DTYPES
from megatron_dcp.metrics import Metrics
from megatron_dcp.planner.machine import AttentionRate, CollectiveRate
from megatron_dcp.shard import Shard

BLOCK = 64
KV_HEADS = 2
SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)  # bytes that a rank brings to a collective


class _Sizes(NamedTuple):
    """What a kind of device needs to be busy, and to read from memory rather than from its caches.

    Attributes:
        matrix: Rows and columns of a square weight matrix, ``matrices`` of which are multiplied one after the other.
        rows: Tokens of a product whose operations are to be the limit.
        kv_bytes: fp32 keys and values that attention reads, dealt out over ``layers``.
    """

    matrix: int
    matrices: int
    rows: int
    kv_bytes: int
    layers: int


_ON_CPU = _Sizes(matrix=2048, matrices=6, rows=512, kv_bytes=96 << 20, layers=3)
_ON_GPU = _Sizes(matrix=8192, matrices=4, rows=8192, kv_bytes=1 << 30, layers=4)


def _sizes(device: torch.device) -> _Sizes:
    return _ON_GPU if device.type == "cuda" else _ON_CPU


def memory_bandwidth(clock: Clock, dtype: torch.dtype) -> float:
    """Bytes of weights that the products of one token read per second."""
    sizes = _sizes(clock.device)
    weights = [_matrix(sizes.matrix, sizes.matrix, dtype, clock.device) for _ in range(sizes.matrices)]
    token = _matrix(1, sizes.matrix, dtype, clock.device)
    seconds = clock.seconds(lambda: [torch.mm(token, weight.t()) for weight in weights], aim_s=0.3)
    return sum(weight.nbytes for weight in weights) / seconds


def product_rate(clock: Clock, dtype: torch.dtype) -> float:
    """Operations per second of a large product, an addition and a multiplication being two."""
    sizes = _sizes(clock.device)
    weight = _matrix(sizes.matrix, sizes.matrix, dtype, clock.device)
    tokens = _matrix(sizes.rows, sizes.matrix, dtype, clock.device)
    return 2 * sizes.rows * sizes.matrix**2 / clock.seconds(lambda: torch.mm(tokens, weight.t()), aim_s=0.2)


def _matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device).to(dtype)


def attention_rates(clock: Clock) -> Iterator[AttentionRate]:
    """Of one query over many keys, by the back end that a run would choose."""
    queries = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
    for kv_dtype in KV_DTYPES:
        for head_dim, rows in ((64, (1, 2, 4, 8)), (128, (1, 2, 4, 8, 16))):
            yield from _rates(clock, kv_dtype, queries, rows, kv_heads=KV_HEADS, head_dim=head_dim, v_dim=head_dim)
        yield from _rates(clock, kv_dtype, queries, (16, 128), kv_heads=1, head_dim=576, v_dim=512, v_in_k=True)


def _rates(
    clock: Clock, kv_dtype: str, queries: torch.dtype, rows: tuple[int, ...], *,
    kv_heads: int, head_dim: int, v_dim: int, v_in_k: bool = False,
) -> Iterator[AttentionRate]:  # fmt: skip
    sizes, stored = _sizes(clock.device), KV_DTYPES[kv_dtype]
    key_bytes = 4 * kv_heads * (head_dim if v_in_k else head_dim + v_dim)
    blocks = sizes.kv_bytes // (sizes.layers * key_bytes * BLOCK)
    batch = AttentionBatch((1,), (blocks * BLOCK,), (tuple(range(blocks)),), BLOCK)
    pool = None
    for each in rows:
        spec = AttentionSpec(
            heads=each * kv_heads, kv_heads=kv_heads, head_dim=head_dim, v_dim=v_dim, v_in_k=v_in_k, dtype=stored,
            query_dtype=queries, device=clock.device, block_size=BLOCK,
        )  # fmt: skip
        attention = choose_backend("auto", spec)
        if pool is None or pool.order != attention.backend.pool_order:
            pool = KVPool(
                sizes.layers, blocks, BLOCK, kv_heads, head_dim, v_dim, v_in_k=v_in_k, dtype=stored,
                device=clock.device, order=attention.backend.pool_order,
            )  # fmt: skip
            keys = torch.randn(pool.num_slots, kv_heads, head_dim, device=clock.device)
            for layer in range(sizes.layers):  # memory that was never written is not read from memory
                slots = torch.arange(pool.num_slots, device=clock.device)
                pool.write(layer, slots, keys, None if v_in_k else keys[..., :v_dim])
        query = torch.randn(1, each * kv_heads, head_dim, device=clock.device).to(queries)
        plan = attention.plan(batch)
        shards = [pool.layer(layer) for layer in range(sizes.layers)]

        def attend(plan: Planned = plan, query: Tensor = query, shards: Sequence[Shard] = shards) -> None:
            for shard in shards:
                plan.attend(query, shard, scale=head_dim**-0.5)

        seconds = clock.seconds(attend, aim_s=0.05)
        num_bytes = sizes.layers * blocks * BLOCK * pool.bytes_per_key
        yield AttentionRate(
            kv_dtype=kv_dtype, head_dim=head_dim, rows=each, latent=v_in_k, bytes_per_s=num_bytes / seconds
        )


def groups_of_world() -> dict[tuple[int, int], ProcessGroup]:
    """``(ranks, span) -> own group``: of every size that divides the world, ranks side by side, and ranks as far apart
    as they can be. A collective call of the world.
    """
    world, own = distributed.get_world_size(), distributed.get_rank()
    groups: dict[tuple[int, int], ProcessGroup] = {}
    for ranks in range(2, world + 1):
        if world % ranks:
            continue
        apart = world // ranks
        for span, step in {(ranks, 1), (world, apart)}:
            firsts = range(0, world, ranks) if step == 1 else range(apart)
            for first in firsts:
                members = [first + step * index for index in range(ranks)]
                group = distributed.new_group(members)
                if own in members:
                    groups[ranks, span] = group
    return groups


def collective_rates(clock: Clock, groups: dict[tuple[int, int], ProcessGroup]) -> Iterator[CollectiveRate]:
    """Of every operation that a decode step issues; all groups of a kind at the same time. Larger ones never faster."""
    for (ranks, span), group in groups.items():
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring"):
            slowest = 0.0
            for num_bytes in SIZES:
                sent, seconds = _collective(clock, op, group, num_bytes)
                slowest = max(slowest, seconds)
                yield CollectiveRate(op=op, ranks=ranks, span=span, bytes=sent, seconds=slowest)


def _collective(clock: Clock, op: str, group: ProcessGroup, num_bytes: int) -> tuple[float, float]:
    """Bytes that a rank sends, and seconds."""
    ranks, rank = group.size(), group.rank()
    own = torch.ones(num_bytes // 4 // ranks * ranks, device=clock.device)
    parts, received = own.view(ranks, -1), torch.empty_like(own)
    counts = [own.numel() // ranks] * ranks
    metrics = Metrics()
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(own, group, metrics),
        "all_gather": lambda: all_gather(own, group, metrics),
        "reduce_scatter": lambda: reduce_scatter_sum(parts, group, metrics),
        "all_to_all": lambda: all_to_all(own, counts, group, metrics),
        "ring": lambda: send_receive(
            own, received, (rank + 1) % ranks, (rank - 1) % ranks, group, metrics
        ).wait(),
    }  # fmt: skip
    seconds = clock.seconds(calls[op], aim_s=0.05)
    ((count, sent),) = metrics.collectives.values()
    return sent / count, seconds
