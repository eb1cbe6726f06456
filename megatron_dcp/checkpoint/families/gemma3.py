"""Gemma 3, of larger models the text part.

Windows in five of six layers with a RoPE of their own, norms on either side of attention and MLP.
"""

from typing import Any

from megatron_dcp.checkpoint.families.base import ATTENTION, DENSE, QK_NORM, Family
from megatron_dcp.checkpoint.families.transforms import Same
from megatron_dcp.checkpoint.families.windows import KINDS, LayerTypes
from megatron_dcp.model_config import ModelConfig


class _EverySixth(LayerTypes):
    def default_types(self, values: dict[str, Any]) -> list[str]:
        pattern = values.get("sliding_window_pattern") or values.get("_sliding_window_pattern") or 6
        return [KINDS[(layer + 1) % pattern != 0] for layer in range(values["num_hidden_layers"])]


class _Gemma3(Family):
    def shape(self, values: dict[str, Any]) -> dict[str, Any]:
        slides = self.windows.shape(values)["window_size"] is not None
        return super().shape(values) | {
            "swiglu": False,
            "geglu": True,
            "layernorm_zero_centered_gamma": True,
            "sandwich_norms": True,
            "scale_embeddings": True,
            "softmax_scale": values["query_pre_attn_scalar"] ** -0.5,
            "window_rotary_base": float(values["rope_local_base_freq"]) if slides else None,
        }

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        scale = config.softmax_scale or config.kv_channels**-0.5
        return super().keys(config) | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round(scale**-2),
            "rope_local_base_freq": config.window_rotary_base or 10000.0,
        }


GEMMA3 = _Gemma3(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    layer={
        "input_layernorm.weight": (("input_layernorm.weight",), Same()),
        **ATTENTION,
        **QK_NORM,
        "self_attention.linear_proj.post_layernorm.weight": (("post_attention_layernorm.weight",), Same()),
        "pre_mlp_layernorm.weight": (("pre_feedforward_layernorm.weight",), Same()),
        **DENSE,
        "mlp.linear_fc2.post_layernorm.weight": (("post_feedforward_layernorm.weight",), Same()),
    },
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 256,
        "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "vocab_size": 262208, "num_attention_heads": 8,
    },
    off={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (None, False),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (None, False),
    },
    windows=_EverySixth(),
)  # fmt: skip
