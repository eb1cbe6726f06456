"""Mixtral: every layer has experts; the softmax is over the chosen ones."""

from typing import Any

from megatron_dcp.checkpoint.families.base import ATTENTION, NORMS, Family, check_renormalised, mlp_rows
from megatron_dcp.checkpoint.families.transforms import Same
from megatron_dcp.checkpoint.families.windows import EveryLayer
from megatron_dcp.model_config import ModelConfig, MoEConfig


class _Mixtral(Family):
    def shape(self, values: dict[str, Any]) -> dict[str, Any]:
        check_renormalised(values["num_experts_per_tok"])
        moe = MoEConfig(
            num_experts=values["num_local_experts"],
            moe_layer_freq=(1,) * values["num_hidden_layers"],
            moe_ffn_hidden_size=values["intermediate_size"],
            moe_router_topk=values["num_experts_per_tok"],
        )
        return super().shape(values) | {"moe": moe}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        assert config.moe is not None
        return super().keys(config) | {
            "intermediate_size": config.moe.moe_ffn_hidden_size,
            "num_local_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.moe_router_topk,
        }


MIXTRAL = _Mixtral(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    layer={
        **NORMS,
        **ATTENTION,
        "mlp.router.weight": (("block_sparse_moe.gate.weight",), Same()),
        **mlp_rows("mlp.experts.local_experts.*", "block_sparse_moe.experts.*", ("w1", "w3", "w2")),
    },
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 1e6,
    },
    required=("num_local_experts", "num_experts_per_tok"),
    off={"attention_bias": (None, False)},
    windows=EveryLayer(),
)  # fmt: skip
