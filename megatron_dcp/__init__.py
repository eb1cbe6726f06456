"""Decode context parallelism for Megatron-Core: the KV cache of every sequence, sharded over ranks, exact.

``LLM`` generates; ``enable_dcp`` gives a live Megatron model its decode path; ``megatron_dcp.parallel_state`` makes
the groups. Names load on first use: importing the package imports neither torch nor Megatron.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dcp._cpu import default_device, megatron_on_cpu
    from megatron_dcp._mcore import build_model, local_layer_spec
    from megatron_dcp.checkpoint.convert import convert
    from megatron_dcp.checkpoint.load import load_model
    from megatron_dcp.config import CacheConfig, EngineConfig, ParallelConfig
    from megatron_dcp.engine.async_llm import AsyncLLM, StreamOutput
    from megatron_dcp.engine.llm import LLM, Token
    from megatron_dcp.engine.params import SamplingParams
    from megatron_dcp.engine.prometheus import prometheus_text
    from megatron_dcp.engine.request import RequestOutput
    from megatron_dcp.engine.stats import EngineStats
    from megatron_dcp.layers import dcp_layer_spec, enable_dcp
    from megatron_dcp.metrics import Metrics
    from megatron_dcp.model_config import ModelConfig
    from megatron_dcp.training import add_dcp_args, initialize_dcp_from_args, llm_from_args
    from megatron_dcp.verification import VerifyReport, verify

__version__ = "0.1.0"

_HOME = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.async_llm",
    "EngineStats": "engine.stats",
    "prometheus_text": "engine.prometheus",
    "RequestOutput": "engine.request",
    "SamplingParams": "engine.params",
    "StreamOutput": "engine.async_llm",
    "Token": "engine.llm",
    "CacheConfig": "config",
    "EngineConfig": "config",
    "Metrics": "metrics",
    "ModelConfig": "model_config",
    "ParallelConfig": "config",
    "add_dcp_args": "training",
    "initialize_dcp_from_args": "training",
    "llm_from_args": "training",
    "build_model": "_mcore",
    "local_layer_spec": "_mcore",
    "default_device": "_cpu",
    "megatron_on_cpu": "_cpu",
    "convert": "checkpoint",
    "load_model": "checkpoint",
    "verify": "verification",
    "VerifyReport": "verification",
    "dcp_layer_spec": "layers",
    "enable_dcp": "layers",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheConfig",
    "EngineConfig",
    "EngineStats",
    "Metrics",
    "ModelConfig",
    "ParallelConfig",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
    "Token",
    "VerifyReport",
    "add_dcp_args",
    "build_model",
    "convert",
    "dcp_layer_spec",
    "default_device",
    "enable_dcp",
    "initialize_dcp_from_args",
    "llm_from_args",
    "load_model",
    "local_layer_spec",
    "megatron_on_cpu",
    "prometheus_text",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with warnings.catch_warnings():  # Megatron-Core lists every optional package that it misses, on every rank
        warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.jit")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
