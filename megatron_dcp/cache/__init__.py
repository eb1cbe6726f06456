"""The sharded, paged KV cache: where a token lives (``layout``), who holds a block (``blocks``), the bytes (``pool``).

``layout`` and ``blocks`` run without torch, and so does importing this package: a planner or a scheduler needs no
tensors. The pool is imported by its own name, ``megatron_dcp.cache.pool``.
"""

from megatron_dcp.cache.blocks import BlockPool, OutOfBlocks
from megatron_dcp.cache.layout import KVLayout

__all__ = ["BlockPool", "KVLayout", "OutOfBlocks"]
