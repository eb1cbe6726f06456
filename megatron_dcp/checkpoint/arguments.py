"""Megatron-LM's ``args`` namespace: how the shape of a model travels with a Megatron checkpoint.

Written so that Megatron-LM's ``--use-checkpoint-args`` finds what it looks for. Some attributes are ours:
``rope_scaling``, ``eos_token_ids``, ``geglu``, ``sandwich_norms`` and ``scale_embeddings`` (see `ModelConfig`), and
``hf_config``, the ``config.json`` that the model came with.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from megatron_dcp.checkpoint.arguments_parts import (
    MOE_OFF,
    mla_from_args,
    moe_from_args,
    parts_to_args,
    window_from_args,
    yarn_from_args,
)
from megatron_dcp.checkpoint.hybrid import as_gpt
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.model_tensors import VOCAB_DIVISIBLE_BY

# Arguments of Megatron-LM that change the model in a way that `ModelConfig` cannot say, and the values that do not.
_OFF: dict[str, tuple[Any, ...]] = {
    "mtp_num_layers": (None, 0),
    "mla_down_proj_fusion": (None, False),
    "is_hybrid_model": (None, False),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_type": (None,),
    "attention_output_gate": (None, False),
    "qk_l2_norm": (None, False),
    "no_rope_freq": (None, 0),
    "rotary_interleaved": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "squared_relu": (None, False),
    "use_mup": (None, False),
    "use_legacy_models": (None, False),
    **MOE_OFF,
}

# The constants that Megatron-Core fixes for --use-rope-scaling (Llama 3.1's).
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_from_args(args: Any, where: str) -> ModelConfig:
    """The shape that ``args`` describes.

    Args:
        args: The ``Namespace`` that Megatron-LM puts into a checkpoint, or ``None``.
        where: The file, for messages.

    Raises:
        ValueError: ``args`` is missing or lacks a size, or asks for what this package does not know.
    """
    if args is None:
        raise ValueError(
            f"{where} has no 'args': the checkpoint does not say what shape its model has. Save it with Megatron-LM or "
            "with megatron_dcp.checkpoint.save_model, which put it there, or convert the Hugging Face original"
        )
    values = as_gpt(dict(args) if isinstance(args, dict) else vars(args), where)
    for name, off in _OFF.items():
        if values.get(name) not in off:
            raise ValueError(f"{name}={values[name]!r} in the args of {where} is not supported")
    required = ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "max_position_embeddings")
    missing = [name for name in required if values.get(name) is None]
    if missing:
        raise ValueError(f"the args in {where} lack {', '.join(missing)}, without which the model's shape is not known")
    _check_positions(values, where)

    try:
        return _config(values)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"the args in {where} describe no model that can be built: {error}") from error


def _config(values: dict[str, Any]) -> ModelConfig:
    heads = values["num_attention_heads"]
    gated = bool(values.get("swiglu") or values.get("geglu") or values.get("quick_geglu"))
    ffn = values.get("ffn_hidden_size")
    if ffn is None:  # Megatron-LM's own rule for an argument left out
        ffn = int((4 * values["hidden_size"] * 2 / 3) / 64) * 64 if gated else 4 * values["hidden_size"]
    mla = mla_from_args(values)
    return ModelConfig(
        num_layers=values["num_layers"],
        hidden_size=values["hidden_size"],
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=heads if mla else _query_groups(values, heads),
        kv_channels=values.get("kv_channels") or values["hidden_size"] // heads,
        vocab_size=_vocab_size(values),
        padded_vocab_size=values["padded_vocab_size"],
        max_position_embeddings=values["max_position_embeddings"],
        normalization=values.get("normalization", "LayerNorm"),
        norm_epsilon=_first(values, ("norm_epsilon", "layernorm_epsilon"), 1e-5),
        swiglu=bool(values.get("swiglu")),
        add_qkv_bias=bool(values.get("add_qkv_bias")),
        add_bias_linear=bool(values.get("add_bias_linear", True)),
        qk_layernorm=bool(values.get("qk_layernorm")),
        rotary_base=float(values.get("rotary_base") or 10000.0),
        rotary_percent=float(_first(values, ("rotary_percent",), 1.0)),
        rope_scaling=_rope_scaling(values),
        untie_embeddings_and_output_weights=bool(values.get("untie_embeddings_and_output_weights")),
        eos_token_ids=tuple(values.get("eos_token_ids") or ()),
        mla=mla,
        moe=moe_from_args(values, values["num_layers"], ffn),
        softmax_scale=values.get("softmax_scale"),
        layernorm_zero_centered_gamma=bool(values.get("apply_layernorm_1p")),
        softmax_type=values.get("softmax_type") or "vanilla",
        geglu=bool(values.get("geglu")),
        quick_geglu=bool(values.get("quick_geglu")),
        glu_linear_offset=float(values.get("glu_linear_offset") or 0.0),
        activation_func_clamp_value=values.get("activation_func_clamp_value"),
        sandwich_norms=bool(values.get("sandwich_norms")),
        scale_embeddings=bool(values.get("scale_embeddings")),
        **window_from_args(values, values["num_layers"]),
    )


def args_from_config(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    iteration: int,
    hf_config: dict[str, Any] | None = None,
    has_tokenizer: bool = False,
) -> Namespace:
    """Inverse of `config_from_args`: a namespace of plain values, readable with weights-only safety."""
    scaling = config.rope_scaling or {}
    llama3 = scaling.get("rope_type", scaling.get("type")) == "llama3"
    linear = scaling.get("rope_type", scaling.get("type")) == "linear"
    return Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        group_query_attention=config.num_query_groups != config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.padded_vocab_size,
        make_vocab_size_divisible_by=VOCAB_DIVISIBLE_BY,
        max_position_embeddings=config.max_position_embeddings,
        seq_length=config.max_position_embeddings,
        position_embedding_type="rope",
        add_position_embedding=True,
        use_rotary_position_embeddings=True,
        rotary_base=int(config.rotary_base) if config.rotary_base.is_integer() else config.rotary_base,
        rotary_percent=config.rotary_percent,
        rotary_interleaved=False,
        rotary_seq_len_interpolation_factor=scaling["factor"] if linear else None,
        use_rope_scaling=llama3,
        rope_scaling_factor=scaling["factor"] if llama3 else 8.0,
        normalization=config.normalization,
        norm_epsilon=config.norm_epsilon,
        apply_layernorm_1p=config.layernorm_zero_centered_gamma,
        softmax_scale=config.softmax_scale,
        swiglu=config.swiglu,
        squared_relu=False,
        quick_geglu=config.quick_geglu,
        glu_linear_offset=config.glu_linear_offset,
        activation_func_clamp_value=config.activation_func_clamp_value,
        softmax_type=config.softmax_type,
        add_bias_linear=config.add_bias_linear,
        add_qkv_bias=config.add_qkv_bias,
        qk_layernorm=config.qk_layernorm,
        untie_embeddings_and_output_weights=config.untie_embeddings_and_output_weights,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        transformer_impl="local",
        tokenizer_type="HuggingFaceTokenizer" if has_tokenizer else None,
        iteration=iteration,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        rope_scaling=config.rope_scaling,
        eos_token_ids=list(config.eos_token_ids),
        hf_config=hf_config,
        geglu=config.geglu,
        sandwich_norms=config.sandwich_norms,
        scale_embeddings=config.scale_embeddings,
        **parts_to_args(config),
    )


def _first(values: dict[str, Any], names: tuple[str, ...], default: Any) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), default)


def _query_groups(values: dict[str, Any], heads: int) -> int:
    """``--num-query-groups`` has a default of 1, which counts only together with ``--group-query-attention``."""
    return (values.get("group_query_attention", True) and values.get("num_query_groups")) or heads


def _check_positions(values: dict[str, Any], where: str) -> None:
    kind = values.get("position_embedding_type", "learned_absolute")
    if kind != "rope" and not values.get("use_rotary_position_embeddings"):
        raise ValueError(
            f"position_embedding_type={kind!r} in the args of {where} is not supported; supported is 'rope'"
        )


def _vocab_size(values: dict[str, Any]) -> int:
    """Tokens that exist; all rows where the checkpoint does not say it."""
    padded, size = values["padded_vocab_size"], values.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        return padded
    # Megatron-LM's NullTokenizer adds an end-of-document token to the number that it is given.
    return min(size + (values.get("tokenizer_type") == "NullTokenizer"), padded)


def _rope_scaling(values: dict[str, Any]) -> dict[str, Any] | None:
    if values.get("rope_scaling"):
        return dict(values["rope_scaling"])
    if values.get("multi_latent_attention"):
        return yarn_from_args(values)
    if values.get("use_rope_scaling"):
        return {"rope_type": "llama3", "factor": float(values.get("rope_scaling_factor") or 8.0), **_LLAMA3}
    factor = values.get("rotary_seq_len_interpolation_factor")
    if factor not in (None, 1, 1.0):
        return {"rope_type": "linear", "factor": float(factor)}
    return None
