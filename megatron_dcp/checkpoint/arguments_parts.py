"""Latent attention, experts and sliding windows in Megatron-LM's ``args``: from and to the parts of a `ModelConfig`.

``moe_router_group_score_topk`` is ours (see `MoEConfig`), and so is ``window_rotary_base``.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from megatron_dcp.model_config import MLAConfig, ModelConfig, MoEConfig
from megatron_dcp.rope import YarnScaling

_MLA_SIZES = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
# By our names: Megatron's, and what its MLATransformerConfig assumes for arguments that are left out.
_YARN: dict[str, tuple[str, float]] = {
    "factor": ("rotary_scaling_factor", 40),
    "original_max_position_embeddings": ("original_max_position_embeddings", 4096),
    "beta_fast": ("beta_fast", 32),
    "beta_slow": ("beta_slow", 1),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
# Arguments that change the experts in a way that `MoEConfig` cannot say, and the values that do not.
MOE_OFF: dict[str, tuple[Any, ...]] = {
    "moe_shared_expert_gate": (None, False),
    "moe_latent_size": (None,),
    "moe_apply_probs_on_input": (None, False),
    "moe_router_load_balancing_type": (None, "none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
}


def mla_from_args(values: dict[str, Any]) -> MLAConfig | None:
    """Sizes of latent attention.

    Raises:
        ValueError: A size is missing, or its norms are.
    """
    if not values.get("multi_latent_attention"):
        return None
    missing = [name for name in _MLA_SIZES if values.get(name) is None]
    if missing:
        raise ValueError(f"multi_latent_attention=True without {', '.join(missing)}")
    if not values.get("qk_layernorm"):
        raise ValueError(
            "multi_latent_attention=True with qk_layernorm=False is not supported: Megatron then has no norm on the "
            "latents"
        )
    return MLAConfig(q_lora_rank=values.get("q_lora_rank"), **{name: values[name] for name in _MLA_SIZES})


def yarn_from_args(values: dict[str, Any]) -> dict[str, Any] | None:
    """RoPE scaling of a model with latent attention, for which Megatron takes yarn unless it is told not to."""
    if values.get("rope_type") == "rope":
        return None
    given = {ours: values.get(name) for ours, (name, _) in _YARN.items()}
    scaling = {ours: default if given[ours] is None else given[ours] for ours, (_, default) in _YARN.items()}
    return None if scaling["factor"] == 1 else {"rope_type": "yarn", **scaling}


def moe_from_args(values: dict[str, Any], num_layers: int, ffn_hidden_size: int) -> MoEConfig | None:
    """Experts and router, with the defaults of Megatron-LM for what is left out.

    Raises:
        ValueError: There is an argument that cannot be followed.
    """
    experts = values.get("num_experts") or values.get("num_moe_experts")
    if not experts:
        return None
    score_function: Any = values.get("moe_router_score_function") or "softmax"
    scaling = values.get("moe_router_topk_scaling_factor")
    # One group is none.
    grouped = values.get("moe_router_group_topk") is not None and values.get("moe_router_num_groups") != 1
    moe = MoEConfig(
        num_experts=experts,
        moe_layer_freq=_layer_freq(values.get("moe_layer_freq"), num_layers),
        moe_ffn_hidden_size=values.get("moe_ffn_hidden_size") or ffn_hidden_size,
        moe_router_topk=values.get("moe_router_topk") or 2,
        moe_router_score_function=score_function,
        # Of no effect on sigmoid.
        moe_router_pre_softmax=bool(values.get("moe_router_pre_softmax")) and score_function == "softmax",
        moe_router_topk_scaling_factor=None if scaling in (None, 1.0) else float(scaling),
        moe_router_enable_expert_bias=bool(values.get("moe_router_enable_expert_bias")),
        moe_router_num_groups=values.get("moe_router_num_groups") if grouped else None,
        moe_router_group_topk=values.get("moe_router_group_topk") if grouped else None,
        moe_router_group_score_topk=values.get("moe_router_group_score_topk") if grouped else None,
        moe_shared_expert_intermediate_size=values.get("moe_shared_expert_intermediate_size"),
    )
    return replace(moe, moe_router_group_score_topk=moe.group_score_topk or None)


def parts_to_args(config: ModelConfig) -> dict[str, Any]:
    """Inverse of those for its parts: the arguments of Megatron-LM for the parts that ``config`` has."""
    args: dict[str, Any] = {"multi_latent_attention": config.mla is not None, "num_experts": None}
    if config.mla is not None:
        args |= asdict(config.mla) | {"rope_type": "rope" if config.rope_scaling is None else "yarn"}
        if config.rope_scaling is not None:
            yarn = asdict(YarnScaling.of(config.rope_scaling))
            args |= {name: yarn[ours] for ours, (name, _) in _YARN.items()}
    if config.moe is not None:
        args |= asdict(config.moe) | {"moe_layer_freq": list(config.moe.moe_layer_freq)}
    if config.window_size is not None:
        args |= {
            "window_size": (config.window_size - 1, 0),
            "window_attn_skip_freq": list(config.window_attn_skip_freq or ()),
            "window_rotary_base": config.window_rotary_base,
        }
    return args


def window_from_args(values: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Fields of `ModelConfig` about sliding windows.

    Raises:
        ValueError: The window lets a token see later ones, or all before it.
    """
    size = values.get("window_size")
    if not size:
        return {}
    if len(size) != 2 or size[0] < 0 or size[1] != 0:
        raise ValueError(f"window_size={size} is not supported; supported is (tokens before the own one, 0)")
    freq = values.get("window_attn_skip_freq")
    if freq is None:
        slides = [1] * num_layers
    elif isinstance(freq, int) and freq > 0:
        slides = [int((layer + 1) % freq != 0) for layer in range(num_layers)]
    else:
        slides = [int(bool(each)) for each in freq]
    if not any(slides):
        return {}
    base = values.get("window_rotary_base")
    return {"window_size": size[0] + 1, "window_attn_skip_freq": tuple(slides), "window_rotary_base": base}


def _layer_freq(freq: Any, num_layers: int) -> tuple[int, ...]:
    """One number for every layer, also where Megatron has one for all: experts in every so many layers."""
    if freq is None:
        freq = 1
    if isinstance(freq, int) and freq > 0:
        return tuple(int(layer % freq == 0) for layer in range(num_layers))
    if isinstance(freq, (list, tuple)):
        return tuple(freq)
    raise ValueError(f"moe_layer_freq={freq!r} is neither a number above 0 nor a list with a 0 or a 1 for every layer")
