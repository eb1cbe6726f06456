"""DeepSeek-V3: sigmoid scores with a correction bias; a group is worth its two best experts.

Its layers for predicting several tokens (``num_nextn_predict_layers``) take no part in decoding; they are skipped.
"""

from typing import Any

from megatron_dcp.checkpoint.families.base import check_renormalised
from megatron_dcp.checkpoint.families.deepseek import LAYER, OFF, REQUIRED, DeepSeek, groups
from megatron_dcp.checkpoint.families.transforms import Same
from megatron_dcp.model_config import MoEConfig


class _DeepSeekV3(DeepSeek):
    def routing(self, values: dict[str, Any]) -> dict[str, Any]:
        check_renormalised(values["num_experts_per_tok"])
        return {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            **groups(values["n_group"], values["topk_group"], 2),
        }

    def routing_keys(self, moe: MoEConfig) -> dict[str, Any]:
        return {
            "topk_method": "noaux_tc",
            "n_group": moe.moe_router_num_groups or 1,
            "topk_group": moe.moe_router_group_topk or 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
        }


DEEPSEEK_V3 = _DeepSeekV3(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    layer={**LAYER, "mlp.router.expert_bias": (("mlp.gate.e_score_correction_bias",), Same())},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "routed_scaling_factor": 2.5},
    required=(*REQUIRED, "n_group", "topk_group"),
    nullable=("q_lora_rank",),
    off={
        **OFF,
        "norm_topk_prob": (None, True),
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
        "rope_interleave": (None, True),
    },
)
