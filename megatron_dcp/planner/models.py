"""Shapes of well-known models, each from the ``config.json`` that its publisher put on the Hugging Face hub."""

from __future__ import annotations

from typing import Any

from megatron_dcp.model_config import MLAConfig, ModelConfig, MoEConfig
from megatron_dcp.model_tensors import padded_vocab_size
from megatron_dcp.planner.closest import look_up


def _model(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, vocab: int, context: int, **more: Any
) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        kv_channels=head_dim,
        vocab_size=vocab,
        padded_vocab_size=padded_vocab_size(vocab),
        max_position_embeddings=context,
        untie_embeddings_and_output_weights=more.pop("untie", True),
        **more,
    )


def _experts(layers: int, experts: int, ffn: int, topk: int, *, dense: int = 0, shared: int | None = None) -> MoEConfig:
    """``dense`` first layers without experts; ``shared``: inner size of the shared expert, as in DeepSeek-V3."""
    sigmoid: dict[str, Any] = {}
    if shared is not None:
        sigmoid = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return MoEConfig(
        num_experts=experts,
        moe_layer_freq=(0,) * dense + (1,) * (layers - dense),
        moe_ffn_hidden_size=ffn,
        moe_router_topk=topk,
        moe_shared_expert_intermediate_size=shared,
        **sigmoid,
    )


# deepseek-ai/DeepSeek-V3 and DeepSeek-R1, and moonshotai/Kimi-K2-Instruct, have the same latents.
_LATENT = MLAConfig(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
_QWEN3 = dict(qk_layernorm=True, moe=_experts(94, 128, 1536, 8))
_GPT_OSS = dict(add_bias_linear=True, softmax_type="learnable", swiglu=False, quick_geglu=True, window_size=128)
_GEMMA = dict(swiglu=False, geglu=True, qk_layernorm=True, sandwich_norms=True, layernorm_zero_centered_gamma=True)
_KIMI = dict(qk_layernorm=True, mla=_LATENT, moe=_experts(61, 384, 2048, 8, dense=1, shared=2048))


def _alternating(layers: int) -> tuple[int, ...]:
    return tuple(1 - layer % 2 for layer in range(layers))


MODELS: dict[str, ModelConfig] = {
    # meta-llama/Llama-3.1-8B, -70B, -405B
    "llama-3-8b": _model(32, 4096, 14336, 32, 8, 128, 128256, 131072),
    "llama-3-70b": _model(80, 8192, 28672, 64, 8, 128, 128256, 131072),
    "llama-3-405b": _model(126, 16384, 53248, 128, 8, 128, 128256, 131072),
    # Qwen/Qwen2.5-7B, -72B
    "qwen2.5-7b": _model(28, 3584, 18944, 28, 4, 128, 152064, 131072, add_qkv_bias=True),
    "qwen2.5-72b": _model(80, 8192, 29568, 64, 8, 128, 152064, 131072, add_qkv_bias=True),
    # Qwen/Qwen3-235B-A22B; its later release, -2507, differs in its longest context only
    "qwen3-235b-a22b": _model(94, 4096, 12288, 64, 4, 128, 151936, 40960, **_QWEN3),
    "qwen3-235b-a22b-2507": _model(94, 4096, 12288, 64, 4, 128, 151936, 262144, **_QWEN3),
    # mistralai/Mixtral-8x7B-v0.1, -8x22B-v0.1
    "mixtral-8x7b": _model(32, 4096, 14336, 32, 8, 128, 32000, 32768, moe=_experts(32, 8, 14336, 2)),
    "mixtral-8x22b": _model(56, 6144, 16384, 48, 8, 128, 32000, 65536, moe=_experts(56, 8, 16384, 2)),
    "deepseek-v3": _model(
        61, 7168, 18432, 128, 128, 128, 129280, 163840, qk_layernorm=True, mla=_LATENT,
        moe=_experts(61, 256, 2048, 8, dense=3, shared=2048),
    ),
    # moonshotai/Kimi-K2-Instruct; -0905 and later (K2.5, K2.6: the text part) have the longer context
    "kimi-k2": _model(61, 7168, 18432, 64, 64, 128, 163840, 131072, **_KIMI),
    "kimi-k2-0905": _model(61, 7168, 18432, 64, 64, 128, 163840, 262144, **_KIMI),
    # openai/gpt-oss-20b, -120b: every other layer sees 128 keys
    "gpt-oss-20b": _model(
        24, 2880, 2880, 64, 8, 64, 201088, 131072, moe=_experts(24, 32, 2880, 4),
        window_attn_skip_freq=_alternating(24), **_GPT_OSS,
    ),
    "gpt-oss-120b": _model(
        36, 2880, 2880, 64, 8, 64, 201088, 131072, moe=_experts(36, 128, 2880, 4),
        window_attn_skip_freq=_alternating(36), **_GPT_OSS,
    ),
    # google/gemma-3-27b-pt, the text part: five of six layers see 1024 keys
    "gemma-3-27b": _model(
        62, 5376, 21504, 32, 16, 128, 262208, 131072, untie=False, window_size=1024,
        window_attn_skip_freq=tuple(int((layer + 1) % 6 != 0) for layer in range(62)), **_GEMMA,
    ),
}  # fmt: skip
_ALIASES = {
    "deepseek-r1": "deepseek-v3",
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.3-70b": "llama-3-70b",
    "llama-3.1-405b": "llama-3-405b",
    "qwen3-235b": "qwen3-235b-a22b",
    "kimi-k2.6": "kimi-k2-0905",
}


def known_model(name: str) -> tuple[str, ModelConfig]:
    """Name and shape of a well-known model, its name in any case and with any separators.

    Raises:
        ValueError: No such model is known; the closest ones are named.
    """
    known = look_up("model", name, MODELS, _ALIASES)
    return known, MODELS[known]
