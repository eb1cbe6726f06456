"""The sharded, paged KV cache: where a token lives (``layout``), who holds a block (``blocks``), which blocks hold a
known prefix (``prefix``), the bytes (``pool``).

``layout``, ``blocks`` and ``prefix`` run without torch, and so does importing this package: a planner or a scheduler
needs no tensors. The pool is imported by its own name, ``megatron_dcp.cache.pool``.
"""

from megatron_dcp.cache.blocks import BlockPool, OutOfBlocks
from megatron_dcp.cache.layout import KVLayout
from megatron_dcp.cache.prefix import PrefixCache, WindowPool

__all__ = ["BlockPool", "KVLayout", "OutOfBlocks", "PrefixCache", "WindowPool"]
