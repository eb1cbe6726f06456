"""Random Megatron models for tests: the whole model on one rank as the oracle, its shards for the ranks under test."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor

from megatron_dcp import parallel_state
from megatron_dcp._cpu import megatron_on_cpu
from megatron_dcp._mcore import build_model
from megatron_dcp.checkpoint import names
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.engine.runner import ModelRunner
from megatron_dcp.model_config import ModelConfig, MoEConfig
from megatron_dcp.model_tensors import model_tensors


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, four query heads over two KV heads of 16; every size small and different."""
    fields: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=48,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        vocab_size=100,
        padded_vocab_size=128,
        max_position_embeddings=512,
        untie_embeddings_and_output_weights=True,
    )
    return ModelConfig(**{**fields, **changes})


_SHARED = dict(moe_shared_expert_intermediate_size=56)
_GROUPS = dict(moe_router_num_groups=4, moe_router_group_topk=2)
MOE_KINDS: dict[str, dict[str, Any]] = {
    "mixtral": dict(moe_router_topk=2),
    "one expert": dict(moe_router_topk=1, moe_router_pre_softmax=True),
    "qwen": dict(moe_router_topk=3, moe_router_pre_softmax=True, moe_router_topk_scaling_factor=2.0),
    "deepseek-v3": dict(
        moe_router_topk=4,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
        moe_layer_freq=(0, 1),
        **_GROUPS,
        **_SHARED,
    ),
    "deepseek-v2": dict(
        moe_router_topk=4,
        moe_router_pre_softmax=True,
        moe_router_topk_scaling_factor=3.0,
        moe_router_group_score_topk=1,
        moe_layer_freq=(0, 1),
        **_GROUPS,
        **_SHARED,
    ),
}


def moe_config(kind: str, num_experts: int = 8) -> ModelConfig:
    """`tiny_config` with experts, routed as the models of that name route."""
    fields = dict(num_experts=num_experts, moe_layer_freq=(1, 1), moe_ffn_hidden_size=24) | MOE_KINDS[kind]
    return tiny_config(moe=MoEConfig(**fields))


def random_state(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights of the whole model by Megatron name; norms and biases far from their trivial values."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, spec in model_tensors(config).items():
        noise = torch.randn(spec.shape, generator=generator)
        state[name] = (
            1 + 0.3 * noise if "norm" in name else noise * (spec.shape[-1] ** -0.5 if noise.dim() > 1 else 0.3)
        )
    return state


def shard(config: ModelConfig, state: dict[str, Tensor], groups: Any) -> dict[str, Tensor]:
    """The part of ``state`` that this rank holds, under the names of its model: experts are numbered from 0."""
    shards = {}
    for name, spec in model_tensors(config).items():
        own_name = _own_name(config, name, groups.ep)
        if own_name is not None:
            group = groups.expt_tp if spec.expert else groups.tp
            shards[own_name] = names.shard(state[name], spec, group.size(), group.rank()).clone()
    return shards


def _own_name(config: ModelConfig, name: str, ep: Any) -> str | None:
    """What an expert parallel rank calls a tensor of the whole model; ``None``: it belongs to another rank's expert."""
    match = re.fullmatch(r"(.+\.local_experts\.)(\d+)(\..+)", name)
    if match is None or config.moe is None:
        return name
    count = config.moe.num_experts // ep.size()
    rank, local = divmod(int(match[2]), count)
    return f"{match[1]}{local}{match[3]}" if rank == ep.rank() else None


def whole_model(config: ModelConfig, state: dict[str, Tensor], dtype: torch.dtype = torch.float32, **kw: Any) -> Any:
    """The oracle: Megatron's own modules, on this rank alone."""
    return _fill(build_model(config, single_rank_groups(), dtype=dtype, **kw), state)


def sharded_model(config: ModelConfig, state: dict[str, Tensor], dtype: torch.dtype = torch.float32, **kw: Any) -> Any:
    """This rank's shard, over the groups of ``parallel_state``; at pp > 1 of its stage."""
    groups = parallel_state.get_process_group_collection()
    model = build_model(config, groups, dtype=dtype, **kw)
    first, shards = model.decoder.layers[0].layer_number - 1, shard(config, state, groups)
    own = [name for name in model.state_dict() if not name.endswith("_extra_state")]
    if groups.pp.size() > 1:
        shards = {name: shards[names.global_layer_name(name, first)] for name in own}
    return _fill(model, shards)


def training_logits(model: Any, tokens: list[int]) -> Tensor:
    """Megatron's own training forward: fp32 logits ``[len(tokens), padded vocab / tp]``."""
    length = len(tokens)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    with megatron_on_cpu(), torch.no_grad():
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # its dropout asks for one, without a GPU
        return model(torch.tensor([tokens]), torch.arange(length)[None], mask)[0].float()


def make_runner(
    model: Any, config: ModelConfig, *, cache: CacheConfig, engine: EngineConfig | None = None, **kw: Any
) -> ModelRunner:
    return ModelRunner(
        model,
        parallel_state.get_process_group_collection(),
        cache=cache,
        engine=engine or EngineConfig(),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        **kw,
    )


def forced_logits(
    runner: ModelRunner, texts: list[list[int]], prompt_lens: list[int], chunk: int = 10**9
) -> list[Tensor]:
    """Logits after each text's prompt and after every further token of it, all texts stepping together.

    Prompts go in by chunks; the rest is fed token by token, as decoding would. Blocks are dealt out in turns, so that
    the blocks of one text lie apart.
    """
    layout = runner.layout
    needed = [layout.blocks_for(len(text)) for text in texts]
    tables: list[list[int]] = [[] for _ in texts]
    free = iter(range(runner.num_blocks))
    for turn in range(max(needed)):
        for table, count in zip(tables, needed, strict=True):
            if turn < count:
                table.append(next(free))
    done = [0] * len(texts)
    rows: list[list[Tensor]] = [[] for _ in texts]
    while any(d < len(text) for d, text in zip(done, texts, strict=True)):
        live, seqs = [], []
        for i, text in enumerate(texts):
            if done[i] < len(text):
                stop = min(done[i] + chunk, prompt_lens[i]) if done[i] < prompt_lens[i] else done[i] + 1
                seqs.append(SeqStep(text[done[i] : stop], done[i], tables[i], int(stop >= prompt_lens[i])))
                live.append((i, stop))
        logits = iter(everywhere(runner, runner.step(StepBatch(seqs)), sum(seq.num_logits for seq in seqs)))
        for (i, stop), seq in zip(live, seqs, strict=True):
            done[i] = stop
            if seq.num_logits:
                rows[i].append(next(logits))
    return [torch.stack(each) for each in rows]


def everywhere(runner: ModelRunner, logits: Tensor, rows: int) -> Tensor:
    """The logits that the first rank of each DCP group has, on all its ranks (a collective call)."""
    if rows == len(logits) and runner.groups.dcp.size() == 1:
        return logits
    logits = logits.new_empty(rows, runner.vocab_size) if len(logits) < rows else logits.contiguous()
    dist.broadcast(logits, group=runner.groups.dcp, group_src=0)
    return logits


def single_rank_groups() -> Any:
    """Process groups of this rank alone (a collective call)."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    names_of_groups = ("tp", "pp", "cp", "dp", "dp_cp", "tp_cp", "tp_dp_cp", "ep", "expt_tp", "tp_ep", "expt_dp")
    return ProcessGroupCollection(embd=None, **dict.fromkeys(names_of_groups, own))


def _fill(model: Any, state: dict[str, Tensor]) -> Any:
    incompatible = model.load_state_dict(state, strict=False)
    missing = [name for name in incompatible.missing_keys if not name.endswith("_extra_state")]
    assert not missing and not incompatible.unexpected_keys, (missing, incompatible.unexpected_keys)
    return model
