"""What a Hugging Face model family is, and the rows that several families share.

A family is a table: per tensor of Megatron's layer, the Hugging Face names that it is packed from and the transform
that packs them. ``*`` in a name stands for the number of an expert. An expert's tensor whose Hugging Face names have no
``*`` is packed from slices of tensors that hold all experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dcp.checkpoint.families.transforms import QKV, GateUp, Same, Shape, Transform, Vocabulary
from megatron_dcp.checkpoint.families.windows import Windows
from megatron_dcp.checkpoint.names import split_layer_name
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.model_tensors import model_tensors

Table = Mapping[str, tuple[tuple[str, ...], Transform]]
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def mlp_rows(
    megatron: str, hf: str, gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Table:
    """A gated MLP: ``megatron`` and ``hf`` are the names of the module on either side."""
    gate, up, down = (f"{hf}.{name}.weight" for name in gate_up_down)
    return {f"{megatron}.linear_fc1.weight": ((gate, up), GateUp()), f"{megatron}.linear_fc2.weight": ((down,), Same())}


_QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")
NORMS: Table = {
    "input_layernorm.weight": (("input_layernorm.weight",), Same()),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), Same()),
}
ATTENTION: Table = {
    "self_attention.linear_qkv.weight": (tuple(f"{name}.weight" for name in _QKV), QKV()),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), Same()),
}
QKV_BIAS: Table = {"self_attention.linear_qkv.bias": (tuple(f"{name}.bias" for name in _QKV), QKV())}
QK_NORM: Table = {
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), Same()),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), Same()),
}
DENSE = mlp_rows("mlp", "mlp")
EXPERTS: Table = {
    "mlp.router.weight": (("mlp.gate.weight",), Same()),
    **mlp_rows("mlp.experts.local_experts.*", "mlp.experts.*"),
}
_OUTSIDE: dict[str, tuple[str, Transform]] = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", Vocabulary()),
    "decoder.final_layernorm.weight": ("model.norm.weight", Same()),
    "output_layer.weight": ("lm_head.weight", Vocabulary()),
}


# What most families have.
_PLAIN: dict[str, Any] = {
    "add_bias_linear": False,
    "swiglu": True,
    "geglu": False,
    "layernorm_zero_centered_gamma": False,
    "sandwich_norms": False,
    "scale_embeddings": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "window_rotary_base": None,
}


@dataclass(frozen=True)
class Row:
    """One tensor of Megatron and the Hugging Face tensors that it is packed from.

    Attributes:
        index: Only this slice of the first dimension of ``hf``'s tensors, which hold those of all experts; ``None``:
            the whole tensors.
    """

    megatron: str
    hf: tuple[str, ...]
    transform: Transform
    index: int | None = None

    def hf_shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """Whole shapes of ``hf``'s tensors, by name, for Megatron's ``shape``."""
        experts = () if self.index is None or config.moe is None else (config.moe.num_experts,)
        shapes = self.transform.hf_shapes(shape, config)
        return {name: (*experts, *each) for name, each in zip(self.hf, shapes, strict=True)}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``.

    Attributes:
        layer: The layer's table.
        defaults: What ``transformers`` assumes for keys that ``config.json`` leaves out.
        required: Keys beyond those of every model without which the shape is not known.
        nullable: Keys whose ``null`` says something else than their default, or that have none and must be there.
        off: Keys that change the model in a way that is not supported, and the values that do not.
        windows: How it says which layers have a sliding window.
    """

    model_type: str
    architecture: str
    layer: Table
    defaults: Mapping[str, Any]
    required: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
    off: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    windows: Windows = field(default_factory=Windows)

    def fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """Fields of `ModelConfig` that families read differently, from the keys of a ``config.json``.

        Raises:
            ValueError: The keys describe a model that Megatron cannot have.
        """
        return {**_PLAIN, **self.windows.shape(values), **self.shape(values)}

    @property
    def qkv_bias(self) -> bool:
        return "self_attention.linear_qkv.bias" in self.layer

    @property
    def qk_norm(self) -> bool:
        return "self_attention.q_layernorm.weight" in self.layer

    @property
    def latent_attention(self) -> bool:
        return "self_attention.linear_kv_up_proj.weight" in self.layer

    @property
    def experts(self) -> bool:
        return "mlp.router.weight" in self.layer

    def shape(self, values: dict[str, Any]) -> dict[str, Any]:
        """Of `fields` those that are this family's own."""
        heads = values["num_attention_heads"]
        return {
            "num_query_groups": values.get("num_key_value_heads", heads),
            "kv_channels": values.get("head_dim", values["hidden_size"] // heads),
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
        }

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        """Inverse of `fields`: the keys of a ``config.json`` for ``config``, as far as this family can say it."""
        return {
            "num_key_value_heads": config.num_query_groups,
            "head_dim": config.kv_channels,
            **self.windows.keys(config),
        }

    def rows(self, config: ModelConfig) -> list[Row]:
        """The table for a model of ``config``'s shape, in the order of the forward pass."""
        rows = []
        for name in model_tensors(config):
            layer, rest = split_layer_name(name)
            if layer is None:
                hf, transform = _OUTSIDE[rest]
                rows.append(Row(name, (hf,), transform))
                continue
            expert = _EXPERT.search(rest)
            names, transform = self.layer[_EXPERT.sub(".local_experts.*.", rest)]
            index = None
            if expert is not None:
                index = None if "*" in names[0] else int(expert[1])
                names = tuple(hf.replace("*", expert[1]) for hf in names)
            rows.append(Row(name, tuple(f"model.layers.{layer}.{hf}" for hf in names), transform, index))
        return rows

    def fits(self, config: ModelConfig) -> bool:
        """Whether a ``config.json`` of this family can say ``config``."""
        if (
            config.normalization != "RMSNorm"
            or config.rotary_percent != 1.0
            or (config.mla is not None) != self.latent_attention
            or (config.moe is not None) != self.experts
        ):
            return False
        try:
            shape = self.fields(common_keys(config) | self.keys(config))
        except ValueError:
            return False
        return all(getattr(config, name) == value for name, value in shape.items())


def common_keys(config: ModelConfig) -> dict[str, Any]:
    """Keys of ``config.json`` that say the same in all families."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        **({"hidden_act": "silu"} if config.swiglu else {}),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "rope_theta": config.rotary_base,
        "rope_scaling": config.rope_scaling,
        "attention_bias": False,
    }


def check_renormalised(topk: int) -> None:
    """Raise ``ValueError`` where weights of the chosen experts that add up to 1 are not what Megatron computes."""
    if topk < 2:
        raise ValueError(
            f"num_experts_per_tok={topk} with weights that are made to add up to 1 is not supported: Megatron does "
            "that from 2 experts per token on"
        )
