"""Whom ``bench.py decode`` measures against, on the same weights: Megatron-Core's static inference and transformers.

Weights are shared in memory wherever the layouts allow it; the caches hold the same random keys.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
from typing import Any

import torch
from bench_models import Case, Contender, Ours, RandomKV, Shape
from bench_world import World
from torch import Tensor

from megatron_dcp import build_model, default_device, megatron_on_cpu, parallel_state
from megatron_dcp.checkpoint.families import family_of
from megatron_dcp.model_config import ModelConfig


class MegatronStatic(Contender):
    """Megatron-Core's own ``GPTModel`` with ``StaticInferenceContext``; its cache holds keys that are not rotated."""

    name = "megatron static"

    def __init__(self, model: Any, kv: RandomKV, shape: Shape, dtype: str) -> None:
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        self.model, self.kv, self.shape, self.dtype = model, kv, shape, dtype

    def memory(self, case: Case) -> float:
        own = case.kv_bytes(self.shape, self.dtype)
        group = self.shape.heads // self.shape.kv_heads
        return own + own / self.shape.layers * (2 + group)  # rotated keys, then both with a copy per query head

    def prepare(self, case: Case) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        self.context = StaticInferenceContext(case.batch, case.context)
        for layer in range(self.shape.layers):
            size = (case.context, case.batch, self.shape.kv_heads, self.shape.head_dim)
            memory = tuple(torch.zeros(size, dtype=self.kv.dtype, device=self.kv.device) for _ in range(2))
            for sequence in range(case.batch):
                positions = torch.arange(case.context - 1, device=self.kv.device)
                for kept, new in zip(memory, self.kv.read(layer, sequence, positions, rotated=False), strict=True):
                    kept[:-1, sequence] = new
            self.context.key_value_memory_dict[layer + 1] = memory
        self.context.enable_decode_mode()
        self.tokens = torch.tensor(self.kv.tokens(case.batch), device=self.kv.device).unsqueeze(1)
        self.positions = torch.full_like(self.tokens, case.context - 1)

    @torch.inference_mode()
    def step(self) -> Tensor:
        self.context.sequence_len_offset = int(self.positions[0, 0])
        with megatron_on_cpu(), _inference_active():
            logits = self.model(
                self.tokens, self.positions, None, inference_context=self.context, runtime_gather_output=True
            )
        return logits[:, -1].float()

    def release(self) -> None:
        del self.context


def _inference_active() -> Any:
    """What the newer line of Megatron-Core asks for around inference."""
    from megatron.core.inference import utils

    mode = getattr(utils, "InferenceMode", None)
    return mode.active() if mode is not None else contextlib.nullcontext()


class Transformers(Contender):
    """``LlamaForCausalLM`` with SDPA, and the cache that ``generate`` uses or, ``static``, one allocated ahead."""

    def __init__(self, model: Any, kv: RandomKV, shape: Shape, dtype: str, *, static: bool) -> None:
        self.model, self.kv, self.shape, self.dtype, self.static = model, kv, shape, dtype, static
        self.name = "transformers static" if static else "transformers"
        if model is not None:
            renamed = "cache" in inspect.signature(type(model).forward).parameters
            self.argument = "cache" if renamed else "past_key_values"

    def memory(self, case: Case) -> float:
        own = case.kv_bytes(self.shape, self.dtype)
        return own + 2 * own / self.shape.layers

    def prepare(self, case: Case) -> None:
        from transformers import DynamicCache, StaticCache

        config = self.model.config
        if self.static:
            self.cache = StaticCache(config=config, max_cache_len=case.context)
        else:
            self.cache = DynamicCache(config=config)
        positions = torch.arange(case.context - 1, device=self.kv.device)
        for layer in range(self.shape.layers):
            size = (case.batch, self.shape.kv_heads, case.context - 1, self.shape.head_dim)
            keys = tuple(torch.empty(size, dtype=self.kv.dtype, device=self.kv.device) for _ in range(2))
            for sequence in range(case.batch):
                for kept, new in zip(keys, self.kv.read(layer, sequence, positions, rotated=True), strict=True):
                    kept[sequence] = new.transpose(0, 1)
            self.cache.update(*keys, layer)
        self.tokens = torch.tensor(self.kv.tokens(case.batch), device=self.kv.device).unsqueeze(1)

    @torch.inference_mode()
    def step(self) -> Tensor:
        logits = self.model(self.tokens, **{self.argument: self.cache}, use_cache=True).logits
        self.cache.crop(-1)
        return logits[:, -1].float()

    def release(self) -> None:
        del self.cache


def make_contenders(arguments: argparse.Namespace, world: World) -> list[Contender]:
    """All contenders, ``dcp 1`` first, the same list on every rank; only the ranks that work for one hold its model."""
    shape: Shape = arguments.shape
    dtype, device = getattr(torch, arguments.dtype), default_device()
    config = shape.config(max(arguments.contexts))
    groups = parallel_state.get_process_group_collection()
    model = build_random_model(config, groups, dtype, device)
    kv = RandomKV(config, dtype, device)
    contenders: list[Contender] = [
        Ours(size, model, with_dcp(groups, group), kv, arguments) for size, group in world.groups.items()
    ]
    first = world.rank == 0
    if "megatron" in arguments.peers:
        stock = None
        if first:
            stock = build_model(config, groups, dtype=dtype, device=device)
            stock.load_state_dict(model.state_dict(), assign=True, strict=False)
        contenders.append(MegatronStatic(stock, kv, shape, arguments.dtype))
    wanted = [peer for peer in arguments.peers if peer.startswith("transformers")]
    llama = transformers_model(model, config) if wanted and first else None
    for peer in wanted:
        contenders.append(Transformers(llama, kv, shape, arguments.dtype, static=peer.endswith("static")))
    return contenders


@torch.no_grad()
def build_random_model(config: ModelConfig, groups: Any, dtype: torch.dtype, device: Any) -> Any:
    """A model with the same weights on every rank, of a size that keeps activations near 1."""
    model = build_model(config, groups, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return model


def with_dcp(groups: Any, group: Any) -> Any:
    """``groups`` with another DCP group; tp stays 1, so that dcp sizes can take turns in one world."""
    groups = copy.copy(groups)
    groups.dcp = groups.tp_dcp = groups.dcp_replica = group
    return groups


def transformers_model(model: torch.nn.Module, config: ModelConfig) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = dict(model.named_parameters())
    llama_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    state = {}
    for row in family_of(config, "llama").rows(config):
        tensors = row.transform.unpack(parameters[row.megatron].detach(), config)
        state |= dict(zip(row.hf, tensors, strict=True))
    with torch.device("meta"):
        llama = LlamaForCausalLM(llama_config)
    llama.load_state_dict(state, assign=True)
    llama.model.rotary_emb = LlamaRotaryEmbedding(llama_config).to(next(llama.parameters()).device)
    return llama.eval()
