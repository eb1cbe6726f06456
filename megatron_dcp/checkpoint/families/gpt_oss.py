"""GPT-OSS: sinks, windows in every other layer, biases everywhere, and the experts of a layer in one tensor."""

from typing import Any

from megatron_dcp.checkpoint.families.base import ATTENTION, NORMS, QKV_BIAS, Family, check_renormalised
from megatron_dcp.checkpoint.families.transforms import AlternatingGateUp, Same, Transposed
from megatron_dcp.checkpoint.families.windows import KINDS, LayerTypes
from megatron_dcp.model_config import ModelConfig, MoEConfig

_EXPERT = "mlp.experts.local_experts.*"


class _EveryOther(LayerTypes):
    def default_types(self, values: dict[str, Any]) -> list[str]:
        return [KINDS[layer % 2 == 0] for layer in range(values["num_hidden_layers"])]


class _GptOss(Family):
    def shape(self, values: dict[str, Any]) -> dict[str, Any]:
        if "rope_scaling" not in values and "rope_parameters" not in values:
            raise ValueError("rope_scaling is missing, for which transformers would take a yarn of its own")
        if values["swiglu_limit"] is None:
            raise ValueError("swiglu_limit is null, for which transformers would take another")
        check_renormalised(values["num_experts_per_tok"])
        moe = MoEConfig(
            num_experts=values["num_local_experts"],
            moe_layer_freq=(1,) * values["num_hidden_layers"],
            moe_ffn_hidden_size=values["intermediate_size"],
            moe_router_topk=values["num_experts_per_tok"],
        )
        return super().shape(values) | {
            "moe": moe,
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "swiglu": False,
            "quick_geglu": True,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": values["swiglu_limit"],
        }

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        assert config.moe is not None
        return super().keys(config) | {
            "intermediate_size": config.moe.moe_ffn_hidden_size,
            "num_local_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.moe_router_topk,
            "attention_bias": True,
            "hidden_act": "silu",
            "swiglu_limit": config.activation_func_clamp_value,
            "rope_scaling": config.rope_scaling or {"rope_type": "default"},
        }


GPT_OSS = _GptOss(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    layer={
        **NORMS,
        **ATTENTION,
        **QKV_BIAS,
        "self_attention.linear_proj.bias": (("self_attn.o_proj.bias",), Same()),
        "self_attention.core_attention.softmax_offset": (("self_attn.sinks",), Same()),
        "mlp.router.weight": (("mlp.router.weight",), Same()),
        "mlp.router.bias": (("mlp.router.bias",), Same()),
        f"{_EXPERT}.linear_fc1.weight": (("mlp.experts.gate_up_proj",), AlternatingGateUp()),
        f"{_EXPERT}.linear_fc1.bias": (("mlp.experts.gate_up_proj_bias",), AlternatingGateUp()),
        f"{_EXPERT}.linear_fc2.weight": (("mlp.experts.down_proj",), Transposed()),
        f"{_EXPERT}.linear_fc2.bias": (("mlp.experts.down_proj_bias",), Same()),
    },
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64,
        "rope_theta": 150000.0, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    off={"attention_bias": (True,), "swiglu_alpha": (1.702,)},
    windows=_EveryOther(),
)  # fmt: skip
