"""Bytes of one GPU: weights, KV cache, activations and work space; the largest batch and context that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_dcp.attention_shape import AttentionShape, LatentShape
from megatron_dcp.cache.layout import KVLayout
from megatron_dcp.cache.sizes import StripeSizes, bytes_per_head, exchange_work_bytes, scales_per_head
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.planner.candidates import Candidate
from megatron_dcp.planner.weights import itemsize

KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "int8": 1}
# Assumption: of MLA the slices of expanded keys and values, and their partials, at most.
EXPANDED_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on a rank of the fullest pipeline stage.

    Attributes:
        kv: The blocks of all its sequences.
        activations: Of one step: hidden states, the widest layer, logits. An estimate.
        work: What exchanges and slices of attention take besides, at most.
        kv_copies: How many ranks of a replica hold the same keys and values.
    """

    weights: float
    kv: float
    activations: float
    work: float
    kv_copies: float

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.activations + self.work


def kv_bytes_per_token(model: ModelConfig, candidate: Candidate, dtype: str) -> int:
    """Bytes that a rank keeps of a token that it owns, in one layer."""
    shape = attention_shape(model, candidate)
    width = shape.head_dim if shape.v_in_k else shape.head_dim + shape.v_dim
    stored = dtype if candidate.kv_cache_dtype == "auto" else candidate.kv_cache_dtype
    scales = scales_per_head(shape.v_in_k) if stored in ("fp8_e4m3", "int8") else 0
    return shape.kv_heads * bytes_per_head(width, KV_BYTES[stored], scales)


def kv_dtype(weight_dtype: str) -> str:
    """What ``auto`` stores keys and values in: narrow weights are computed with in bf16."""
    return weight_dtype if weight_dtype in KV_BYTES else "bfloat16"


def attention_shape(model: ModelConfig, candidate: Candidate) -> AttentionShape:
    """Of one rank."""
    mla = model.mla
    return AttentionShape.on_rank(
        heads=model.num_attention_heads,
        kv_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        latent=None if mla is None else (mla.kv_lora_rank, mla.qk_pos_emb_head_dim),
        tp=candidate.tp,
        dcp=candidate.dcp,
        layout=candidate.layout,
    )


def latent_shape(model: ModelConfig, candidate: Candidate) -> LatentShape | None:
    """Of one rank; ``None`` without MLA."""
    if (mla := model.mla) is None:
        return None
    return LatentShape(
        heads=model.num_attention_heads // candidate.tp,
        attend_heads=attention_shape(model, candidate).heads,
        qk_head_dim=mla.qk_head_dim,
        rotated=mla.qk_pos_emb_head_dim,
        rank=mla.kv_lora_rank,
        v_head_dim=mla.v_head_dim,
        orthogonal=candidate.layout == "orthogonal",
    )


def stripe_sizes(model: ModelConfig, candidate: Candidate, dtype: str) -> StripeSizes:
    """Bytes of a cached key, and of a query with its partial, on one rank."""
    shape, latent = attention_shape(model, candidate), latent_shape(model, candidate)
    q_dim, out_dim = shape.head_dim, shape.v_dim
    if latent is not None:
        q_dim, out_dim = latent.qk_head_dim + latent.rotated, latent.exchanged_dim
    return StripeSizes(
        per_key=kv_bytes_per_token(model, candidate, kv_dtype(dtype)),
        per_query=shape.heads * (q_dim * itemsize(dtype) + (out_dim + 1) * 4),
    )


def kv_layout(candidate: Candidate) -> KVLayout:
    """How positions are dealt out over its DCP ranks."""
    cache = candidate.cache
    return KVLayout(dcp_size=candidate.dcp, interleave=cache.kv_interleave_size, block_size=cache.block_size)


def kv_copies(model: ModelConfig, candidate: Candidate) -> float:
    """tp splits KV heads until each rank has one, then copies them; ``within_tp`` makes shards of copies."""
    copies = max(1.0, candidate.tp / model.cached_kv_heads)
    return copies / candidate.dcp if candidate.layout == "within_tp" else copies


def kv_bytes(model: ModelConfig, candidate: Candidate, dtype: str, *, context: int, batch: int) -> float:
    """Bytes of whole blocks of ``batch`` sequences of one replica, in the fullest stage.

    A layer with a sliding window keeps the blocks that one token sees.
    """
    layout = kv_layout(candidate)
    blocks = layout.blocks_for(context)
    in_window = blocks if model.window_size is None else min(blocks, layout.window_blocks(model.window_size, 1))
    per_stage = model.num_layers // candidate.pp
    slides = model.window_attn_skip_freq or (0,) * model.num_layers
    layer_blocks = [in_window if slide else blocks for slide in slides]
    fullest = max(sum(layer_blocks[first : first + per_stage]) for first in range(0, model.num_layers, per_stage))
    block_bytes = layout.block_size * kv_bytes_per_token(model, candidate, kv_dtype(dtype))
    return batch * fullest * block_bytes


def activation_bytes(model: ModelConfig, candidate: Candidate, dtype: str, *, batch: int, chunk: int) -> float:
    """Estimate: a chunk of a prompt beside a decoded batch; four hidden states, the widest layer, logits in fp32."""
    striped = candidate.dcp if candidate.layout == "orthogonal" else 1
    tokens, size, tp = -(-chunk // striped) + batch, itemsize(dtype), candidate.tp
    attention = (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels / tp
    widest = max(attention, (3 if model.gated else 2) * model.ffn_hidden_size / tp)
    total = tokens * (4 * model.hidden_size + widest) * size
    if (moe := model.moe) is not None:
        parallel = candidate.parallel
        gathered = chunk + batch if striped > 1 else tokens
        pairs = gathered * moe.moe_router_topk / parallel.expert_model_parallel_size
        total += pairs * (3 * moe.moe_ffn_hidden_size / parallel.expert_tp + 2 * model.hidden_size) * size
    return total + batch * model.padded_vocab_size * (4 + size)


def memory(
    model: ModelConfig, candidate: Candidate, dtype: str, *, weights: float, context: int, batch: int, chunk: int
) -> Memory:
    """What a rank needs.

    Args:
        weights: Their bytes (`weight_bytes`).
        dtype: Of the weights.
        batch: Sequences of one replica.
        chunk: Most prompt tokens of a step.
    """
    work = exchange_work_bytes(
        stripe_sizes(model, candidate, dtype),
        kv_layout(candidate),
        "auto" if candidate.layout == "orthogonal" else "replicated",
        prefill_chunk_size=chunk,
        replicated=batch,
    )
    return Memory(
        weights=weights,
        kv=kv_bytes(model, candidate, dtype, context=context, batch=batch),
        activations=activation_bytes(model, candidate, dtype, batch=batch, chunk=chunk),
        work=work + (EXPANDED_BYTES if model.mla is not None else 0),
        kv_copies=kv_copies(model, candidate),
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, where all smaller ones do too; 0: none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
