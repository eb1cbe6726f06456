"""DeepSeek-V2: softmax over all experts; a group is worth its best expert."""

from typing import Any

from megatron_dcp.checkpoint.families.deepseek import LAYER, OFF, REQUIRED, DeepSeek, groups
from megatron_dcp.model_config import MoEConfig

_METHODS = ("greedy", "group_limited_greedy")


class _DeepSeekV2(DeepSeek):
    def routing(self, values: dict[str, Any]) -> dict[str, Any]:
        method = values["topk_method"]
        if method not in _METHODS:
            raise ValueError(f"topk_method={method!r} is not known; supported are {', '.join(_METHODS)}")
        fields: dict[str, Any] = {"moe_router_pre_softmax": True}
        if method == "greedy":
            return fields
        if "n_group" not in values or "topk_group" not in values:
            raise ValueError(f"topk_method={method!r} needs n_group and topk_group")
        return fields | groups(values["n_group"], values["topk_group"], 1)

    def routing_keys(self, moe: MoEConfig) -> dict[str, Any]:
        return {
            "topk_method": _METHODS[moe.moe_router_num_groups is not None],
            "n_group": moe.moe_router_num_groups,
            "topk_group": moe.moe_router_group_topk,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
        }


DEEPSEEK_V2 = _DeepSeekV2(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    layer=LAYER,
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "topk_method": "greedy"},
    required=REQUIRED,
    nullable=("q_lora_rank",),
    # transformers pays no heed to norm_topk_prob, the model's first code did.
    off={**OFF, "norm_topk_prob": (None, False), "scoring_func": (None, "softmax")},
)
