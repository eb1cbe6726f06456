"""Frozen configuration objects: what runs where, how the cache is cut, how the engine steps.

Every object is validated once, when it is made. A derived configuration is a new object
(``dataclasses.replace``). Nothing here imports torch or Megatron, so that a planner can use it anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

DcpLayout = Literal["orthogonal", "within_tp"]
ExchangeName = Literal["fold", "all_reduce", "ag_rs", "a2a"]
PrefillName = Literal["auto", "pass_kv", "pass_q", "replicated"]
DtypeName = Literal["float32", "bfloat16", "float16"]
BackendName = Literal["auto", "te", "flash", "flashinfer", "flash_mla", "triton", "sdpa"]
CudaGraphs = Literal["none", "piecewise", "full"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "int8"]

DEFAULT_EXCHANGE: dict[str, ExchangeName] = {"orthogonal": "fold", "within_tp": "a2a"}


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` naming the choices unless ``value`` is one of them."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(map(str, choices))}")


def check_at_least(name: str, value: int, bound: int) -> None:
    """Raise ``ValueError`` unless ``value`` is a whole number of at least ``bound``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < bound:
        raise ValueError(f"{name}={value!r} must be a whole number >= {bound}")


def check_flag(name: str, value: Any, why: str = "") -> None:
    """Raise ``ValueError``, with ``why`` at its end, unless ``value`` is a bool: ``"no"`` would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False{why}")


def check_interleave(name: str, interleave: int, block_size: int) -> None:
    """Raise ``ValueError`` with the legal sizes unless both are whole numbers and ``interleave`` divides the block."""
    check_at_least("block_size", block_size, 1)
    check_at_least(name, interleave, 1)
    if block_size % interleave:
        raise ValueError(
            f"{name}={interleave} does not divide block_size={block_size}; use one of {divisors(block_size)}"
        )


def divisors(number: int) -> str:
    """The whole numbers that divide ``number``, for the remedy of an error: ``"1, 2, 4"``."""
    return ", ".join(map(str, divisors_of(number)))


def divisors_of(number: int) -> list[int]:
    """The whole numbers that divide ``number``, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel groups that run one model, in Megatron's argument names.

    ``orthogonal``: attention runs on tp x dcp ranks, weights are replicated over dcp, any dcp size works.
    ``within_tp``: the DCP groups are subgroups of the TP groups; no extra ranks, KV duplicates removed.

    Attributes:
        context_parallel_size: Megatron's training-time ``cp``. Its ranks hold the same weights, so ``orthogonal``
            may use them for dcp like those of data parallelism.
        expert_tensor_parallel_size: ``None``: ``tensor_model_parallel_size``, as in Megatron.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    decode_context_parallel_size: int = 1
    dcp_layout: DcpLayout = "orthogonal"

    def __post_init__(self) -> None:
        for name in (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size", "decode_context_parallel_size",
        ):  # fmt: skip
            check_at_least(name, getattr(self, name), 1)
        if self.expert_tensor_parallel_size is not None:
            check_at_least("expert_tensor_parallel_size", self.expert_tensor_parallel_size, 1)
        check_choice("dcp_layout", self.dcp_layout, get_args(DcpLayout))
        tp, dcp = self.tensor_model_parallel_size, self.decode_context_parallel_size
        if self.dcp_layout == "within_tp" and tp % dcp:
            raise ValueError(
                f"decode_context_parallel_size={dcp} does not divide tensor_model_parallel_size={tp}, "
                f"which dcp_layout='within_tp' needs; use one of {divisors(tp)}, or dcp_layout='orthogonal'"
            )

    @property
    def ranks(self) -> int:
        """Ranks that decode one batch together: tp x dcp x pp, or tp x pp where dcp lies within tp."""
        ranks = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return ranks if self.dcp_layout == "within_tp" else ranks * self.decode_context_parallel_size

    @property
    def expert_tp(self) -> int:
        """``expert_tensor_parallel_size`` with its default filled in."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def check_world_size(self, world_size: int) -> None:
        """Raise ``ValueError`` naming the legal sizes unless these groups fill ``world_size`` ranks."""
        check_at_least("world_size", world_size, 1)
        tp, pp, cp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size
        if world_size % (tp * pp * cp):
            raise ValueError(
                f"world_size={world_size} is no multiple of {tp * pp * cp} (tensor_model_parallel_size={tp} x "
                f"pipeline_model_parallel_size={pp}{f' x context_parallel_size={cp}' if cp > 1 else ''}); start a "
                f"multiple of {tp * pp * cp} ranks, or use smaller sizes"
            )
        ep, expert_tp = self.expert_model_parallel_size, self.expert_tp
        if world_size % (expert_tp * ep * pp):
            split_less = ", or expert_tensor_parallel_size=1" if expert_tp > 1 else ""
            raise ValueError(
                f"world_size={world_size} is no multiple of {expert_tp * ep * pp} (expert_tensor_parallel_size="
                f"{expert_tp} x expert_model_parallel_size={ep} x pipeline_model_parallel_size={pp}); start a "
                f"multiple of {expert_tp * ep * pp} ranks, or use smaller sizes{split_less}"
            )
        dcp, same_weights = self.decode_context_parallel_size, world_size // (tp * pp)
        if self.dcp_layout == "orthogonal" and same_weights % dcp:
            raise ValueError(
                f"decode_context_parallel_size={dcp} does not divide the {same_weights} ranks that hold the same "
                f"weights (world_size={world_size} / (tensor_model_parallel_size={tp} x "
                f"pipeline_model_parallel_size={pp})), which dcp_layout='orthogonal' needs; use one of "
                f"{divisors(same_weights)}, or start a multiple of {self.ranks} ranks"
            )


def check_within_tp_bound(parallel: ParallelConfig, num_kv_heads: int) -> None:
    """Raise ``ValueError`` where ``within_tp`` would shard a KV head that is not duplicated.

    Tensor parallelism first splits KV heads over ranks and then copies them; only copies can be turned
    into shards, so dcp <= tp // kv_heads.
    """
    if parallel.dcp_layout != "within_tp":
        return
    tp, dcp = parallel.tensor_model_parallel_size, parallel.decode_context_parallel_size
    bound = max(1, tp // num_kv_heads)
    if dcp > bound or (dcp > 1 and (tp // num_kv_heads) % dcp):
        legal = ", ".join(str(d) for d in range(1, bound + 1) if bound % d == 0)
        raise ValueError(
            f"decode_context_parallel_size={dcp} does not fit dcp_layout='within_tp': tensor_model_parallel_size="
            f"{tp} keeps {bound} cop{'y' if bound == 1 else 'ies'} of each of the {num_kv_heads} KV heads; "
            f"use one of {legal}, or dcp_layout='orthogonal'"
        )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How the KV cache is cut and how large it is.

    Attributes:
        block_size: Tokens of one physical block *on one rank*; a logical block is ``block_size * dcp`` tokens.
        kv_interleave_size: ``I``: so many consecutive tokens live on one rank before the next rank takes over;
            divides ``block_size``.
        num_blocks: Physical blocks of the pool on every rank (or give ``bytes_per_rank``).
        bytes_per_rank: Upper bound of the pool's bytes on every rank. Neither given: as much as the largest
            batch of the engine needs.
        kv_cache_dtype: What keys and values are stored in; ``auto``: the model's dtype. ``fp8_e4m3`` and ``int8`` come
            with a scale per token and head (`megatron_dcp.shard`): half the bytes of half precision, and not exact.
    """

    block_size: int = 64
    kv_interleave_size: int = 1
    num_blocks: int | None = None
    bytes_per_rank: int | None = None
    kv_cache_dtype: KVCacheDtype = "auto"

    def __post_init__(self) -> None:
        check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDtype))
        check_interleave("kv_interleave_size", self.kv_interleave_size, self.block_size)
        if self.num_blocks is not None and self.bytes_per_rank is not None:
            raise ValueError("num_blocks and bytes_per_rank both size the KV pool; give one of them")
        if self.num_blocks is not None:
            check_at_least("num_blocks", self.num_blocks, 1)
        if self.bytes_per_rank is not None:
            check_at_least("bytes_per_rank", self.bytes_per_rank, 1)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine steps.

    Attributes:
        max_num_seqs: Sequences that decode at the same time; further prompts wait.
        prefill_chunk_size: Most prompt tokens that one step computes.
        exchange: How partial attention is merged over the DCP group; ``None``: the layout's default,
            ``fold`` for ``orthogonal``, ``a2a`` for ``within_tp``.
        prefill: How the DCP ranks of ``orthogonal`` share the tokens of a prompt's chunk. ``pass_kv`` and ``pass_q``
            deal them out, and pass keys and values, or queries, around for attention; ``auto``: whichever of these
            sends fewer bytes, and no dealing out of a few tokens; ``replicated``: every rank computes all of them. In
            ``within_tp`` always the last.
        backend: Attention back end: ``te``, ``flash``, ``flashinfer``, ``flash_mla``, ``triton`` or ``sdpa``. ``auto``:
            what the environment variable ``MEGATRON_DCP_BACKEND`` names, else the first of these that can serve the
            model here; ``megatron-dcp env`` shows which can, and why others cannot.
        cuda_graphs: Whether decode steps are captured as CUDA graphs and replayed: ``full`` with the exchanges in them,
            ``piecewise`` with the exchanges (and experts) between them. Steps with a prompt's chunk or with drafts are
            computed as always. What attention takes of a replayed step is not counted apart.
        symmetric_memory: Let small exchanges between the GPUs of one machine go by torch's symmetric memory rather than
            NCCL.
        prefix_caching: Keep the blocks of ended sequences while there is room, and reuse them for prompts that begin
            with the same tokens. A live model starts every call afresh.
        num_draft_tokens: Tokens that are proposed per step by looking for the last ones earlier in the text (prompt
            lookup) and verified exactly; the output stays the same. 0: none.
        log_interval_s: Seconds between log lines about the steps, and over which tokens per second are counted.
    """

    max_num_seqs: int = 64
    prefill_chunk_size: int = 1024
    exchange: ExchangeName | None = None
    prefill: PrefillName = "auto"
    backend: BackendName = "auto"
    cuda_graphs: CudaGraphs = "none"
    symmetric_memory: bool = False
    prefix_caching: bool = True
    num_draft_tokens: int = 0
    log_interval_s: float = 10.0

    def __post_init__(self) -> None:
        check_flag("prefix_caching", self.prefix_caching)
        check_flag("symmetric_memory", self.symmetric_memory)
        check_at_least("num_draft_tokens", self.num_draft_tokens, 0)
        number = isinstance(self.log_interval_s, int | float) and not isinstance(self.log_interval_s, bool)
        if not number or not self.log_interval_s >= 0:
            raise ValueError(f"log_interval_s={self.log_interval_s!r} must be a number of seconds >= 0")
        check_at_least("max_num_seqs", self.max_num_seqs, 1)
        check_at_least("prefill_chunk_size", self.prefill_chunk_size, 1)
        check_choice("prefill", self.prefill, get_args(PrefillName))
        check_choice("backend", self.backend, get_args(BackendName))
        check_choice("cuda_graphs", self.cuda_graphs, get_args(CudaGraphs))
        if self.exchange is not None:
            check_choice("exchange", self.exchange, get_args(ExchangeName))

    def exchange_for(self, layout: str) -> ExchangeName:
        """The exchange to run in ``layout``; ``ValueError`` where the two do not fit."""
        name = self.exchange or DEFAULT_EXCHANGE[layout]
        if name == "fold" and layout == "within_tp":
            raise ValueError(
                "exchange='fold' adds the partials up in the output projection, whose rows dcp_layout='within_tp' "
                "splits over the same ranks; use exchange='a2a', 'ag_rs' or 'all_reduce', or dcp_layout='orthogonal'"
            )
        return name
