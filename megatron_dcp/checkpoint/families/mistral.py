"""Mistral: Llama with a sliding window in every layer, which later models do without."""

from megatron_dcp.checkpoint.families.base import ATTENTION, DENSE, NORMS, Family
from megatron_dcp.checkpoint.families.windows import EveryLayer

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    layer={**NORMS, **ATTENTION, **DENSE},
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096,
    },
    nullable=("sliding_window",),
    windows=EveryLayer(),
)  # fmt: skip
