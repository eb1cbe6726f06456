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


def family_of(config: ModelConfig, model_type: str | None = None) -> Family:
    """The family to write ``config``'s model as: ``model_type`` where it fits, else the first that does.

    Raises:
        ValueError: No supported family has such models.
    """
    candidates = [FAMILIES[model_type]] if model_type in FAMILIES else []
    for family in [*candidates, *FAMILIES.values()]:
        if family.fits(config):
            return family
    raise ValueError(
        f"no supported Hugging Face family ({', '.join(FAMILIES)}) has models with normalization="
        f"{config.normalization}, norm_epsilon={config.norm_epsilon}, swiglu={config.swiglu}, add_bias_linear="
        f"{config.add_bias_linear}, add_qkv_bias={config.add_qkv_bias}, qk_layernorm={config.qk_layernorm}, "
        f"rotary_percent={config.rotary_percent}, window_size={config.window_size}, geglu={config.geglu}, "
        f"layernorm_zero_centered_gamma={config.layernorm_zero_centered_gamma}, sandwich_norms="
        f"{config.sandwich_norms}, scale_embeddings={config.scale_embeddings}, softmax_scale={config.softmax_scale}, softmax_type={config.softmax_type}, "
        f"quick_geglu={config.quick_geglu}, glu_linear_offset={config.glu_linear_offset}, "
        f"activation_func_clamp_value={config.activation_func_clamp_value}, "
        f"{config.mla or 'no MLA'}, {config.moe or 'no experts'}; keep the "
        "checkpoint in torch_dist or legacy format"
    )
