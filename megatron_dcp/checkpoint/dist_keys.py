"""How ``torch_dist`` checkpoints name tensors, and stack those of all layers or experts into one.

Layers that are alike are stacked, ``decoder.layers.X`` of shape ``[layers, ...]``; others, and on demand all, are
numbered, ``decoder.layers.3.X``. Experts are stacked, ``mlp.experts.experts.X``, behind the layers where these are
stacked too; on demand they are numbered as well, ``mlp.experts.experts.7.X``.

A ``HybridModel`` has attention and MLP as layers of their own, numbered ``2i`` and ``2i + 1`` where they are the halves
of layer ``i``, and calls the final norm ``decoder.final_norm``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_dcp.checkpoint.names import fused_name, local_name, split_layer_name
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.model_tensors import layer_name

EMBEDDING = "embedding.word_embeddings.weight"
# States of a training that lie in the same files.
_TRAINING = ("optimizer", "chained_", "opt_param_scheduler", "rng_state", "rerun_state")
_STACKED = re.compile(r"^decoder\.layers\.([^\d.].*)$")
_EXPERTS = re.compile(r"^mlp\.experts\.experts\.(?:(\d+)\.)?(.+)$")
_LOCAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
# Megatron can save the two halves of a gated MLP's first layer under names of their own (singleton_local_shards).
_HALF = re.compile(r"^(.*\.linear_fc1\.(?:weight|bias)\d*)_([wv])$")
# An expert of TransformerEngine's grouped layers, where these are not stacked.
_GROUPED = re.compile(r"^mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")

_HYBRID_NORM = "decoder.final_norm."

Sizes = dict[str, tuple[int, ...]]
_Index = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: under which keys (the parts along dimension 0), and at which index of a stack."""

    keys: tuple[str, ...]
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a tensor is written: under which key, at which index of a stack of which sizes."""

    key: str
    stack: tuple[int, ...] = ()
    index: tuple[int, ...] = ()


def find_tensors(sizes: Sizes, config: ModelConfig, where: str) -> dict[str, Stored]:
    """Where every tensor of the model lies, by Megatron's local names; whatever belongs to a training is left out.

    Args:
        sizes: Size by key of all tensors in the checkpoint.
        where: The checkpoint, for messages.

    Raises:
        ValueError: A stack does not have as many layers or experts as the model.
    """
    keys = {key for key in sizes if not key.startswith(_TRAINING) and not key.endswith("_extra_state")}
    embeddings = [key for key in keys if key.endswith(EMBEDDING)]
    prefix = embeddings[0].removesuffix(EMBEDDING) if len(embeddings) == 1 else ""
    hybrid = f"{prefix}{_HYBRID_NORM}weight" in keys
    found: dict[str, Stored] = {}
    for key, parts in _with_halves_joined(keys).items():
        name = key.removeprefix(prefix)
        if hybrid:
            name = _gpt_name(name)
        stack = _STACKED.match(name)
        layer, rest = split_layer_name(name)
        if stack is None and layer is None:
            found[name] = Stored(parts)
            continue
        layers: list[tuple[int, _Index]]
        experts: list[tuple[str, _Index]]
        if stack is None:
            assert layer is not None
            layers = [(layer, ())]
        else:
            rest = stack[1]
            _check_stack(sizes, parts, 0, config.num_layers, "layers", where)
            layers = [(i, (i,)) for i in range(config.num_layers)]
        experts = [(local_name(grouped_expert_name(rest) or rest), ())]
        match = _EXPERTS.match(rest)
        if match is not None and config.moe is not None:
            if match[1] is None:
                _check_stack(sizes, parts, int(stack is not None), config.moe.num_experts, "experts", where)
                experts = [(_expert_name(e, match[2]), (e,)) for e in range(config.moe.num_experts)]
            else:
                experts = [(_expert_name(int(match[1]), match[2]), ())]
        for i, layer_index in layers:
            for local, expert_index in experts:
                found[layer_name(i, local)] = Stored(parts, layer_index + expert_index)
    return found


def places(name: str, config: ModelConfig) -> list[Place]:
    """Where a tensor of the model is written.

    Layers are stacked unless there are experts: then Megatron numbers them, as some may be dense. Where Megatron's
    own layers and TransformerEngine's ask for a norm under different names, it is written under both.
    """
    layer, rest = split_layer_name(name)
    if layer is None:
        return [Place(name)]
    prefix, stack, index = f"decoder.layers.{layer}.", _Index(), _Index()
    if config.moe is None:
        prefix, stack, index = "decoder.layers.", (config.num_layers,), (layer,)
    expert = _LOCAL_EXPERT.match(rest)
    if expert is not None:
        assert config.moe is not None
        rest = f"mlp.experts.experts.{expert[2]}"
        stack, index = (*stack, config.moe.num_experts), (*index, int(expert[1]))
    return [Place(prefix + each, stack, index) for each in _norm_names(rest, config, config.is_moe_layer(layer))]


def extra_state_keys(names: Iterable[str], config: ModelConfig) -> list[str]:
    """Keys of the (empty) extra states that Megatron loads with the tensors ``names``, in whole; it insists on them.

    Its own linear layers ask for one, of TransformerEngine's layers all do, attention too.
    """
    keys: dict[str, None] = {}
    for name in names:
        for place in places(name, config):
            module = place.key.removesuffix(".weight")
            if module == place.key or module.endswith((".router", "word_embeddings", "output_layer")):
                continue
            shard = f"{'.'.join(map(str, place.index)) or 0}_{'.'.join(map(str, place.stack)) or 1}"
            keys[f"{module}._extra_state/shard_{shard}"] = None
            if module.endswith("self_attention.linear_proj"):
                keys[f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{shard}"] = None
    return list(keys)


def grouped_expert_name(rest: str) -> str | None:
    """Megatron's local name of an expert's tensor in a grouped layer; ``None`` where ``rest`` is none."""
    match = _GROUPED.match(rest)
    return match and _expert_name(int(match[3]), f"{match[1]}.{match[2]}")


def _expert_name(expert: int, rest: str) -> str:
    return f"mlp.experts.local_experts.{expert}.{rest}"


def _gpt_name(name: str) -> str:
    """What a ``GPTModel`` calls a tensor of the ``HybridModel`` whose layers are attention and MLP in turns."""
    layer, rest = split_layer_name(name)
    if layer is None:
        return name.replace(_HYBRID_NORM, "decoder.final_layernorm.")
    return layer_name(layer // 2, rest)


def _with_halves_joined(keys: set[str]) -> dict[str, tuple[str, ...]]:
    """The keys that form one tensor, by its key."""
    joined = {key: (key,) for key in keys if not _HALF.match(key)}
    halves: dict[str, dict[str, str]] = {}
    for match in filter(None, map(_HALF.match, keys)):
        halves.setdefault(match[1], {})[match[2]] = match[0]
    return joined | {key: tuple(half[which] for which in ("w", "v") if which in half) for key, half in halves.items()}


def _check_stack(sizes: Sizes, parts: tuple[str, ...], axis: int, count: int, what: str, where: str) -> None:
    for part in parts:
        size = sizes[part]
        if len(size) < axis + 2 or size[axis] != count:
            raise ValueError(
                f"{part} in {where} has shape {size}, but the checkpoint's configuration asks for {count} {what}: one "
                "of the two belongs to another model"
            )


def _norm_names(rest: str, config: ModelConfig, moe_layer: bool) -> list[str]:
    """The names of ``rest`` for Megatron's own layers and for TransformerEngine's; one where they agree."""
    mla = {"self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj"}
    attention, mlp = {"self_attention.linear_qkv"}, {"mlp.linear_fc1"}
    # Megatron's own layers save norms under the fused names, but not with MLA.
    own = set() if config.mla is not None else attention | mlp
    fused = (attention if config.mla is None else mla) | (set() if moe_layer else mlp)
    return list(dict.fromkeys((fused_name(rest, own), fused_name(rest, fused))))
