"""What kind of value each key of a ``config.json`` has: a wrong one is an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "max_window_layers",
    "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "moe_intermediate_size", "first_k_dense_replace", "decoder_sparse_step", "n_group", "topk_group", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
_NUMBERS = (
    "rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "routed_scaling_factor",
    "swiglu_limit",
)  # fmt: skip
_FLAGS = ("tie_word_embeddings", "use_sliding_window", "norm_topk_prob")
_OBJECTS = ("rope_scaling", "rope_parameters")


def check_values(values: dict[str, Any], where: str) -> None:
    """Raise ``ValueError`` naming the first value of a wrong kind.

    Args:
        values: The keys that are there; ``None`` stands for none.
        where: The file, for messages.
    """
    _check(values, _COUNTS, _is_whole, "a whole number", where)
    _check(values, _NUMBERS, lambda value: _is_number(value) and value > 0, "a number above 0", where)
    _check(values, _FLAGS, lambda value: isinstance(value, bool), "true or false", where)
    _check(values, _OBJECTS, lambda value: isinstance(value, dict), "an object", where)
    _check(values, ("eos_token_id",), _are_tokens, "a token id or a list of them", where)
    layers = values.get("num_hidden_layers")
    _check(
        values,
        ("layer_types",),
        lambda value: isinstance(value, list) and len(value) == layers,
        f"a list with an entry for each of num_hidden_layers={layers} layers",
        where,
    )


def _check(values: dict[str, Any], names: tuple[str, ...], good: Callable[[Any], bool], what: str, where: str) -> None:
    for name in names:
        value = values.get(name)
        if value is not None and not good(value):
            raise ValueError(f"{where} describes no model that can be built: {name}={value!r} must be {what}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_tokens(value: Any) -> bool:
    return all(map(_is_whole, value)) if isinstance(value, list) else _is_whole(value)
