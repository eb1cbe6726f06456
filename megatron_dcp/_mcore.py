"""What differs between the supported lines of Megatron-Core (0.16 and 0.19), and how a model is built on both."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megatron_dcp.config import ModelConfig

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import ModuleSpec, TransformerConfig


@contextmanager
def _quiet_megatron() -> Iterator[None]:
    """Hide what Megatron-Core says at every build: GPTModel is deprecated (0.19), optional packages are absent."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def transformer_config(config: ModelConfig, *, tp: int, dtype: torch.dtype, **overrides: Any) -> TransformerConfig:
    """Megatron's ``TransformerConfig`` of ``config``: no fusion that needs a GPU, weights left uninitialised.

    Args:
        tp: Tensor parallel size.
        dtype: dtype of the parameters.
        overrides: Any field of ``TransformerConfig``.
    """
    from megatron.core.transformer import TransformerConfig

    fields: dict[str, Any] = dict(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        normalization=config.normalization,
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=config.swiglu,
        activation_func=F.silu if config.swiglu else F.gelu,
        add_bias_linear=config.add_bias_linear,
        add_qkv_bias=config.add_qkv_bias,
        qk_layernorm=config.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return TransformerConfig(**{**fields, **overrides})


def local_layer_spec(config: ModelConfig) -> ModuleSpec:
    """Layer of Megatron's own modules, without TransformerEngine; attention by Megatron's ``DotProductAttention``."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    with _quiet_megatron():
        return get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)


def build_model(
    config: ModelConfig,
    pg_collection: ProcessGroupCollection,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layer_spec: ModuleSpec | None = None,
    **overrides: Any,
) -> GPTModel:
    """A ``GPTModel`` of this rank's shard, in eval mode, with uninitialised weights.

    Args:
        config: Shape of the model.
        pg_collection: Process groups; ``.tp`` decides the shard.
        layer_spec: Layer to build; default :func:`local_layer_spec`.
        overrides: Fields of ``TransformerConfig``, e.g. ``perform_initialization=True`` to train from scratch.

    Raises:
        ValueError: The tensor parallel size does not fit the shape, or the RoPE scaling is not known.
    """
    from megatron.core.models.gpt import GPTModel

    from megatron_dcp._cpu import megatron_on_cpu
    from megatron_dcp.rope import inverse_frequencies

    tp = pg_collection.tp.size()
    config.check_tensor_parallel(tp)
    inv_freq = inverse_frequencies(config)
    with megatron_on_cpu(), _quiet_megatron():
        model = GPTModel(
            config=transformer_config(config, tp=tp, dtype=dtype, **overrides),
            transformer_layer_spec=layer_spec or local_layer_spec(config),
            vocab_size=config.padded_vocab_size,
            max_sequence_length=config.max_position_embeddings,
            parallel_output=True,
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            pg_collection=pg_collection,
        )
    # Megatron hard-codes the constants of llama3 scaling; one table serves training forward and decode.
    model.rotary_pos_emb.inv_freq = inv_freq.to(device)
    return model.to(device=device, dtype=dtype).eval()
