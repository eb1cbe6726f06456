"""Qwen3-MoE: Qwen3's attention; layers with experts and dense ones in any order."""

from typing import Any

from megatron_dcp.checkpoint.families.base import (
    ATTENTION,
    DENSE,
    EXPERTS,
    NORMS,
    QK_NORM,
    Family,
    check_renormalised,
)
from megatron_dcp.model_config import ModelConfig, MoEConfig


class _Qwen3Moe(Family):
    def shape(self, values: dict[str, Any]) -> dict[str, Any]:
        dense, step = values["mlp_only_layers"], values["decoder_sparse_step"]
        renormalised = values["norm_topk_prob"]
        if renormalised:
            check_renormalised(values["num_experts_per_tok"])
        experts = values.get("num_experts", values.get("num_local_experts"))  # the hub's name, transformers 5's
        if experts is None:
            raise ValueError("num_experts is missing")
        moe = MoEConfig(
            num_experts=experts,
            moe_layer_freq=tuple(
                int(i not in dense and (i + 1) % step == 0) for i in range(values["num_hidden_layers"])
            ),
            moe_ffn_hidden_size=values["moe_intermediate_size"],
            moe_router_topk=values["num_experts_per_tok"],
            # Probabilities of all experts, made to add up to 1 over the chosen: the softmax over the chosen.
            moe_router_pre_softmax=not renormalised,
        )
        return super().shape(values) | {"moe": moe}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        moe = config.moe
        assert moe is not None
        return super().keys(config) | {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.moe_router_topk,
            "moe_intermediate_size": moe.moe_ffn_hidden_size,
            "norm_topk_prob": not moe.moe_router_pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, experts in enumerate(moe.moe_layer_freq) if not experts],
        }


QWEN3_MOE = _Qwen3Moe(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    layer={**NORMS, **ATTENTION, **QK_NORM, **DENSE, **EXPERTS},
    defaults={
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 4, "decoder_sparse_step": 1,
        "mlp_only_layers": (), "norm_topk_prob": False,
    },
    required=("moe_intermediate_size", "num_experts_per_tok"),
    off={"use_sliding_window": (None, False), "attention_bias": (None, False)},
)  # fmt: skip
