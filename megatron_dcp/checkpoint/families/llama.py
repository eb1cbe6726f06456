"""Llama."""

from megatron_dcp.checkpoint.families.base import ATTENTION, DENSE, NORMS, Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    layer={**NORMS, **ATTENTION, **DENSE},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    off={"attention_bias": (None, False), "mlp_bias": (None, False)},
)
