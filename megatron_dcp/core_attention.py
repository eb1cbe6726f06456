"""Core attention of the training forward on a machine without a GPU.

Shapes: ``s`` tokens, ``b`` sequences, ``N`` query heads, ``K`` KV heads, ``H`` head dim, ``V`` the values' head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class SDPACoreAttention(torch.nn.Module):
    """Causal core attention by ``torch.nn.functional.scaled_dot_product_attention``: trains on a CPU, fast.

    Megatron's own ``DotProductAttention`` writes out every ``[s, s]`` score matrix, asks for a GPU, and takes no values
    of another head dim than the keys', as MLA has.
    """

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attention ``[s, b, N * V]`` of ``query [s, b, N, H]`` over ``key [s, b, K, H]``, ``value [s, b, K, V]``."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        shared = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)
