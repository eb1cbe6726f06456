"""Hugging Face model families: how their tensors and ``config.json`` correspond to Megatron's.

A family is a table. Rows that several families share are written once; a transform says how the tensors of a row
are packed into Megatron's one tensor and taken apart again. Both ways only move numbers: they are bit-exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.checkpoint.names import fit_vocab, model_tensors, split_layer_name
from megatron_dcp.model_config import ModelConfig

Shape = tuple[int, ...]


class Transform(ABC):
    """Packs the tensors of a row into Megatron's tensor of ``shape``."""

    @abstractmethod
    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]: ...

    @abstractmethod
    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor: ...

    @abstractmethod
    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]: ...


class Same(Transform):
    """One tensor, as it is."""

    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]:
        return [shape]

    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor:
        return tensors[0]

    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        return [tensor]


class Vocabulary(Transform):
    """Rows that only pad the vocabulary are added and taken away."""

    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]:
        return [(config.vocab_size, *shape[1:])]

    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor:
        return fit_vocab(tensors[0], config.vocab_size, config.padded_vocab_size)

    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        return [tensor[: config.vocab_size]]


class QKV(Transform):
    """q, k, v of all heads, interleaved per KV group: the group's query heads, its k, its v."""

    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]:
        queries = config.num_attention_heads * config.kv_channels
        keys = config.num_query_groups * config.kv_channels
        return [(queries, *shape[1:]), (keys, *shape[1:]), (keys, *shape[1:])]

    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor:
        grouped = [t.unflatten(0, (config.num_query_groups, -1)) for t in tensors]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        grouped = tensor.unflatten(0, (config.num_query_groups, -1))
        head = config.kv_channels
        q, k, v = grouped.split((grouped.shape[1] - 2 * head, head, head), dim=1)
        return [q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)]


class GateUp(Transform):
    """The two first matrices of a gated MLP, one below the other."""

    def hf_shapes(self, shape: Shape, config: ModelConfig) -> list[Shape]:
        return [(shape[0] // 2, *shape[1:])] * 2

    def pack(self, tensors: list[Tensor], config: ModelConfig) -> Tensor:
        return torch.cat(tensors)

    def unpack(self, tensor: Tensor, config: ModelConfig) -> list[Tensor]:
        return list(tensor.chunk(2))


@dataclass(frozen=True)
class Row:
    """One tensor of Megatron and the Hugging Face tensors that it is packed from."""

    megatron: str
    hf: tuple[str, ...]
    transform: Transform


_ATTENTION = "self_attn.{}_proj"
_QKV = tuple(_ATTENTION.format(x) for x in "qkv")
# Per layer, by Megatron's name: names and transform on the other side.
_LAYER: dict[str, tuple[tuple[str, ...], Transform]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), Same()),
    "self_attention.linear_qkv.weight": (tuple(f"{name}.weight" for name in _QKV), QKV()),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), Same()),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), Same()),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateUp()),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), Same()),
}
_QKV_BIAS = {"self_attention.linear_qkv.bias": (tuple(f"{name}.bias" for name in _QKV), QKV())}
_QK_NORM = {
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), Same()),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), Same()),
}
_OUTSIDE: dict[str, tuple[str, Transform]] = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", Vocabulary()),
    "decoder.final_layernorm.weight": ("model.norm.weight", Same()),
    "output_layer.weight": ("lm_head.weight", Vocabulary()),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``.

    Attributes:
        layer: The layer's table.
        defaults: What ``transformers`` assumes for keys that ``config.json`` leaves out.
        off: Keys that change the model in a way that is not supported, and the values that do not.
    """

    model_type: str
    architecture: str
    layer: Mapping[str, tuple[tuple[str, ...], Transform]]
    defaults: Mapping[str, Any]
    off: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def qkv_bias(self) -> bool:
        return "self_attention.linear_qkv.bias" in self.layer

    @property
    def qk_norm(self) -> bool:
        return "self_attention.q_layernorm.weight" in self.layer

    def rows(self, config: ModelConfig) -> list[Row]:
        """The table for a model of ``config``'s shape, in the order of the forward pass."""
        rows = []
        for name in model_tensors(config):
            layer, rest = split_layer_name(name)
            if layer is None:
                hf, transform = _OUTSIDE[rest]
                rows.append(Row(name, (hf,), transform))
            else:
                names, transform = self.layer[rest]
                rows.append(Row(name, tuple(f"model.layers.{layer}.{hf}" for hf in names), transform))
        return rows

    def fits(self, config: ModelConfig) -> bool:
        """Whether models of this family can have ``config``'s parts."""
        return (
            config.normalization == "RMSNorm"
            and config.swiglu
            and not config.add_bias_linear
            and config.rotary_percent == 1.0
            and config.add_qkv_bias == self.qkv_bias
            and config.qk_layernorm == self.qk_norm
        )


_NO_SLIDING = {"use_sliding_window": (None, False)}
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            layer=_LAYER,
            defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
            off={"attention_bias": (None, False), "mlp_bias": (None, False)},
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            layer=_LAYER | _QKV_BIAS,
            defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32},
            off=_NO_SLIDING,
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            layer=_LAYER | _QK_NORM,
            defaults={
                "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128,
            },
            off=_NO_SLIDING | {"attention_bias": (None, False)},
        ),
    )
}  # fmt: skip


def family_of(config: ModelConfig, model_type: str | None = None) -> Family:
    """The family to write ``config``'s model as: ``model_type`` where it fits, else the first that does.

    Raises:
        ValueError: No supported family has such models.
    """
    candidates = [FAMILIES[model_type]] if model_type in FAMILIES else []
    for family in [*candidates, *FAMILIES.values()]:
        if family.fits(config):
            return family
    raise ValueError(
        f"no supported Hugging Face family ({', '.join(FAMILIES)}) has models with normalization="
        f"{config.normalization}, swiglu={config.swiglu}, add_bias_linear={config.add_bias_linear}, "
        f"add_qkv_bias={config.add_qkv_bias}, qk_layernorm={config.qk_layernorm}, rotary_percent="
        f"{config.rotary_percent}; keep the checkpoint in torch_dist or legacy format"
    )
