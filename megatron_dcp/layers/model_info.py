"""What the decode path reads off a Megatron model: its layers, windows and RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp

from megatron_dcp.rope import RotaryTable, YarnScaling


def attention_layers(gpt: Any) -> list[Any]:
    """The layers of this rank that attend; a ``HybridModel`` has others too."""
    return [layer for layer in gpt.decoder.layers if not isinstance(layer.self_attention, IdentityOp)]


def cached_kv_heads(config: Any) -> int:
    """KV heads that a ``TransformerConfig``'s cache has before tensor parallelism."""
    return 1 if config.multi_latent_attention else config.num_query_groups


def layer_windows(config: Any) -> list[int | None]:
    """For every layer of a ``TransformerConfig``'s model the keys that a query sees; ``None``: all before it."""
    from megatron.core.transformer.utils import is_layer_window_attention

    size, freq = config.window_size, config.window_attn_skip_freq
    slides = (is_layer_window_attention(size, freq, number) for number in range(1, config.num_layers + 1))
    return [size[0] + 1 if each else None for each in slides]


def rotary_table(gpt: Any, *, window: bool = False) -> RotaryTable | None:
    """RoPE of a model by global position; ``None`` where it has none.

    Args:
        window: Of its layers with a sliding window.

    Megatron rotates MLA's queries and keys in pairs of neighbouring dims and leaves them in another order; the order is
    the same for both, so scores do not depend on it.
    """
    table = _rotary_table(gpt, window)
    # Megatron makes some of these tables as plain tensors on the CPU, which do not move with the model
    device = next(gpt.parameters()).device
    return table if table is None else replace(table, inv_freq=table.inv_freq.to(device))


def _rotary_table(gpt: Any, window: bool) -> RotaryTable | None:
    config = gpt.config
    if config.multi_latent_attention:
        rotary = attention_layers(gpt)[0].self_attention.rotary_pos_emb
        if config.rope_type == "rope":
            return RotaryTable(inv_freq=rotary.inv_freq, interleaved=True)
        yarn = YarnScaling(
            factor=config.rotary_scaling_factor,
            original_max_position_embeddings=config.original_max_position_embeddings,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            mscale=config.mscale,
            mscale_all_dim=config.mscale_all_dim,
        )
        inv_freq = yarn.inverse_frequencies(config.qk_pos_emb_head_dim, config.rotary_base)
        return RotaryTable(inv_freq=inv_freq, interleaved=True, scale=yarn.concentration)
    rotary = getattr(gpt, "rotary_pos_emb", None)
    if rotary is None:
        return None
    if hasattr(rotary, "rope_local"):  # `megatron_dcp.gemma`, and Megatron-Bridge's Gemma 3
        rotary = rotary.rope_local if window else getattr(rotary, "rope", rotary)
    return RotaryTable(
        inv_freq=rotary.inv_freq / (rotary.seq_len_interpolation_factor or 1.0), interleaved=config.rotary_interleaved
    )
