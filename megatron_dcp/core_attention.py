"""Core attention of the training forward on a machine without a GPU.

Shapes: ``s`` tokens, ``b`` sequences, ``N`` query heads of this rank, ``K`` KV heads, ``H`` head dim, ``V`` the values'
head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor


class SDPACoreAttention(torch.nn.Module):
    """Causal core attention by ``torch.nn.functional.scaled_dot_product_attention``: trains on a CPU, fast.

    Has a sliding window in the layers where the config has one, and with ``softmax_type="learnable"`` Megatron's
    parameter ``softmax_offset [N]``: the score of one more key per head, which has no value (a sink).

    Megatron's own ``DotProductAttention`` writes out every ``[s, s]`` score matrix, asks for a GPU, and takes no values
    of another head dim than the keys', as MLA has.
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *args: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.tp_group = getattr(pg_collection, "tp", None)
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] + 1 if slides else None
        sinks_N = torch.zeros(
            config.num_attention_heads // config.tensor_model_parallel_size, dtype=config.params_dtype
        )
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(sinks_N)
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
        else:
            self.register_buffer("softmax_offset", sinks_N if config.softmax_type == "off-by-one" else None, False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attention ``[s, b, N * V]`` of ``query [s, b, N, H]`` over ``key [s, b, K, H]``, ``value [s, b, K, V]``."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        shared = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        mask = None
        if self.softmax_offset is not None or (self.window is not None and self.window < len(query)):
            mask = torch.ones(len(query), len(query), dtype=torch.bool, device=query.device).tril()
            mask = mask if self.window is None else mask.triu(1 - self.window)
        if mask is not None and self.softmax_offset is not None:
            return self._with_sinks(q, k, v, mask, self.softmax_offset).to(query.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _with_sinks(self, q_bNsH: Tensor, k_bNsH: Tensor, v_bNsV: Tensor, mask_ss: Tensor, sinks_N: Tensor) -> Tensor:
        """``[s, b, N * V]`` with one more key, which is 0 but in a further dim: there it is the sink, the query 1.

        In fp32, so that the scale of the scores does not round the sinks.
        """
        scale = self.softmax_scale or q_bNsH.shape[-1] ** -0.5
        q = F.pad(q_bNsH.float() * scale, (0, 1), value=1.0)
        sinks_bN1x = F.pad(sinks_N.float().view(1, -1, 1, 1), (k_bNsH.shape[-1], 0)).expand(len(k_bNsH), -1, 1, -1)
        k = torch.cat((sinks_bN1x, F.pad(k_bNsH.float(), (0, 1))), dim=2)
        v = F.pad(v_bNsV.float(), (0, 1, 1, 0))  # one more dim too: all of one size take the fast kernel
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=F.pad(mask_ss, (1, 0), value=True), scale=1.0)
        return out[..., :-1].permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks, cut over tensor parallel ranks, as Megatron saves them."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
