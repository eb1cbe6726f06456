"""Random Megatron models for tests: the whole model on one rank as the oracle, its shards for the ranks under test."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor

from megatron_dcp import parallel_state
from megatron_dcp._cpu import megatron_on_cpu
from megatron_dcp._mcore import build_model
from megatron_dcp.config import CacheConfig, EngineConfig
from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.engine.runner import ModelRunner
from megatron_dcp.model_config import ModelConfig


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


def random_state(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights of the whole model by Megatron name; norms and biases far from their trivial values."""
    generator = torch.Generator().manual_seed(seed)
    groups = single_rank_groups()
    state = {}
    for name, value in build_model(config, groups).state_dict().items():
        if value is None or not isinstance(value, Tensor):
            continue
        noise = torch.randn(value.shape, generator=generator)
        state[name] = (
            1 + 0.3 * noise if "norm" in name else noise * (value.shape[-1] ** -0.5 if value.dim() > 1 else 0.3)
        )
    return state


def shard(config: ModelConfig, state: dict[str, Tensor], rank: int, tp: int) -> dict[str, Tensor]:
    """The part of ``state`` that TP rank ``rank`` of ``tp`` holds, by Megatron's rules."""
    shards = {}
    for name, value in state.items():
        if "linear_fc1" in name:
            shards[name] = torch.cat([part.chunk(tp)[rank] for part in value.chunk(2 if config.swiglu else 1)])
        elif "linear_qkv" in name or "embedding" in name or "output_layer" in name:
            shards[name] = value.chunk(tp)[rank]
        elif "linear_proj.weight" in name or "linear_fc2.weight" in name:
            shards[name] = value.chunk(tp, dim=1)[rank]
        else:
            shards[name] = value
    return {name: value.clone() for name, value in shards.items()}


def whole_model(config: ModelConfig, state: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Any:
    """The oracle: Megatron's own modules, on this rank alone."""
    return _fill(build_model(config, single_rank_groups(), dtype=dtype), state)


def sharded_model(config: ModelConfig, state: dict[str, Tensor], dtype: torch.dtype = torch.float32, **kw: Any) -> Any:
    """This rank's shard, over the groups of ``parallel_state``."""
    groups = parallel_state.get_process_group_collection()
    return _fill(
        build_model(config, groups, dtype=dtype, **kw), shard(config, state, groups.tp.rank(), groups.tp.size())
    )


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
                seqs.append(SeqStep(text[done[i] : stop], done[i], tables[i], stop >= prompt_lens[i]))
                live.append((i, stop))
        logits = iter(runner.step(StepBatch(seqs)))
        for (i, stop), seq in zip(live, seqs, strict=True):
            done[i] = stop
            if seq.sample:
                rows[i].append(next(logits))
    return [torch.stack(each) for each in rows]


def single_rank_groups() -> Any:
    """Process groups of this rank alone (a collective call)."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return ProcessGroupCollection(tp=own, pp=own, cp=own, embd=None, dp=own, dp_cp=own, ep=own, expt_tp=own)


def _fill(model: Any, state: dict[str, Tensor]) -> Any:
    incompatible = model.load_state_dict(state, strict=False)
    missing = [name for name in incompatible.missing_keys if not name.endswith("_extra_state")]
    assert not missing and not incompatible.unexpected_keys, (missing, incompatible.unexpected_keys)
    return model
