"""How long a decode step takes: a roofline for what is read and computed, alpha-beta for what is sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_dcp.model_config import ModelConfig
from megatron_dcp.planner.candidates import Candidate
from megatron_dcp.planner.decode_traffic import attention_traffic, ffn_traffic, step_traffic
from megatron_dcp.planner.machine import Machine, Sent
from megatron_dcp.planner.memory import attention_shape, kv_bytes_per_token, kv_dtype, kv_layout
from megatron_dcp.planner.weights import (
    LayerWeights,
    layer_bytes,
    layer_weights,
    products_in,
    table_bytes,
    table_parameters,
)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a decode step, which is the time between two tokens of a sequence.

    Attributes:
        weights: Reading weights, or computing with them where that takes longer.
        kv: The same of keys and values.
        exchange: What decode context parallelism sends, and the kernels that merge it.
        collectives: All other collectives.
        overhead: Kernels' own time, and what lies between two steps.
    """

    weights: float
    kv: float
    exchange: float
    collectives: float
    overhead: float

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.exchange + self.collectives + self.overhead


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a rank sends in a decode step, over all layers.

    Attributes:
        exchange_bytes: Per token and attention layer, what decode context parallelism adds.
        exchange_calls: Collectives per attention layer that decode context parallelism adds.
        bytes: Of all collectives of the step.
        calls: All collectives of the step.
    """

    exchange_bytes: float
    exchange_calls: int
    bytes: float
    calls: int


def layer_kinds(model: ModelConfig) -> dict[tuple[bool, bool], int]:
    """How many layers have ``(experts, a sliding window)``."""
    slides = model.window_attn_skip_freq or (0,) * model.num_layers
    kinds: dict[tuple[bool, bool], int] = {}
    for layer in range(model.num_layers):
        kind = model.is_moe_layer(layer), bool(slides[layer])
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def decode_time(
    model: ModelConfig, candidate: Candidate, machine: Machine, dtype: str, *, context: int, batch: int
) -> StepTime:
    """One step of ``batch`` sequences of one replica that have ``context`` tokens each.

    Stages of a pipeline compute one after the other, so their number changes nothing but the sends.
    """
    attention = list(attention_traffic(model, candidate, dtype, batch))
    sent = list(step_traffic(model, candidate, dtype, batch))
    products, tp = products_in(dtype), candidate.tp
    weights = machine.seconds(table_bytes(model, tp, dtype), 2 * batch * table_parameters(model, tp), "bfloat16")
    kv = exchange = 0.0
    collectives = sum(map(machine.collective_seconds, sent))
    for (experts, window), count in layer_kinds(model).items():
        layer = layer_weights(model, candidate.parallel, experts=experts)
        weights += count * layer_seconds(model, layer, machine, dtype, products, tokens=batch)
        keys = keys_read(model, candidate, context, window=window)
        kv += count * attention_seconds(model, candidate, machine, dtype, keys=batch * keys)
        ffn = ffn_traffic(model, candidate, dtype, batch, experts=experts)
        added, other = split_seconds(machine, (*attention, *ffn))
        exchange += count * (added + (machine.merge_s if candidate.dcp > 1 else 0.0))
        collectives += count * other
    overhead = model.num_layers * layer_overhead(machine, batch=batch) + step_overhead(candidate, machine, batch=batch)
    return StepTime(weights=weights, kv=kv, exchange=exchange, collectives=collectives, overhead=overhead)


def layer_overhead(machine: Machine, *, batch: int) -> float:
    """What a layer takes besides bytes and operations."""
    return machine.layer_s + batch * machine.layer_sequence_s


def step_overhead(candidate: Candidate, machine: Machine, *, batch: int) -> float:
    """What a step takes outside the layers."""
    followers = machine.followers_s if candidate.parallel.ranks > 1 else 0.0
    return machine.step_s + batch * machine.sequence_s + followers


def decode_traffic(model: ModelConfig, candidate: Candidate, dtype: str, *, batch: int) -> Traffic:
    """What a rank sends in that step; the context takes no part."""
    one_token = list(attention_traffic(model, candidate, dtype, 1))
    attention = list(attention_traffic(model, candidate, dtype, batch))
    sent = [(1, one) for one in step_traffic(model, candidate, dtype, batch)]
    for (experts, _), count in layer_kinds(model).items():
        ffn = ffn_traffic(model, candidate, dtype, batch, experts=experts)
        sent += [(count, one) for one in (*attention, *ffn)]
    return Traffic(
        exchange_bytes=sum(one.exchange_bytes for one in one_token),
        exchange_calls=sum(one.exchange_calls for one in one_token),
        bytes=sum(count * one.bytes for count, one in sent),
        calls=sum(count * one.calls for count, one in sent if one.ranks > 1),
    )


def split_seconds(machine: Machine, sent: Iterable[Sent]) -> tuple[float, float]:
    """What decode context parallelism adds to the time of collectives, and the rest."""
    added = other = 0.0
    for one in sent:
        instead = 0.0 if one.instead is None else machine.collective_seconds(one.instead)
        seconds = machine.collective_seconds(one)
        other += instead if one.exchange else seconds
        added += seconds - instead if one.exchange else 0.0
    return added, other


def layer_seconds(
    model: ModelConfig, layer: LayerWeights, machine: Machine, dtype: str, products: str, *, tokens: int
) -> float:
    """Products of ``tokens`` tokens with the weights of one layer, attention left out.

    Of the experts those are read that a token chose; routing is taken to be even and independent.
    """
    dense = layer_bytes(layer, dtype, read_experts=0)
    seconds = machine.seconds(dense, 2 * tokens * layer.matrices, products)
    if layer.experts and model.moe is not None:
        share = model.moe.moe_router_topk / model.moe.num_experts
        hit = layer.experts * (1 - (1 - share) ** tokens)
        num_bytes = layer_bytes(layer, dtype, read_experts=hit) - dense
        pairs = tokens * share * layer.experts
        seconds += machine.seconds(num_bytes, 2 * pairs * layer.expert, products)
    return seconds


def keys_read(model: ModelConfig, candidate: Candidate, context: int, *, window: bool) -> int:
    """Keys of one layer that the last token of a sequence sees on the rank that has most of them."""
    layout = kv_layout(candidate)
    if not window or model.window_size is None:
        return layout.local_length(context, 0)
    last, size = context - 1, model.window_size
    return max(layout.visible(last, rank) - layout.hidden(last, size, rank) for rank in range(layout.dcp_size))


def attention_seconds(model: ModelConfig, candidate: Candidate, machine: Machine, dtype: str, *, keys: int) -> float:
    """Attention of one layer to so many keys, one query each."""
    shape, stored = attention_shape(model, candidate), kv_dtype(dtype)
    num_bytes = keys * kv_bytes_per_token(model, candidate, stored)
    rate = machine.attention_rate(
        stored if candidate.kv_cache_dtype == "auto" else candidate.kv_cache_dtype,
        shape.head_dim,
        shape.heads // shape.kv_heads,
        latent=shape.v_in_k,
    )
    if rate is not None:
        return num_bytes / rate * (machine.imbalance if candidate.layer_ranks > 1 else 1.0)
    operations = 2 * keys * shape.heads * (shape.head_dim + shape.v_dim)
    return machine.seconds(num_bytes, operations, attention_products(dtype))


def attention_products(dtype: str) -> str:
    """What attention is computed in, as a key of `Machine.flops`: 8-bit keys are widened first."""
    return "float32" if dtype == "float32" else "bfloat16"
