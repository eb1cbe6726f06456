"""Parameters of a model and their bytes on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

from megatron_dcp.config import ParallelConfig, check_choice
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.model_tensors import layer_tensors, padded_vocab_size

WeightDtype = Literal["bfloat16", "float16", "float32", "fp8", "mxfp4", "nvfp4"]


@dataclass(frozen=True)
class _Format:
    """Bytes of one parameter: of experts, of other matrices in layers, of the rest; ``products``: what is computed in.

    fp8 as DeepSeek-V3 is published, with a scale per 128 x 128 block; mxfp4 as GPT-OSS and nvfp4 as NVIDIA's
    checkpoints of DeepSeek and Kimi: experts only, with a one-byte scale per 32 and per 16 parameters.
    """

    experts: float
    matrices: float
    rest: float
    products: str


_FORMATS = {
    "bfloat16": _Format(2, 2, 2, "bfloat16"),
    "float16": _Format(2, 2, 2, "bfloat16"),
    "float32": _Format(4, 4, 4, "float32"),
    "fp8": _Format(1 + 4 / 128**2, 1 + 4 / 128**2, 2, "fp8"),
    "mxfp4": _Format(0.5 + 1 / 32, 2, 2, "bfloat16"),
    "nvfp4": _Format(0.5 + 1 / 16, 2, 2, "fp8"),
}


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Of one layer on one rank.

    Attributes:
        parameters: Without routed experts, those of which are matrices in ``matrices``.
        expert: Parameters that a rank holds of one routed expert; 0 without experts.
        experts: Routed experts on this rank.
        outputs: Numbers that the matrices put out for a token, ``expert_outputs`` those of one routed expert.
    """

    parameters: int
    matrices: int
    expert: int
    experts: int
    outputs: int
    expert_outputs: int


def count_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, vocabulary not padded."""
    whole = ParallelConfig()
    kinds = [model.is_moe_layer(layer) for layer in range(model.num_layers)]
    inside = 0
    for experts in set(kinds):
        layer = layer_weights(model, whole, experts=experts)
        inside += kinds.count(experts) * (layer.parameters + layer.expert * layer.experts)
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    return inside + tables * model.vocab_size * model.hidden_size + model.hidden_size


def check_weight_dtype(model: ModelConfig, dtype: str) -> None:
    """Raise ``ValueError`` unless a model may be stored so."""
    check_choice("weight_dtype", dtype, get_args(WeightDtype))
    if dtype in ("mxfp4", "nvfp4") and model.moe is None:
        raise ValueError(f"weight_dtype={dtype!r} is for experts, and the model has none; use fp8 or bfloat16")


def itemsize(dtype: str) -> int:
    """Bytes of a number of the hidden states."""
    return 4 if dtype == "float32" else 2


def products_in(dtype: str) -> str:
    """What products with weights of this dtype are computed in, as a key of `Machine.flops`."""
    return _FORMATS[dtype].products


def layer_weights(model: ModelConfig, parallel: ParallelConfig, *, experts: bool) -> LayerWeights:
    """Of one layer on one rank: one with experts, or with a dense MLP."""
    tp, expert_tp, ep = parallel.tensor_model_parallel_size, parallel.expert_tp, parallel.expert_model_parallel_size
    parameters = matrices = expert = outputs = expert_outputs = 0
    for spec in layer_tensors(model, experts=experts, numbers=range(1)).values():
        size, split = prod(spec.shape), expert_tp if spec.expert else tp
        put_out = 0 if len(spec.shape) == 1 else spec.shape[0] // (split if spec.tp_dim == 0 else 1)
        if spec.expert:
            expert += size if spec.tp_dim is None else size // expert_tp
            expert_outputs += put_out
            continue
        outputs += put_out
        size = size if spec.tp_dim is None else size // tp
        parameters += size
        matrices += size if len(spec.shape) > 1 else 0
    count = model.moe.num_experts // ep if experts and model.moe is not None else 0
    return LayerWeights(
        parameters=parameters, matrices=matrices, expert=expert, experts=count, outputs=outputs,
        expert_outputs=expert_outputs,
    )  # fmt: skip


def table_parameters(model: ModelConfig, tp: int) -> int:
    """Of the embedding, or of the output layer, on one rank; the vocabulary is padded."""
    return padded_vocab_size(model.vocab_size, tp) // tp * model.hidden_size


def layer_bytes(layer: LayerWeights, dtype: str, *, read_experts: float | None = None) -> float:
    """Bytes of a layer; ``read_experts``: only so many of its experts."""
    form = _FORMATS[dtype]
    count = layer.experts if read_experts is None else read_experts
    small = layer.parameters - layer.matrices
    return layer.matrices * form.matrices + small * form.rest + layer.expert * count * form.experts


def table_bytes(model: ModelConfig, tp: int, dtype: str) -> float:
    """Bytes of the embedding, or of the output layer, on one rank."""
    return table_parameters(model, tp) * _FORMATS[dtype].rest


def weight_bytes(model: ModelConfig, parallel: ParallelConfig, dtype: str) -> float:
    """Bytes of the weights on a rank of the fullest pipeline stage.

    The first stage has the embedding, the last the output layer; with tied embeddings on several stages, a copy.
    """
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    kinds = {
        experts: layer_bytes(layer_weights(model, parallel, experts=experts), dtype)
        for experts in {model.is_moe_layer(layer) for layer in range(model.num_layers)}
    }
    per_stage = model.num_layers // pp
    table, stages = table_bytes(model, tp, dtype), []
    for stage in range(pp):
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        tables = int(stage == 0) + int(stage == pp - 1 and (pp > 1 or model.untie_embeddings_and_output_weights))
        stages.append(sum(kinds[model.is_moe_layer(layer)] for layer in layers) + tables * table)
    return max(stages)
