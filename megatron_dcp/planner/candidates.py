"""The ways to lay out a model over a number of GPUs: all that are legal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from megatron_dcp.config import (
    DEFAULT_EXCHANGE,
    CacheConfig,
    DcpLayout,
    EngineConfig,
    ExchangeName,
    KVCacheDtype,
    ParallelConfig,
    check_at_least,
    check_interleave,
    check_within_tp_bound,
    divisors_of,
)
from megatron_dcp.model_config import ModelConfig
from megatron_dcp.model_tensors import padded_vocab_size

MOST_GPUS = 4096  # whose configurations are listed in seconds


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What a configuration must have; ``None``: anything legal.

    Attributes:
        kv_cache_dtypes: Those that are listed.
        interleave: The KV interleave; any divisor of ``block_size`` is legal and takes the same bytes.
    """

    tp: int | None = None
    pp: int | None = None
    dcp: int | None = None
    ep: int | None = None
    expert_tp: int | None = None
    layout: DcpLayout | None = None
    exchange: ExchangeName | None = None
    kv_cache_dtypes: tuple[KVCacheDtype, ...] = ("auto",)
    interleave: int = CacheConfig.kv_interleave_size
    block_size: int = CacheConfig.block_size

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dcp", "ep", "expert_tp"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        check_interleave("kv_interleave_size", self.interleave, self.block_size)
        if self.exchange is not None and self.layout is not None:
            EngineConfig(exchange=self.exchange).exchange_for(self.layout)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration.

    Attributes:
        dp: Replicas, each of which decodes its own sequences.
    """

    parallel: ParallelConfig
    dp: int
    kv_cache_dtype: KVCacheDtype
    exchange: ExchangeName
    cache: CacheConfig

    @property
    def tp(self) -> int:
        return self.parallel.tensor_model_parallel_size

    @property
    def dcp(self) -> int:
        return self.parallel.decode_context_parallel_size

    @property
    def pp(self) -> int:
        return self.parallel.pipeline_model_parallel_size

    @property
    def layout(self) -> DcpLayout:
        return self.parallel.dcp_layout

    @property
    def gpus(self) -> int:
        return self.parallel.ranks * self.dp

    @property
    def layer_ranks(self) -> int:
        """Ranks that share a layer: tp x dcp."""
        return self.parallel.ranks // self.pp

    @property
    def name(self) -> str:
        """``tp 2 x dcp 4 (orthogonal), pp 1, dp 1``, without what is 1."""
        parallel = self.parallel
        text = f"tp {self.tp}" + (f" x dcp {self.dcp} ({self.layout})" if self.dcp > 1 else "")
        rest = {"pp": self.pp, "dp": self.dp, "ep": parallel.expert_model_parallel_size}
        if parallel.expert_model_parallel_size > 1 or parallel.expert_tp != self.tp:
            rest["expert tp"] = parallel.expert_tp
        text += "".join(f", {name} {size}" for name, size in rest.items() if size > 1)
        return text + ("" if self.kv_cache_dtype == "auto" else f", {self.kv_cache_dtype} KV")


def candidates(model: ModelConfig, gpus: int, pins: Pins) -> list[Candidate]:
    """Every legal configuration of exactly ``gpus`` GPUs.

    Raises:
        ValueError: There is none; with the rule that the pinned sizes break, where one alone does.
    """
    check_at_least("gpus", gpus, 1)
    if gpus > MOST_GPUS:
        raise ValueError(f"gpus={gpus} is above {MOST_GPUS}; plan for the GPUs of one replica, or of a few")
    for name in ("ep", "expert_tp"):
        if model.moe is None and (getattr(pins, name) or 1) > 1:
            raise ValueError(f"{name}={getattr(pins, name)} shares out experts, and the model has none; leave it out")
    found = [
        Candidate(
            parallel=parallel,
            dp=gpus // parallel.ranks,
            kv_cache_dtype=dtype,
            exchange=pins.exchange or DEFAULT_EXCHANGE[parallel.dcp_layout],
            cache=CacheConfig(kv_cache_dtype=dtype, block_size=pins.block_size, kv_interleave_size=pins.interleave),
        )
        for parallel in _parallel(model, gpus, pins)
        for dtype in pins.kv_cache_dtypes
    ]
    if not found:
        _explain(model, gpus, pins)
    return found


def legal_dcp(model: ModelConfig, tp: int, layout: DcpLayout, most: int) -> list[int]:
    """The dcp sizes up to ``most`` that are legal beside ``tp`` in a layout."""
    sizes = range(1, most + 1) if layout == "orthogonal" else divisors_of(tp)
    return [dcp for dcp in sizes if dcp <= most and _legal(model, _config(tp, dcp, layout))]


def legal_exchanges(candidate: Candidate) -> list[ExchangeName]:
    """The exchanges that its layout can run; none without dcp."""
    names = get_args(ExchangeName) if candidate.dcp > 1 else ()
    return [
        name for name in names if _passes(lambda name=name: EngineConfig(exchange=name).exchange_for(candidate.layout))
    ]


def _parallel(model: ModelConfig, gpus: int, pins: Pins) -> Iterator[ParallelConfig]:
    for tp in _choices(pins.tp, divisors_of(gpus)):
        for pp in _choices(pins.pp, divisors_of(gpus // tp) if gpus % tp == 0 else []):
            if gpus % (tp * pp):
                continue
            for layout, dcp in _dcp_sizes(gpus // (tp * pp), tp, pins):
                base = _config(tp, dcp, layout, pipeline_model_parallel_size=pp)
                if _legal(model, base) and gpus % base.ranks == 0:
                    yield from _with_experts(model, base, gpus, pins)


def _dcp_sizes(replicas: int, tp: int, pins: Pins) -> Iterator[tuple[DcpLayout, int]]:
    """Without dcp the layouts are the same: it is listed as the pinned one, or as orthogonal."""
    layouts: tuple[DcpLayout, ...] = ("orthogonal", "within_tp") if pins.layout is None else (pins.layout,)
    for layout in layouts:
        for dcp in _choices(pins.dcp, divisors_of(replicas if layout == "orthogonal" else tp)):
            if (dcp > 1 or layout == layouts[0]) and not (layout == "within_tp" and pins.exchange == "fold"):
                yield layout, dcp


def _with_experts(model: ModelConfig, base: ParallelConfig, gpus: int, pins: Pins) -> Iterator[ParallelConfig]:
    """Ranks that share experts decode one batch together: they lie inside tp x dcp."""
    if model.moe is None:
        yield base
        return
    together = base.ranks // base.pipeline_model_parallel_size
    for ep in _choices(pins.ep, divisors_of(together)):
        for expert_tp in _choices(pins.expert_tp, divisors_of(together)):
            parallel = replace(base, expert_model_parallel_size=ep, expert_tensor_parallel_size=expert_tp)
            if together % (ep * expert_tp) == 0 and _passes(
                lambda ep=ep, expert_tp=expert_tp: model.check_expert_parallel(ep, expert_tp, ranks=together),
                lambda parallel=parallel: parallel.check_world_size(gpus),
            ):
                yield parallel


def _config(tp: int, dcp: int, layout: DcpLayout, **more: Any) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        decode_context_parallel_size=dcp,
        dcp_layout=layout,
        **more,
    )


def _legal(model: ModelConfig, parallel: ParallelConfig) -> bool:
    tp = parallel.tensor_model_parallel_size
    return _passes(
        lambda: _padded(model, tp).check_tensor_parallel(tp),
        lambda: model.check_pipeline_parallel(parallel.pipeline_model_parallel_size),
        lambda: check_within_tp_bound(parallel, model.cached_kv_heads),
    )


def _padded(model: ModelConfig, tp: int) -> ModelConfig:
    """Loading pads the vocabulary for tp, so that it never stands in the way."""
    return replace(model, padded_vocab_size=padded_vocab_size(model.vocab_size, tp))


def _passes(*checks: Any) -> bool:
    try:
        for check in checks:
            check()
    except ValueError:
        return False
    return True


def _explain(model: ModelConfig, gpus: int, pins: Pins) -> None:
    """Raise the error of the first rule that the pinned sizes break."""
    tp, pp, dcp, layout = pins.tp or 1, pins.pp or 1, pins.dcp or 1, pins.layout or "orthogonal"
    _padded(model, tp).check_tensor_parallel(tp)
    model.check_pipeline_parallel(pp)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        decode_context_parallel_size=dcp,
        dcp_layout=layout,
        expert_model_parallel_size=pins.ep or 1,
        expert_tensor_parallel_size=pins.expert_tp or 1,
    )
    check_within_tp_bound(parallel, model.cached_kv_heads)
    model.check_expert_parallel(pins.ep or 1, pins.expert_tp or 1, ranks=gpus)
    parallel.check_world_size(gpus)
    said = ", ".join(f"{name}={value}" for name, value in vars(pins).items() if name in _SIZES and value is not None)
    hint = " (ranks that share experts are among those of tp x dcp)" if model.moe is not None else ""
    raise ValueError(f"no legal configuration of {gpus} GPUs has {said}{hint}; leave one of them out")


_SIZES = ("tp", "pp", "dcp", "ep", "expert_tp", "layout", "exchange")


def _choices(pinned: int | None, all_of_them: list[int]) -> list[int]:
    return all_of_them if pinned is None else [size for size in all_of_them if size == pinned]
