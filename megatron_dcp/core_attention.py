"""Core attention of the training forward on a machine without a GPU.

Shapes: ``s`` tokens, ``b`` sequences, ``N`` query heads, ``K`` KV heads, ``H`` head dim, ``V`` the values' head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor


class SDPACoreAttention(torch.nn.Module):
    """Causal core attention by ``torch.nn.functional.scaled_dot_product_attention``: trains on a CPU, fast.

    Has a sliding window in the layers where the config has one. Megatron's own ``DotProductAttention`` writes out every
    ``[s, s]`` score matrix, asks for a GPU, and takes no values of another head dim than the keys', as MLA has.
    """

    def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        layer_number = args[0] if args else kwargs["layer_number"]
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] + 1 if slides else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attention ``[s, b, N * V]`` of ``query [s, b, N, H]`` over ``key [s, b, K, H]``, ``value [s, b, K, V]``."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        shared = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        mask = None
        if self.window is not None and self.window < len(query):
            mask = torch.ones(len(query), len(query), dtype=torch.bool, device=query.device).tril()
            mask = mask.triu(1 - self.window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)
