"""Hugging Face model families: how their tensors and ``config.json`` correspond to Megatron's. One file per family."""

from megatron_dcp.checkpoint.families.base import Family, Row
from megatron_dcp.checkpoint.families.deepseek_v2 import DEEPSEEK_V2
from megatron_dcp.checkpoint.families.deepseek_v3 import DEEPSEEK_V3
from megatron_dcp.checkpoint.families.gemma3 import GEMMA3
from megatron_dcp.checkpoint.families.gpt_oss import GPT_OSS
from megatron_dcp.checkpoint.families.llama import LLAMA
from megatron_dcp.checkpoint.families.mistral import MISTRAL
from megatron_dcp.checkpoint.families.mixtral import MIXTRAL
from megatron_dcp.checkpoint.families.qwen2 import QWEN2
from megatron_dcp.checkpoint.families.qwen3 import QWEN3
from megatron_dcp.checkpoint.families.qwen3_moe import QWEN3_MOE
from megatron_dcp.model_config import ModelConfig

__all__ = ["FAMILIES", "Family", "Row", "family_of"]

# In the order in which they are tried for a model that comes from no family.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (LLAMA, QWEN2, QWEN3, MISTRAL, MIXTRAL, QWEN3_MOE, GEMMA3, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS)
}

# What families differ in, for messages.
_SHAPE = (
    "normalization", "norm_epsilon", "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "rotary_percent",
    "window_size", "geglu", "layernorm_zero_centered_gamma", "sandwich_norms", "scale_embeddings", "softmax_scale",
    "softmax_type", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value",
)  # fmt: skip


def family_of(config: ModelConfig, model_type: str | None = None) -> Family:
    """The family to write ``config``'s model as: ``model_type`` where it fits, else the first that does.

    Raises:
        ValueError: No supported family has such models.
    """
    candidates = [FAMILIES[model_type]] if model_type in FAMILIES else []
    for family in [*candidates, *FAMILIES.values()]:
        if family.fits(config):
            return family
    shape = ", ".join(f"{name}={getattr(config, name)}" for name in _SHAPE)
    raise ValueError(
        f"no supported Hugging Face family ({', '.join(FAMILIES)}) has models with {shape}, {config.mla or 'no MLA'}, "
        f"{config.moe or 'no experts'}; keep the checkpoint in torch_dist or legacy format"
    )
