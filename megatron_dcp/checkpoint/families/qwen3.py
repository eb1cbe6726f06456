"""Qwen3: q and k of every head are normalised."""

from megatron_dcp.checkpoint.families.base import ATTENTION, DENSE, NORMS, QK_NORM, Family
from megatron_dcp.checkpoint.families.windows import LayerTypes

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    layer={**NORMS, **ATTENTION, **QK_NORM, **DENSE},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    off={"attention_bias": (None, False)},
    windows=LayerTypes(switch="use_sliding_window"),
)
