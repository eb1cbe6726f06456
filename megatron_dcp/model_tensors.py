"""The parameters of a Megatron GPT model: names, whole shapes, and how tensor parallelism cuts them. No torch.

Names are the parameter names of a model built from Megatron's local layer spec. *Whole* means: of all tensor
parallel ranks together, vocabulary padded.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dcp.model_config import MLAConfig, ModelConfig, MoEConfig

VOCAB_DIVISIBLE_BY = 128


@dataclass(frozen=True)
class TensorSpec:
    """One parameter.

    Attributes:
        shape: Whole shape.
        tp_dim: Dimension that tensor parallelism cuts; ``None``: every rank holds it whole.
        parts: Equal parts that lie one after the other along ``tp_dim``; a rank holds its share of every one.
            2 for the first layer of a gated MLP, ``[gate; up]``.
        vocab: Whether dimension 0 is the padded vocabulary.
        expert: Whether it belongs to one expert: cut by expert tensor parallelism, held by one expert parallel rank.
    """

    shape: tuple[int, ...]
    tp_dim: int | None = None
    parts: int = 1
    vocab: bool = False
    expert: bool = False


def padded_vocab_size(vocab_size: int, tp: int = 1) -> int:
    """Rows of the embedding by Megatron's convention: the next multiple of ``128 * tp``."""
    multiple = VOCAB_DIVISIBLE_BY * tp
    return -(-vocab_size // multiple) * multiple


def layer_name(layer: int, rest: str) -> str:
    """Name of a tensor of the layer with global number ``layer`` (from 0)."""
    return f"decoder.layers.{layer}.{rest}"


def model_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every parameter of the model by name, in the order of the forward pass.

    Experts have their global numbers: ``mlp.experts.local_experts.7.linear_fc1.weight`` is expert 7 of the model.
    """
    embedding = TensorSpec((config.padded_vocab_size, config.hidden_size), tp_dim=0, vocab=True)
    kinds = {experts: layer_tensors(config, experts=experts) for experts in map(config.is_moe_layer, _layers(config))}
    tensors = {"embedding.word_embeddings.weight": embedding}
    for i in _layers(config):
        tensors |= {layer_name(i, rest): spec for rest, spec in kinds[config.is_moe_layer(i)].items()}
    tensors |= _norm(config, "decoder.final_layernorm", config.hidden_size)
    if config.untie_embeddings_and_output_weights:
        tensors["output_layer.weight"] = embedding
    return tensors


def layer_tensors(config: ModelConfig, *, experts: bool, numbers: range | None = None) -> dict[str, TensorSpec]:
    """Every parameter of a layer by its name in the layer: one with experts, or with a dense MLP.

    Args:
        numbers: Only these experts.
    """
    hidden = config.hidden_size
    attention = _attention(config) if config.mla is None else _latent_attention(config, config.mla)
    layer = _norm(config, "input_layernorm", hidden) | attention | _norm(config, "pre_mlp_layernorm", hidden)
    if not experts or config.moe is None:
        return layer | _mlp(config, "mlp", config.ffn_hidden_size)
    return layer | _experts(config, config.moe, range(config.moe.num_experts) if numbers is None else numbers)


def _layers(config: ModelConfig) -> range:
    return range(config.num_layers)


def _norm(config: ModelConfig, name: str, size: int) -> dict[str, TensorSpec]:
    kinds = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    return {f"{name}.{kind}": TensorSpec((size,)) for kind in kinds}


def _attention(config: ModelConfig) -> dict[str, TensorSpec]:
    hidden, head = config.hidden_size, config.kv_channels
    queries = config.num_attention_heads * head
    qkv = queries + 2 * config.num_query_groups * head
    tensors = {"linear_qkv.weight": TensorSpec((qkv, hidden), tp_dim=0)}
    if config.add_qkv_bias or config.add_bias_linear:
        tensors["linear_qkv.bias"] = TensorSpec((qkv,), tp_dim=0)
    if config.softmax_type == "learnable":
        tensors["core_attention.softmax_offset"] = TensorSpec((config.num_attention_heads,), tp_dim=0)
    if config.qk_layernorm:
        tensors |= _norm(config, "q_layernorm", head) | _norm(config, "k_layernorm", head)
    tensors["linear_proj.weight"] = TensorSpec((hidden, queries), tp_dim=1)
    if config.add_bias_linear:
        tensors["linear_proj.bias"] = TensorSpec((hidden,))
    if config.sandwich_norms:
        tensors |= _norm(config, "linear_proj.post_layernorm", hidden)
    return {f"self_attention.{name}": spec for name, spec in tensors.items()}


def _latent_attention(config: ModelConfig, mla: MLAConfig) -> dict[str, TensorSpec]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    queries = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    if mla.q_lora_rank is None:
        tensors = {"linear_q_proj.weight": TensorSpec((queries, hidden), tp_dim=0)}
    else:
        tensors = {
            "linear_q_down_proj.weight": TensorSpec((mla.q_lora_rank, hidden), tp_dim=0),
            **_norm(config, "q_layernorm", mla.q_lora_rank),
            "linear_q_up_proj.weight": TensorSpec((queries, mla.q_lora_rank), tp_dim=0),
        }
    expanded = heads * (mla.qk_head_dim + mla.v_head_dim)
    tensors |= {
        "linear_kv_down_proj.weight": TensorSpec((mla.latent_dim, hidden), tp_dim=0),
        **_norm(config, "kv_layernorm", mla.kv_lora_rank),
        "linear_kv_up_proj.weight": TensorSpec((expanded, mla.kv_lora_rank), tp_dim=0),
        "linear_proj.weight": TensorSpec((hidden, heads * mla.v_head_dim), tp_dim=1),
    }
    return {f"self_attention.{name}": spec for name, spec in tensors.items()}


def _mlp(config: ModelConfig, prefix: str, ffn: int, *, expert: bool = False) -> dict[str, TensorSpec]:
    hidden, gated = config.hidden_size, 2 if config.gated else 1
    tensors = {
        "linear_fc1.weight": TensorSpec((gated * ffn, hidden), tp_dim=0, parts=gated, expert=expert),
        "linear_fc2.weight": TensorSpec((hidden, ffn), tp_dim=1, expert=expert),
    }
    if config.add_bias_linear:
        tensors["linear_fc1.bias"] = TensorSpec((gated * ffn,), tp_dim=0, parts=gated, expert=expert)
        tensors["linear_fc2.bias"] = TensorSpec((hidden,), expert=expert)
    if config.sandwich_norms and not expert:
        tensors |= _norm(config, "linear_fc2.post_layernorm", hidden)
    return {f"{prefix}.{name}": spec for name, spec in tensors.items()}


def _experts(config: ModelConfig, moe: MoEConfig, numbers: range) -> dict[str, TensorSpec]:
    tensors = {"mlp.router.weight": TensorSpec((moe.num_experts, config.hidden_size))}
    if config.add_bias_linear:
        tensors["mlp.router.bias"] = TensorSpec((moe.num_experts,))
    if moe.moe_router_enable_expert_bias:
        tensors["mlp.router.expert_bias"] = TensorSpec((moe.num_experts,))
    for expert in numbers:
        tensors |= _mlp(config, f"mlp.experts.local_experts.{expert}", moe.moe_ffn_hidden_size, expert=True)
    if moe.moe_shared_expert_intermediate_size is not None:
        tensors |= _mlp(config, "mlp.shared_experts", moe.moe_shared_expert_intermediate_size)
    return tensors
