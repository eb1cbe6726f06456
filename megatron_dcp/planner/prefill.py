"""How long the first token takes: a prompt alone, in chunks."""

from __future__ import annotations

from megatron_dcp.model_config import ModelConfig
from megatron_dcp.planner.candidates import Candidate
from megatron_dcp.planner.decode_traffic import Groups, attention_traffic, ffn_traffic
from megatron_dcp.planner.machine import Machine
from megatron_dcp.planner.memory import attention_shape, kv_layout, latent_shape, stripe_sizes
from megatron_dcp.planner.timing import (
    attention_products,
    layer_kinds,
    layer_overhead,
    layer_seconds,
    split_seconds,
    step_overhead,
)
from megatron_dcp.planner.weights import itemsize, layer_weights, products_in

MOST_CHUNKS = 1024  # that are looked at one by one


def prefill_seconds(
    model: ModelConfig, candidate: Candidate, machine: Machine, dtype: str, *, context: int, chunk: int
) -> float:
    """Of a prompt of ``context`` tokens that has a replica for itself.

    In ``orthogonal`` the DCP ranks share the tokens of a chunk, and keys or queries travel, whichever are fewer bytes;
    keys travel while a rank attends. In ``within_tp`` every rank has every token, and partials are exchanged.
    """
    striped = candidate.dcp if candidate.layout == "orthogonal" else 1
    kinds, attention = layer_kinds(model), _Attention(model, candidate, machine, dtype)
    steady: dict[tuple[int, bool], float] = {}  # what does not depend on where the chunk begins
    chunks, seconds = -(-context // chunk), 0.0
    stride = -(-chunks // MOST_CHUNKS)
    for first in range(0, chunks, stride):
        count = min(stride, chunks - first)
        start = (first + (count - 1) // 2) * chunk  # time grows with it evenly: the middle one stands for all
        tokens = min(chunk, context - start)
        for (experts, window), layers in kinds.items():
            key = tokens, experts
            if key not in steady:
                own = -(-tokens // striped)
                steady[key] = _products(model, candidate, machine, dtype, tokens, own, experts=experts)
            seconds += count * layers * (steady[key] + attention.seconds(start, tokens, window=window))
        seconds += count * step_overhead(candidate, machine, batch=1)
    return seconds


def _products(
    model: ModelConfig, candidate: Candidate, machine: Machine, dtype: str, tokens: int, own: int, *, experts: bool
) -> float:
    """Of a layer without attention itself: ``own`` tokens of a chunk; of experts all, if DCP ranks share them."""
    parallel, products = candidate.parallel, products_in(dtype)
    layer = layer_weights(model, parallel, experts=experts)
    gathered = parallel.expert_model_parallel_size * parallel.expert_tp > candidate.tp and own < tokens
    seconds = layer_seconds(model, layer, machine, dtype, products, tokens=own)
    outputs = float(own * layer.outputs)
    hidden = own * model.hidden_size * itemsize(dtype)
    sent = [Groups(candidate=candidate).all_reduce("output", "tp", hidden)]
    if experts and model.moe is not None:
        pairs = model.moe.moe_router_topk / model.moe.num_experts * layer.experts  # for each token
        outputs += (tokens if gathered else own) * pairs * layer.expert_outputs
        if gathered:
            seconds += 2 * (tokens - own) * pairs * layer.expert / machine.flops[products]
            sent.append(Groups(candidate=candidate).all_gather("tokens", "dcp", hidden))
    seconds += machine.activations * outputs * itemsize(dtype) / machine.memory_bandwidth
    sent += ffn_traffic(model, candidate, dtype, tokens if experts and gathered else own, experts=experts)
    if candidate.layout == "within_tp":  # every rank has every token: queries and partials travel as in decode
        seconds += split_seconds(machine, attention_traffic(model, candidate, dtype, own))[0]
    seconds += sum(map(machine.collective_seconds, sent)) + layer_overhead(machine, batch=1)
    return seconds + (machine.merge_s if candidate.dcp > 1 else 0.0)


class _Attention:
    """Attention of one layer to all that a chunk sees, and what travels for it."""

    def __init__(self, model: ModelConfig, candidate: Candidate, machine: Machine, dtype: str) -> None:
        self.model, self.candidate, self.machine = model, candidate, machine
        self.shape, self.latent = attention_shape(model, candidate), latent_shape(model, candidate)
        self.sizes, self.layout = stripe_sizes(model, candidate, dtype), kv_layout(candidate)
        self.flops = machine.chunk_flops(attention_products(dtype), self.shape.head_dim)

    def seconds(self, start: int, tokens: int, *, window: bool) -> float:
        """Of ``tokens`` tokens from position ``start`` on."""
        seen, mean, dcp = start + tokens, start + (tokens + 1) / 2, self.candidate.dcp
        if window and self.model.window_size is not None:
            seen, mean = min(seen, self.model.window_size + tokens), min(mean, self.model.window_size)
        if self.latent is None:
            operations = 2 * tokens * mean * self.shape.heads * (self.shape.head_dim + self.shape.v_dim)
        else:
            forms = self.latent.operations(tokens, round(mean))
            operations = 2 * (min(forms) if self.latent.values_first else forms[0]) * self.shape.heads
        computing = operations / dcp / self.flops
        if dcp == 1 or self.candidate.layout == "within_tp":
            return computing
        keys = (dcp - 1) * self.sizes.per_key * self.layout.block_size * self.layout.blocks_for(seen)
        queries = (dcp - 1) * self.sizes.per_query * -(-tokens // dcp)
        groups = Groups(candidate=self.candidate)
        if keys <= queries:
            return max(computing, self.machine.collective_seconds(groups.sent("keys", "ring", "dcp", keys)))
        sent = groups.sent("queries", "all_to_all", "dcp", queries, calls=2)
        return computing + self.machine.collective_seconds(sent)
