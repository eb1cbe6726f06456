"""How many bytes of tensors a piece of code keeps alive at its worst moment."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside the block, every tensor memory that an operation makes is counted until it is freed.

    What existed before, and work space inside of operations, is not. Exact and repeatable, unlike a process's size.

    Attributes:
        peak: Most bytes that were alive together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in _tensors((args, kwargs))}
        for leaf in _tensors(out):
            storage = leaf.untyped_storage()
            if storage._cdata not in given | self._alive:
                self._alive.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return out

    def _freed(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._now -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
