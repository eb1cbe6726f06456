"""The shape of a decoder: what travels with a checkpoint. Frozen objects, validated once; no torch, no Megatron."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron_dcp.config import check_at_least, check_choice, divisors, divisors_of

ScoreFunction = Literal["softmax", "sigmoid"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024), in Megatron-LM's argument names.

    Attributes:
        q_lora_rank: Size of the queries' latent; ``None``: queries are projected from the hidden state.
        kv_lora_rank: Size of the latent that keys and values are projected from, and that the cache holds.
        qk_head_dim: Head dim of the part of queries and keys without position.
        qk_pos_emb_head_dim: Head dim of the rotated part; its key is one for all heads.
        v_head_dim: Head dim of the values.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
            check_at_least(name, getattr(self, name), 1)
        if self.q_lora_rank is not None:
            check_at_least("q_lora_rank", self.q_lora_rank, 1)
        if self.qk_pos_emb_head_dim % 2:
            raise ValueError(f"qk_pos_emb_head_dim={self.qk_pos_emb_head_dim} is odd; RoPE rotates pairs")

    @property
    def latent_dim(self) -> int:
        """Values that the cache holds per token and layer: the latent and the rotated key."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts, in Megatron-LM's argument names.

    Attributes:
        moe_layer_freq: For every layer, 1: experts, 0: a dense MLP of ``ffn_hidden_size``.
        moe_ffn_hidden_size: Inner size of one expert.
        moe_router_topk: Experts of a token.
        moe_router_score_function: ``softmax`` or ``sigmoid`` of the router's logits.
        moe_router_pre_softmax: Softmax over all experts, and the chosen ones keep their share; else over the chosen.
        moe_router_topk_scaling_factor: What the weights of the chosen experts are multiplied with.
        moe_router_enable_expert_bias: A bias per expert takes part in the choice, not in the weights (``sigmoid``).
        moe_router_num_groups: Equal groups of consecutive experts; a token's experts come from
            ``moe_router_group_topk`` of them. ``None``: no groups.
        moe_router_group_score_topk: A group's score is the sum of so many of its best experts. Megatron knows only
            ``moe_router_topk // moe_router_group_topk``, which is the default; DeepSeek-V2 takes 1, V3 takes 2.
        moe_shared_expert_intermediate_size: Inner size of the expert that sees every token; ``None``: there is none.
    """

    num_experts: int
    moe_layer_freq: tuple[int, ...]
    moe_ffn_hidden_size: int
    moe_router_topk: int
    moe_router_score_function: ScoreFunction = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_group_score_topk: int | None = None
    moe_shared_expert_intermediate_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "moe_ffn_hidden_size", "moe_router_topk"):
            check_at_least(name, getattr(self, name), 1)
        if self.moe_shared_expert_intermediate_size is not None:
            check_at_least("moe_shared_expert_intermediate_size", self.moe_shared_expert_intermediate_size, 1)
        check_choice("moe_router_score_function", self.moe_router_score_function, get_args(ScoreFunction))
        if set(self.moe_layer_freq) - {0, 1}:
            raise ValueError(f"moe_layer_freq={self.moe_layer_freq} must hold a 0 or a 1 for every layer")
        if self.moe_router_topk > self.num_experts:
            raise ValueError(f"moe_router_topk={self.moe_router_topk} is above num_experts={self.num_experts}")
        if self.moe_router_enable_expert_bias and self.moe_router_score_function != "sigmoid":
            raise ValueError("moe_router_enable_expert_bias needs moe_router_score_function='sigmoid'")
        self._check_groups()

    def _check_groups(self) -> None:
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if (groups is None) != (chosen is None):
            raise ValueError("moe_router_num_groups and moe_router_group_topk belong together; give both or neither")
        if groups is None or chosen is None:
            if self.moe_router_group_score_topk is not None:
                raise ValueError("moe_router_group_score_topk needs moe_router_num_groups and moe_router_group_topk")
            return
        check_at_least("moe_router_group_topk", chosen, 1)
        if self.num_experts % groups:
            raise ValueError(
                f"moe_router_num_groups={groups} does not divide num_experts={self.num_experts}; "
                f"use one of {divisors(self.num_experts)}"
            )
        if chosen > groups or chosen * (self.num_experts // groups) < self.moe_router_topk:
            raise ValueError(
                f"moe_router_group_topk={chosen} of moe_router_num_groups={groups} with {self.num_experts // groups} "
                f"experts each cannot give moe_router_topk={self.moe_router_topk} experts"
            )
        if not 1 <= self.group_score_topk <= self.num_experts // groups:
            raise ValueError(
                f"moe_router_group_score_topk={self.group_score_topk} must lie between 1 and the "
                f"{self.num_experts // groups} experts of a group"
            )

    @property
    def group_score_topk(self) -> int:
        """``moe_router_group_score_topk`` with Megatron's rule filled in; 0 without groups."""
        return self.moe_router_group_score_topk or self.megatron_group_score_topk

    @property
    def megatron_group_score_topk(self) -> int:
        """How many experts Megatron's own router sums up for a group's score."""
        return 0 if self.moe_router_group_topk is None else self.moe_router_topk // self.moe_router_group_topk


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder, in Megatron-LM's argument names: what travels with a checkpoint.

    Attributes:
        vocab_size: Tokens that exist. ``padded_vocab_size`` adds the rows that only pad the embedding.
        num_query_groups: KV heads; with ``mla`` as many as query heads, though the cache holds one latent.
        kv_channels: Head dim; with ``mla`` it is not used.
        ffn_hidden_size: Inner size of dense MLPs.
        rope_scaling: ``None`` or the parameters of a scaled RoPE as Hugging Face names them,
            e.g. ``{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, ...}``.
        eos_token_ids: Tokens that end a text.
        window_size: Keys that a query sees, its own among them, in layers with a sliding window; ``None``: there are
            no such layers. (Megatron-LM's argument counts the keys before it.)
        window_attn_skip_freq: For every layer, 1: a sliding window, 0: all keys. Belongs to ``window_size``.
        window_rotary_base: RoPE base of layers with a sliding window, which then have no scaling; ``None``: as others.
        softmax_scale: What scores are multiplied with; ``None``: ``kv_channels ** -0.5``.
        softmax_type: What attention's softmax is over. ``vanilla``: the keys; ``learnable``: one more per head that has
            no value, a sink, whose score is a parameter; ``off-by-one``: a sink with the score 0.
        geglu: MLPs are gated by the tanh approximation of GELU; excludes ``swiglu``.
        quick_geglu: MLPs are gated by ``x * sigmoid(1.702 x)``; excludes ``swiglu`` and ``geglu``.
        glu_linear_offset: Added to what the gate multiplies.
        activation_func_clamp_value: The gate's input is cut above it, what the gate multiplies on either side.
        layernorm_zero_centered_gamma: Norms multiply with ``1 + weight``.
        sandwich_norms: A norm behind attention and MLP, too, in front of the residual sum.
        scale_embeddings: Embeddings are multiplied with ``hidden_size ** 0.5``, rounded to their dtype.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_epsilon: float = 1e-5
    swiglu: bool = True
    add_qkv_bias: bool = False
    add_bias_linear: bool = False
    qk_layernorm: bool = False
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rope_scaling: dict[str, Any] | None = None
    untie_embeddings_and_output_weights: bool = False
    eos_token_ids: tuple[int, ...] = ()
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    window_size: int | None = None
    window_attn_skip_freq: tuple[int, ...] | None = None
    window_rotary_base: float | None = None
    softmax_scale: float | None = None
    softmax_type: SoftmaxType = "vanilla"
    geglu: bool = False
    quick_geglu: bool = False
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None
    layernorm_zero_centered_gamma: bool = False
    sandwich_norms: bool = False
    scale_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
            "kv_channels", "vocab_size", "padded_vocab_size", "max_position_embeddings",
        ):  # fmt: skip
            check_at_least(name, getattr(self, name), 1)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_query_groups={self.num_query_groups} does not divide "
                f"num_attention_heads={self.num_attention_heads}; each KV head serves the same number of query heads"
            )
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size={self.padded_vocab_size} is below vocab_size={self.vocab_size}")
        if self.moe is not None and len(self.moe.moe_layer_freq) != self.num_layers:
            raise ValueError(
                f"moe_layer_freq has {len(self.moe.moe_layer_freq)} entries for num_layers={self.num_layers}; "
                "it needs one per layer"
            )
        self._check_windows()
        self._check_mlp()
        check_choice("softmax_type", self.softmax_type, get_args(SoftmaxType))
        if self.softmax_type != "vanilla" and self.mla is not None:
            raise ValueError(f"softmax_type={self.softmax_type!r} is not supported together with latent attention")
        if self.layernorm_zero_centered_gamma and (self.normalization != "RMSNorm" or self.mla is not None):
            raise ValueError(
                "layernorm_zero_centered_gamma=True is supported with normalization='RMSNorm' and no latent attention"
            )

    def _check_mlp(self) -> None:
        gates = [name for name in ("swiglu", "geglu", "quick_geglu") if getattr(self, name)]
        if len(gates) > 1:
            raise ValueError(f"{'=True and '.join(gates)}=True exclude each other; set one of them to False")
        if not gates and (self.glu_linear_offset or self.activation_func_clamp_value is not None):
            raise ValueError(
                f"glu_linear_offset={self.glu_linear_offset} and activation_func_clamp_value="
                f"{self.activation_func_clamp_value} need an MLP with a gate: swiglu, geglu or quick_geglu"
            )
        if self.add_bias_linear and self.moe is not None and self.moe.moe_shared_expert_intermediate_size is not None:
            raise ValueError("add_bias_linear=True is not supported with a shared expert, to which Megatron gives none")

    def _check_windows(self) -> None:
        size, freq = self.window_size, self.window_attn_skip_freq
        if (size is None) != (freq is None):
            raise ValueError("window_size and window_attn_skip_freq belong together; give both or neither")
        if size is None or freq is None:
            if self.window_rotary_base is not None:
                raise ValueError("window_rotary_base needs window_size and window_attn_skip_freq")
            return
        check_at_least("window_size", size, 1)
        if len(freq) != self.num_layers or set(freq) - {0, 1} or 1 not in freq:
            raise ValueError(
                f"window_attn_skip_freq={freq} must hold a 0 or a 1 for each of num_layers={self.num_layers} layers, "
                "and a 1 somewhere"
            )
        if self.mla is not None:
            raise ValueError("window_size is not supported together with latent attention")

    @property
    def gated(self) -> bool:
        """Whether MLPs have a gate."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def whole_experts(self) -> bool:
        """Whether Megatron does not split an expert over ranks: it has biases, which the ranks' sum would repeat."""
        return self.moe is not None and self.add_bias_linear

    @property
    def cached_kv_heads(self) -> int:
        """KV heads of the cache, before tensor parallelism: MLA's latent counts as one."""
        return self.num_query_groups if self.mla is None else 1

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer with this number (from 0) has experts."""
        return self.moe is not None and self.moe.moe_layer_freq[layer] == 1

    def check_tensor_parallel(self, tp: int) -> None:
        """Raise ``ValueError`` naming the legal sizes unless ``tp`` ranks can share this model's tensors."""
        sizes = self._cut_by_tp()

        def misfits(size: int) -> list[str]:
            groups = self.num_query_groups
            wrong = [f"{name}={value}" for name, value in sizes.items() if value % size]
            if self.mla is None and groups % size and size % groups:
                wrong.append(f"num_query_groups={groups}")
            return wrong

        if wrong := misfits(tp):
            legal = ", ".join(str(size) for size in divisors_of(self.num_attention_heads) if not misfits(size))
            raise ValueError(f"tensor_model_parallel_size={tp} does not fit {', '.join(wrong)}; use one of {legal}")

    def check_pipeline_parallel(self, pp: int) -> None:
        """Raise ``ValueError`` naming the legal sizes unless ``pp`` stages can have the same number of layers."""
        if self.num_layers % pp:
            raise ValueError(
                f"pipeline_model_parallel_size={pp} does not divide num_layers={self.num_layers}; use one of "
                f"{divisors(self.num_layers)}"
            )

    def check_expert_parallel(self, ep: int, expert_tp: int, *, ranks: int) -> None:
        """Raise ``ValueError`` naming the legal sizes unless ``ep x expert_tp`` ranks can share the experts.

        Without experts nothing is dealt out, and any size will do.

        Args:
            ranks: Those that there are for it: errors name sizes that these can hold.
        """
        if self.moe is None:
            return
        experts, ffn = self.moe.num_experts, self.moe.moe_ffn_hidden_size
        if experts % ep:
            legal = divisors(math.gcd(experts, max(1, ranks // expert_tp)))
            raise ValueError(
                f"expert_model_parallel_size={ep} does not divide num_experts={experts}; use one of {legal}"
            )
        if self.whole_experts and expert_tp > 1:
            raise ValueError(
                f"expert_tensor_parallel_size={expert_tp} is not supported for experts with biases, which Megatron "
                "does not split; use 1, and an expert_model_parallel_size to share them"
            )
        if ffn % expert_tp:
            raise ValueError(
                f"expert_tensor_parallel_size={expert_tp} does not divide moe_ffn_hidden_size={ffn}; use one of "
                f"{divisors(math.gcd(ffn, max(1, ranks // ep)))}"
            )

    def _cut_by_tp(self) -> dict[str, int]:
        """Sizes that the tensor parallel size must divide, by name."""
        sizes = {"num_attention_heads": self.num_attention_heads, "padded_vocab_size": self.padded_vocab_size}
        if self.mla is None:
            sizes["rows of linear_qkv"] = (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels
        else:
            sizes["kv_lora_rank + qk_pos_emb_head_dim"] = self.mla.latent_dim
            if self.mla.q_lora_rank is not None:
                sizes["q_lora_rank"] = self.mla.q_lora_rank
        if self.moe is None or 0 in self.moe.moe_layer_freq:
            sizes["ffn_hidden_size"] = self.ffn_hidden_size
        if self.moe is not None and self.moe.moe_shared_expert_intermediate_size is not None:
            sizes["moe_shared_expert_intermediate_size"] = self.moe.moe_shared_expert_intermediate_size
        return sizes
