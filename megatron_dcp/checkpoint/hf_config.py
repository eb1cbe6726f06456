"""``config.json`` of a Hugging Face model, from and to `ModelConfig`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_dcp.checkpoint.families import FAMILIES, Family, family_of
from megatron_dcp.checkpoint.families.base import common_keys
from megatron_dcp.checkpoint.families.windows import KINDS, LayerTypes
from megatron_dcp.checkpoint.hf_values import check_values
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.model_tensors import padded_vocab_size
from megatron_dcp.rope import inverse_frequencies, softmax_scale

# Keys about the shape that are not written: other names of those that are, or taken for granted.
_OTHER_NAMES = (
    "rope_parameters",
    "layer_types",
    "dtype",
    "qk_head_dim",
    "head_dim",
    "num_local_experts",
    "moe_layer_freq",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "max_window_layers",
)
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; ``ValueError`` where there is none."""
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: the checkpoint is incomplete") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is truncated or no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not an object")
    return values


def family_named(values: dict[str, Any], where: str) -> Family:
    """The family that ``config.json`` names; ``ValueError`` if it is not supported."""
    model_type = values.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type={model_type!r} in {where} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def config_from_hf(
    values: dict[str, Any], where: str, *, generation: dict[str, Any] | None = None
) -> tuple[ModelConfig, Family]:
    """The shape and family that a ``config.json`` describes.

    Args:
        values: Content of ``config.json``, as written by transformers 4 or 5.
        where: The file, for messages.
        generation: Content of ``generation_config.json``; its end tokens come first, as in ``transformers``.

    Raises:
        ValueError: The family is not supported, a size is missing, or the model has parts that are not supported.
    """
    family = family_named(values, where)
    missing = [name for name in family.nullable if name not in values and name not in family.defaults]
    said = {name: value for name, value in values.items() if value is not None or name in family.nullable}
    values = {name: value for name, value in {**family.defaults, **said}.items() if value is not None}
    missing += [name for name in (*_REQUIRED, *family.required) if name not in values]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}, without which the model's shape is not known")
    check_values(values, where)
    _check_supported(values, family, where)
    theta, scaling = _rope(values, family, where)
    eos = (generation or {}).get("eos_token_id", values.get("eos_token_id"))
    try:
        fields: dict[str, Any] = dict(
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            ffn_hidden_size=values["intermediate_size"],
            num_attention_heads=values["num_attention_heads"],
            kv_channels=values["hidden_size"] // values["num_attention_heads"],
            vocab_size=values["vocab_size"],
            padded_vocab_size=padded_vocab_size(values["vocab_size"]),
            max_position_embeddings=values["max_position_embeddings"],
            normalization="RMSNorm",
            norm_epsilon=values["rms_norm_eps"],
            rotary_base=theta,
            rope_scaling=scaling,
            untie_embeddings_and_output_weights=not values.get("tie_word_embeddings", False),
            eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
        )
        config = ModelConfig(**fields | family.fields(values))
        inverse_frequencies(config)  # knows which scalings there are
        softmax_scale(config)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{where} describes no model that can be built: {error}") from error
    return config, family


def config_to_hf(config: ModelConfig, dtype: torch.dtype, original: dict[str, Any] | None = None) -> dict[str, Any]:
    """A ``config.json`` that `config_from_hf` and ``transformers`` read as ``config``.

    Args:
        dtype: dtype of the weights.
        original: The ``config.json`` that the model once came with: kept as it is while it still describes the
            model, else kept where it says nothing about the shape.

    Raises:
        ValueError: No supported family has such models.
    """
    family = family_of(config, (original or {}).get("model_type"))
    name = str(dtype).removeprefix("torch.")
    if original and original.get("model_type") == family.model_type and _describes(original, config):
        key = "torch_dtype" if "torch_dtype" in original and "dtype" not in original else "dtype"
        return original | {key: name}
    eos = list(config.eos_token_ids)
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **common_keys(config),
        **family.keys(config),
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": None,
        "torch_dtype": name,
    }
    if original:
        about_shape = {*values, *_OTHER_NAMES} - {"bos_token_id", "pad_token_id"}
        values |= {key: value for key, value in original.items() if key not in about_shape}
    config_from_hf(values, "the config.json of this model")  # a RoPE, too, that the family does not have is an error
    return values


def _describes(original: dict[str, Any], config: ModelConfig) -> bool:
    try:
        described, _ = config_from_hf(original, "config.json")
    except (ValueError, KeyError, TypeError):
        return False
    ignored = {"padded_vocab_size", "eos_token_ids"}  # the one is Megatron's, the other may be generation_config's
    return all(getattr(described, name) == getattr(config, name) for name in vars(config) if name not in ignored)


def _check_supported(values: dict[str, Any], family: Family, where: str) -> None:
    if "quantization_config" in values:
        raise ValueError(
            f"{where} has quantization_config: quantised weights are not supported; use the original ones, or load the "
            "model with transformers, which dequantises it where it can (quantization_config=FineGrainedFP8Config("
            "dequantize=True) for DeepSeek's fp8, Mxfp4Config(dequantize=True) for GPT-OSS), and save it with "
            "save_pretrained"
        )
    for name, off in {**family.off, "hidden_act": ("silu",), "partial_rotary_factor": (1, 1.0)}.items():
        if name in values and values[name] not in off:
            raise ValueError(f"{name}={values[name]!r} in {where} is not supported for {family.model_type} models")
    kinds = set(values.get("layer_types", ())) - set(KINDS if isinstance(family.windows, LayerTypes) else KINDS[:1])
    if kinds:
        raise ValueError(f"layer_types in {where} has {', '.join(sorted(kinds))}, which is not supported")


def _rope(values: dict[str, Any], family: Family, where: str) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from ``rope_theta`` and ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5).

    Where windows have a base of their own, it goes to ``rope_local_base_freq``, its name of transformers 4.
    """
    parameters = {**values.get("rope_scaling", {}), **values.get("rope_parameters", {})}
    if "rope_local_base_freq" in family.defaults and set(parameters) <= set(KINDS):
        parameters = {kind: dict(parameters[kind] or {}) for kind in parameters}
        local = parameters.get(KINDS[1], {})
        if local.get("rope_type", "default") != "default":
            raise ValueError(f"rope_parameters of {KINDS[1]} in {where} are scaled, which is not supported")
        values["rope_local_base_freq"] = local.get("rope_theta", values["rope_local_base_freq"])
        parameters = parameters.get(KINDS[0], {})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError(f"rope_parameters in {where} differ from layer to layer, which is not supported")
    theta = parameters.pop("rope_theta", values.get("rope_theta", 10000.0))
    check_values({"rope_theta": theta}, where)
    theta = float(theta)
    if parameters.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor in {where} is not supported")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    parameters.pop("type", None)
    if kind == "yarn" and family.latent_attention:
        _check_yarn(parameters, where)
    return theta, None if kind == "default" else {**parameters, "rope_type": kind}


def _check_yarn(parameters: dict[str, Any], where: str) -> None:
    """``transformers`` takes ``mscale`` and ``mscale_all_dim`` for cos and sin only together, Megatron each alone."""
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not all_dim and mscale not in (None, 1, 1.0) or all_dim and not mscale:
        raise ValueError(
            f"mscale={mscale} with mscale_all_dim={all_dim} in {where} is not supported: transformers and Megatron "
            "read it differently; give both, or neither"
        )
