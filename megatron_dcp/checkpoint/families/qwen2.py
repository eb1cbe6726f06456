"""Qwen2: biases of q, k and v."""

from megatron_dcp.checkpoint.families.base import ATTENTION, DENSE, NORMS, QKV_BIAS, Family
from megatron_dcp.checkpoint.families.windows import LayerTypes

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    layer={**NORMS, **ATTENTION, **QKV_BIAS, **DENSE},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    windows=LayerTypes(switch="use_sliding_window"),
)
