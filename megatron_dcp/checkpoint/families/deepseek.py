"""What DeepSeek-V2 and DeepSeek-V3 have in common: latent attention, shared experts, first layers dense."""

from __future__ import annotations

from typing import Any

from megatron_dcp.checkpoint.families.base import DENSE, EXPERTS, NORMS, Family, Table, mlp_rows
from megatron_dcp.checkpoint.families.transforms import Same
from megatron_dcp.model_config import MLAConfig, ModelConfig, MoEConfig

# By Megatron's name: the other side's.
_LATENT_ATTENTION = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
LAYER: Table = {
    **NORMS,
    **{f"self_attention.{m}.weight": ((f"self_attn.{hf}.weight",), Same()) for m, hf in _LATENT_ATTENTION.items()},
    **DENSE,
    **EXPERTS,
    **mlp_rows("mlp.shared_experts", "mlp.shared_experts"),
}
REQUIRED = (
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace",
)  # fmt: skip
OFF = {"attention_bias": (None, False), "mlp_bias": (None, False), "moe_layer_freq": (None, 1)}
_EPSILON = 1e-6


class DeepSeek(Family):
    """The two generations differ in how experts are chosen: `routing` and its inverse, `routing_keys`."""

    def routing(self, values: dict[str, Any]) -> dict[str, Any]:
        """Fields of `MoEConfig`."""
        raise NotImplementedError

    def routing_keys(self, moe: MoEConfig) -> dict[str, Any]:
        raise NotImplementedError

    def shape(self, values: dict[str, Any]) -> dict[str, Any]:
        heads, layers, ffn = values["num_attention_heads"], values["num_hidden_layers"], values["moe_intermediate_size"]
        if values["rms_norm_eps"] != _EPSILON:
            raise ValueError(
                f"rms_norm_eps={values['rms_norm_eps']} is not supported: the norms of the latents have {_EPSILON} "
                "whatever it says, and Megatron has one epsilon for all norms"
            )
        if values.get("num_key_value_heads", heads) != heads:
            raise ValueError(
                f"num_key_value_heads={values['num_key_value_heads']} is not num_attention_heads={heads}: every head "
                "has keys and values of its own, projected from the latent"
            )
        dense = min(values["first_k_dense_replace"], layers)
        scaling = float(values.get("routed_scaling_factor", 1.0))
        moe = MoEConfig(
            num_experts=values["n_routed_experts"],
            moe_layer_freq=(0,) * dense + (1,) * (layers - dense),
            moe_ffn_hidden_size=ffn,
            moe_router_topk=values["num_experts_per_tok"],
            moe_router_topk_scaling_factor=None if scaling == 1.0 else scaling,
            moe_shared_expert_intermediate_size=values["n_shared_experts"] * ffn,
            **self.routing(values),
        )
        mla = MLAConfig(
            q_lora_rank=values.get("q_lora_rank"),
            kv_lora_rank=values["kv_lora_rank"],
            qk_head_dim=values["qk_nope_head_dim"],
            qk_pos_emb_head_dim=values["qk_rope_head_dim"],
            v_head_dim=values["v_head_dim"],
        )
        return {"num_query_groups": heads, "add_qkv_bias": False, "qk_layernorm": True, "mla": mla, "moe": moe}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        mla, moe = config.mla, config.moe
        assert mla is not None and moe is not None
        freq, ffn = moe.moe_layer_freq, moe.moe_ffn_hidden_size
        return {
            "num_key_value_heads": config.num_attention_heads,
            "q_lora_rank": mla.q_lora_rank,
            "kv_lora_rank": mla.kv_lora_rank,
            "qk_nope_head_dim": mla.qk_head_dim,
            "qk_rope_head_dim": mla.qk_pos_emb_head_dim,
            "v_head_dim": mla.v_head_dim,
            "first_k_dense_replace": freq.index(1) if 1 in freq else len(freq),
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": (moe.moe_shared_expert_intermediate_size or 0) // ffn,
            "num_experts_per_tok": moe.moe_router_topk,
            "moe_intermediate_size": ffn,
            "routed_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
            **self.routing_keys(moe),
        }


def groups(count: int, chosen: int, score_topk: int) -> dict[str, Any]:
    """Fields of `MoEConfig` for ``count`` groups of experts; one group is none."""
    if count == 1:
        return {}
    return {
        "moe_router_num_groups": count,
        "moe_router_group_topk": chosen,
        "moe_router_group_score_topk": score_topk,
    }
