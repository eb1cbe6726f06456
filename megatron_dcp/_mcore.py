"""What differs between the supported lines of Megatron-Core (0.16 and 0.19), and how a model is built on both."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_dcp.model_config import MLAConfig, ModelConfig, MoEConfig
from megatron_dcp.rope import YarnScaling, inverse_frequencies, softmax_scale, window_inverse_frequencies

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU's tanh approximation."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU's sigmoid approximation. Megatron's own is compiled, by a compiler that may not be there."""
    return x * torch.sigmoid(1.702 * x)


@contextmanager
def _quiet_megatron() -> Iterator[None]:
    """Hide what Megatron-Core says at every build: GPTModel is deprecated (0.19), optional packages are absent."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _without_te() -> Iterator[None]:
    """Let Megatron-Core build MLA and run routers without TransformerEngine, whose names 0.16 then lacks."""
    from megatron.core.transformer import multi_latent_attention as mla
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # for good: a router asks for it at every step
    before = {name: getattr(mla, name) for name in ("HAVE_TE", "QKNormConfigResolver") if hasattr(mla, name)}
    mla.HAVE_TE = mla.HAVE_TE and isinstance(mla.TELinear, type)
    if "QKNormConfigResolver" in before:
        mla.QKNormConfigResolver = _NormsOfTheSpec
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(mla, name, value)


class _NormsOfTheSpec:
    """Megatron-Core 0.19's rule, but for a spec that names its norms: it would refuse them without a q_lora_rank."""

    def __init__(self, config: Any, submodules: Any) -> None:
        self._config, self._submodules = config, submodules

    def resolve(self) -> dict[str, Any]:
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

        if self._submodules.kv_layernorm in (None, IdentityOp):  # TransformerEngine holds them inside projections
            return QKNormConfigResolver(self._config, self._submodules).resolve()
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(self._submodules, name) for name in names}


def transformer_config(config: ModelConfig, *, tp: int, dtype: torch.dtype, **overrides: Any) -> TransformerConfig:
    """Megatron's ``TransformerConfig`` of ``config``: no fusion that needs a GPU, weights left uninitialised.

    Args:
        tp: Tensor parallel size.
        dtype: dtype of the parameters.
        overrides: Any field of ``TransformerConfig``.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields: dict[str, Any] = dict(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        normalization=config.normalization,
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=config.gated,
        activation_func=_activation(config),
        glu_linear_offset=config.glu_linear_offset,
        activation_func_clamp_value=config.activation_func_clamp_value,
        softmax_type=config.softmax_type,
        add_bias_linear=config.add_bias_linear,
        add_qkv_bias=config.add_qkv_bias,
        qk_layernorm=config.qk_layernorm,
        layernorm_zero_centered_gamma=config.layernorm_zero_centered_gamma,
        softmax_scale=softmax_scale(config),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        transformer_impl="local",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    if config.window_size is not None:
        fields |= dict(
            window_size=(config.window_size - 1, 0), window_attn_skip_freq=list(config.window_attn_skip_freq or ())
        )
    if config.moe is not None:
        fields |= _moe_fields(config.moe)
    if config.mla is None:
        return TransformerConfig(**{**fields, **overrides})
    return MLATransformerConfig(**{**fields, **_mla_fields(config, config.mla), **overrides})


def _activation(config: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    if config.swiglu:
        return F.silu
    return quick_gelu if config.quick_geglu else gelu_tanh if config.geglu else F.gelu


def _mla_fields(config: ModelConfig, mla: MLAConfig) -> dict[str, Any]:
    fields: dict[str, Any] = dict(vars(mla), qk_layernorm=True, rotary_base=config.rotary_base, rope_type="rope")
    if config.rope_scaling is not None:
        yarn = YarnScaling.of(config.rope_scaling)
        fields |= dict(
            rope_type="yarn",
            rotary_scaling_factor=yarn.factor,
            original_max_position_embeddings=yarn.original_max_position_embeddings,
            beta_fast=yarn.beta_fast,
            beta_slow=yarn.beta_slow,
            mscale=yarn.mscale,
            mscale_all_dim=yarn.mscale_all_dim,
        )
    return fields


def _moe_fields(moe: MoEConfig) -> dict[str, Any]:
    """Without what helps training only (auxiliary losses, dropped tokens)."""
    fields = {name: value for name, value in vars(moe).items() if name not in _MOE_ELSEWHERE}
    return fields | dict(
        num_moe_experts=moe.num_experts,
        moe_layer_freq=list(moe.moe_layer_freq),
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="allgather",
        moe_router_dtype="fp32",
    )


# Under another name in TransformerConfig, or not in it.
_MOE_ELSEWHERE = ("num_experts", "moe_layer_freq", "moe_router_group_score_topk")


def local_layer_spec(config: ModelConfig, layers: range | None = None) -> ModuleSpec | TransformerBlockSubmodules:
    """Layers of Megatron's own modules, without TransformerEngine.

    Attention is Megatron's ``DotProductAttention``, which needs a GPU in training. With MLA, for which Megatron has
    none without TransformerEngine, and with sliding windows or sinks it is
    :class:`~megatron_dcp.core_attention.SDPACoreAttention`.

    Args:
        layers: Numbers (from 0) of the layers that a pipeline stage has; default: all.

    Returns:
        One layer's spec where all layers are alike, else a block's.
    """
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    if config.moe is None and not config.layernorm_zero_centered_gamma:
        return _one_layer_spec(config, None)
    kinds: dict[bool, Any] = {False: _one_layer_spec(config, None), True: _one_layer_spec(config, config.moe)}
    return TransformerBlockSubmodules(
        layer_specs=[kinds[config.is_moe_layer(layer)] for layer in layers or range(config.num_layers)],
        layer_norm=kinds[False].submodules.input_layernorm,
    )


def _one_layer_spec(config: ModelConfig, moe: MoEConfig | None) -> ModuleSpec:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_dcp.core_attention import SDPACoreAttention

    with _quiet_megatron():
        spec = get_gpt_layer_local_spec(
            num_experts=moe and moe.num_experts,
            qk_layernorm=config.qk_layernorm or config.mla is not None,
            multi_latent_attention=config.mla is not None,
            normalization=config.normalization,
        )
    if config.mla is not None or config.window_size is not None or config.softmax_type != "vanilla":
        spec.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    if moe is not None and moe.group_score_topk != moe.megatron_group_score_topk:
        from megatron_dcp.router import GroupedTopKRouter

        experts = spec.submodules.mlp  # a ModuleSpec in Megatron-Core 0.16, a partial in 0.19
        submodules = experts.keywords["submodules"] if isinstance(experts, partial) else experts.submodules
        submodules.router = partial(GroupedTopKRouter, group_score_topk=moe.group_score_topk)
    if config.layernorm_zero_centered_gamma:
        _use_zero_centered_norms(spec, config)
    if config.sandwich_norms:
        _use_norms_behind(spec)
    return spec


def _use_zero_centered_norms(spec: ModuleSpec, config: ModelConfig) -> None:
    from megatron_dcp.gemma import ZeroCenteredRMSNorm

    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = ZeroCenteredRMSNorm
    if config.qk_layernorm:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = ZeroCenteredRMSNorm


def _use_norms_behind(spec: ModuleSpec) -> None:
    from megatron_dcp.gemma import PostNormRowParallelLinear

    mlp = spec.submodules.mlp  # a ModuleSpec in Megatron-Core 0.16, a partial in 0.19
    (mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules).linear_fc2 = PostNormRowParallelLinear
    spec.submodules.self_attention.submodules.linear_proj = PostNormRowParallelLinear


def build_model(
    config: ModelConfig,
    pg_collection: ProcessGroupCollection,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layer_spec: ModuleSpec | TransformerBlockSubmodules | None = None,
    **overrides: Any,
) -> GPTModel:
    """A ``GPTModel`` of this rank's shard of its pipeline stage, in eval mode, with uninitialised weights.

    The layers are split evenly over the stages; the first has the embedding, the last the final norm and the output
    layer. With tied embeddings the last stage has a copy of the embedding that nothing keeps in step with the first's.

    Args:
        config: Shape of the model.
        pg_collection: Process groups; ``.tp`` decides the shard, ``.pp`` the stage.
        layer_spec: Layer to build, or block of this stage's layers; default :func:`local_layer_spec`.
        overrides: Fields of ``TransformerConfig``, e.g. ``perform_initialization=True`` to train from scratch.

    Raises:
        ValueError: A parallel size does not fit the shape, or the RoPE scaling is not known.
    """
    from megatron.core.models.gpt import GPTModel

    from megatron_dcp._cpu import megatron_on_cpu
    from megatron_dcp.gemma import ScaledEmbedding, give_windows_their_rotary

    tp, stage, stages = pg_collection.tp.size(), pg_collection.pp.rank(), pg_collection.pp.size()
    check_sizes(config, pg_collection)
    overrides = dict(pipeline_model_parallel_size=stages, pipeline_dtype=dtype) | overrides
    if config.moe is not None:
        ep, expert_tp = pg_collection.ep.size(), pg_collection.expt_tp.size()
        overrides = dict(expert_model_parallel_size=ep, expert_tensor_parallel_size=expert_tp) | overrides
    inv_freq = inverse_frequencies(config)
    each = config.num_layers // stages
    spec = layer_spec or local_layer_spec(config, range(stage * each, (stage + 1) * each))
    if config.mla is not None and config.mla.q_lora_rank is None:
        spec = _with_q_proj_on(spec, pg_collection.tp)
    if stages > 1:
        pg_collection = copy.copy(pg_collection)
        pg_collection.embd = None  # Megatron would make copies of the embedding equal over it, on a GPU
    with megatron_on_cpu(), _quiet_megatron(), _without_te():
        model = GPTModel(
            config=transformer_config(config, tp=tp, dtype=dtype, **overrides),
            transformer_layer_spec=spec,
            vocab_size=config.padded_vocab_size,
            max_sequence_length=config.max_position_embeddings,
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            pg_collection=pg_collection,
        )
    if config.mla is None:
        # Megatron hard-codes the constants of llama3 scaling; one table serves training forward and decode.
        model.rotary_pos_emb.inv_freq = inv_freq.to(device)
    if config.window_rotary_base is not None:
        slides = [bool(each) for each in config.window_attn_skip_freq or ()]
        give_windows_their_rotary(model, window_inverse_frequencies(config).to(device), slides)
    if config.scale_embeddings and stage == 0:
        model.embedding.__class__ = ScaledEmbedding
    model = model.to(device=device, dtype=dtype).eval()
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:
            module.expert_bias = module.expert_bias.float()  # decides between close scores; Megatron keeps it in fp32
        if config.whole_experts and getattr(module, "is_expert", False):
            # No sum over the one rank that has it: Megatron adds the bias to it in place, which autograd forbids.
            module.explicit_expert_comm = True
    return model


def check_sizes(config: ModelConfig, pg_collection: ProcessGroupCollection) -> None:
    """Raise ``ValueError`` naming the legal sizes unless a model of this shape can be cut for these groups."""
    stages = pg_collection.pp.size()
    config.check_tensor_parallel(pg_collection.tp.size())
    config.check_pipeline_parallel(stages)
    if config.moe is not None:
        replica = getattr(pg_collection, "dcp_replica", None)
        ranks = (dist.get_world_size() if replica is None else replica.size()) // stages
        config.check_expert_parallel(pg_collection.ep.size(), pg_collection.expt_tp.size(), ranks=ranks)


def _with_q_proj_on(spec: Any, tp_group: Any) -> Any:
    """A copy of the spec whose ``linear_q_proj`` is split over ``tp_group``: Megatron hands it no group."""
    from megatron.core.transformer import ModuleSpec

    spec = copy.deepcopy(spec)
    for layer in getattr(spec, "layer_specs", None) or [spec]:
        submodules = layer.submodules.self_attention.submodules
        if isinstance(submodules.linear_q_proj, type):  # layers of one kind share their spec
            submodules.linear_q_proj = ModuleSpec(submodules.linear_q_proj, params={"tp_group": tp_group})
    return spec
