"""How the tensors of a Megatron GPT model are named elsewhere, and cut over ranks (`megatron_dcp.model_tensors`)."""

from __future__ import annotations

import re
from collections.abc import Container

import torch
from torch import Tensor

from megatron_dcp.model_tensors import TensorSpec, layer_name

# TransformerEngine's layers hold the norm in front of a linear layer inside that layer: its names, the plain ones.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")


def split_layer_name(name: str) -> tuple[int | None, str]:
    """The layer's number and the rest of the name; ``(None, name)`` for tensors of no layer."""
    match = _LAYER.match(name)
    return (int(match[1]), match[2]) if match else (None, name)


def global_layer_name(name: str, first: int) -> str:
    """``name``, whose layer has a stage's own number, with the global one; layer ``first`` is the stage's first."""
    layer, rest = split_layer_name(name)
    return name if layer is None else layer_name(layer + first, rest)


def global_expert_name(name: str, first: int) -> str:
    """``name``, whose expert has a rank's own number, with the global one; expert ``first`` is the rank's first."""
    return _EXPERT.sub(lambda match: str(int(match[0]) + first), name)


def local_name(rest: str) -> str:
    """The name inside a layer that Megatron's local spec uses for ``rest``, which may be a fused norm's."""
    for fused, plain in _FUSED_NORMS.items():
        if rest.startswith(fused):
            return plain + rest.removeprefix(fused)
    return rest


def fused_name(rest: str, modules: Container[str]) -> str:
    """Inverse of `local_name`: the name inside a layer whose ``modules`` hold the norm in front of them."""
    for fused, plain in _FUSED_NORMS.items():
        if rest.startswith(plain) and fused.removesuffix(".layer_norm_") in modules:
            return fused + rest.removeprefix(plain)
    return rest


def shard_ranges(spec: TensorSpec, tp: int, rank: int) -> list[tuple[int, int]]:
    """``(start, length)`` along ``tp_dim`` of what ``rank`` of ``tp`` holds, one per part, in order."""
    assert spec.tp_dim is not None
    part = spec.shape[spec.tp_dim] // spec.parts
    assert part % tp == 0, (spec, tp)
    length = part // tp
    return [(p * part + rank * length, length) for p in range(spec.parts)]


def shard(whole: Tensor, spec: TensorSpec, tp: int, rank: int) -> Tensor:
    """What ``rank`` of ``tp`` tensor parallel ranks holds of ``whole``; a view where that is possible."""
    if spec.tp_dim is None or tp == 1:
        return whole
    pieces = [whole.narrow(spec.tp_dim, start, length) for start, length in shard_ranges(spec, tp, rank)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=spec.tp_dim)


def join(shards: list[Tensor], spec: TensorSpec) -> Tensor:
    """Inverse of `shard`: the whole tensor from those of all ranks, in rank order."""
    if spec.tp_dim is None or len(shards) == 1:
        return shards[0]
    parts = [s.chunk(spec.parts, dim=spec.tp_dim) for s in shards]
    return torch.cat([rank_parts[p] for p in range(spec.parts) for rank_parts in parts], dim=spec.tp_dim)


def fit_vocab(tensor: Tensor, vocab_size: int, padded: int) -> Tensor:
    """``tensor`` with its first ``vocab_size`` rows kept and zero rows after them, ``padded`` rows in all."""
    if padded == tensor.shape[0] and padded == vocab_size:
        return tensor
    out = tensor.new_zeros((padded, *tensor.shape[1:]))
    out[:vocab_size] = tensor[:vocab_size]
    return out
