"""What ``LLM`` and ``AsyncLLM`` share: a model, the prompts it takes, and the engine or its follower on this rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch

from megatron_dcp import parallel_state
from megatron_dcp._cpu import default_device
from megatron_dcp.cache import KVLayout
from megatron_dcp.comm.consensus import same_on_all
from megatron_dcp.config import CacheConfig, DcpLayout, DtypeName, EngineConfig
from megatron_dcp.engine.core import Engine, Sampled
from megatron_dcp.engine.follower import Follower, Runner
from megatron_dcp.engine.link import Link
from megatron_dcp.engine.loading import (
    DTYPES,
    attach,
    find_tokenizer,
    initialize_groups,
    load_checkpoint,
    on_all_ranks,
    start,
)
from megatron_dcp.engine.prompts import PromptReader
from megatron_dcp.engine.request import Request, RequestOutput
from megatron_dcp.engine.runner import ModelRunner
from megatron_dcp.engine.sampler import Sampler
from megatron_dcp.engine.startup import report_startup
from megatron_dcp.engine.stats import EngineStats
from megatron_dcp.engine.stops import StopStrings
from megatron_dcp.metrics import Metrics


class Front:
    """A Megatron model with the KV cache of every sequence sharded over the DCP group, ready to generate.

    One rank of a replica, the *driver*, holds the requests, schedules and samples; the others compute what it says.
    All ranks of the world make one together.

    Args:
        model: Directory of a checkpoint in any format that `megatron_dcp.load_model` reads, or a Megatron
            ``GPTModel``, bare or wrapped.
        tensor_model_parallel_size: ``None``: that of the existing groups, else 1.
        pipeline_model_parallel_size: Stages that split the layers. ``None``: that of the existing groups, else 1.
        decode_context_parallel_size: Ranks that share a sequence's KV cache. ``None``: that of the existing groups,
            else 1.
        dcp_layout: ``orthogonal`` or ``within_tp``. ``None``: that of the existing groups, else ``orthogonal``.
        expert_model_parallel_size: Ranks that the experts of a mixture of experts are dealt out over; they are among
            the ranks of one replica. ``None``: that of the existing groups, else 1.
        expert_tensor_parallel_size: Ranks that split one expert. ``None``: that of the existing groups, else tp; for a
            checkpoint whose experts have biases 1, since Megatron does not split these.
        cache: How the KV cache is cut, and its size. Without a size the pool is made for the first requests, as large
            as they need, and made anew where later ones need more; one that comes while others run and does not fit
            beside them waits until they have ended.
        engine: Batch size, prefill chunk, exchange, back end.
        dtype: dtype of weights and cache of a checkpoint, default ``float32``; a live model keeps its own.
        device: Of a checkpoint's model; default: the current GPU, else the CPU.
        tokenizer: Has ``encode`` and ``decode``. Default: the checkpoint's, if it has one.
        vocab_size: Tokens of a live model that exist; default: all rows of its embedding, padding included.
        eos_token_ids: Tokens that end a text; default: the checkpoint's and the tokenizer's.
        timeout_s: Seconds after which a collective that another rank never joins fails; only where this call
            initialises ``torch.distributed``.
        metrics: Counts collectives and bytes, and times the parts of a step. Default: an own one.

    Raises:
        ValueError: On every rank: a broken checkpoint, sizes that do not fit, arguments that contradict each other.
    """

    _tell_outcomes: ClassVar[bool]
    """Whether followers hear what becomes of the requests."""

    def __init__(
        self,
        model: str | os.PathLike[str] | torch.nn.Module,
        *,
        tensor_model_parallel_size: int | None = None,
        pipeline_model_parallel_size: int | None = None,
        decode_context_parallel_size: int | None = None,
        dcp_layout: DcpLayout | None = None,
        expert_model_parallel_size: int | None = None,
        expert_tensor_parallel_size: int | None = None,
        cache: CacheConfig | None = None,
        engine: EngineConfig | None = None,
        dtype: DtypeName | None = None,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        timeout_s: float = 600.0,
        metrics: Metrics | None = None,
    ) -> None:
        self._live, eos_token_ids = on_all_ranks(
            start,
            model,
            timeout_s,
            eos_token_ids,
            cache=cache,
            engine=engine,
            metrics=metrics,
            dtype=dtype,
            device=device,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
        )
        self.cache_config = cache or CacheConfig()
        self.engine_config = engine or EngineConfig()
        self.metrics = Metrics() if metrics is None else metrics
        sizes = {
            "tensor_model_parallel_size": tensor_model_parallel_size,
            "pipeline_model_parallel_size": pipeline_model_parallel_size,
            "decode_context_parallel_size": decode_context_parallel_size,
            "dcp_layout": dcp_layout,
            "expert_model_parallel_size": expert_model_parallel_size,
            "expert_tensor_parallel_size": expert_tensor_parallel_size,
        }
        kind = "a live model" if self._live else "a checkpoint"
        assert torch.distributed.group.WORLD is not None
        same_on_all(kind, torch.distributed.group.WORLD, "the kind of model")
        path = None
        if isinstance(model, torch.nn.Module):
            bare, vocab_size = on_all_ranks(attach, model, vocab_size)
            initialize_groups(sizes)
            self.model, context, eos = model, bare.max_sequence_length, set()
        else:
            path = os.fspath(model)
            device = default_device() if device is None else device
            self.model, config = load_checkpoint(path, sizes, DTYPES[dtype or "float32"], device)
            context, vocab_size, eos = config.max_position_embeddings, config.vocab_size, set(config.eos_token_ids)
        self.tokenizer = tokenizer = on_all_ranks(find_tokenizer, tokenizer, path)
        if getattr(tokenizer, "eos_token_id", None) is not None:
            eos.add(tokenizer.eos_token_id)
        self.groups = parallel_state.get_process_group_collection()
        on_all_ranks(self.engine_config.exchange_for, self.groups.dcp_layout)  # now, not at the first call
        parameter = next(self.model.parameters())
        self._device = parameter.device
        settings = {"cache": self.cache_config, "engine": self.engine_config, "dtype": parameter.dtype}
        settings["vocab_size"] = vocab_size
        pairs = [(name, str(value)) for name, value in settings.items()]
        same_on_all(pairs, self.groups.dcp_replica, "the settings of the LLM")
        self.layout = KVLayout(
            dcp_size=self.groups.dcp.size(),
            interleave=self.cache_config.kv_interleave_size,
            block_size=self.cache_config.block_size,
        )
        self.prompt_reader = PromptReader(
            vocab_size=vocab_size,
            max_sequence_length=context,
            eos_token_ids=sorted(eos) if eos_token_ids is None else eos_token_ids,
            tokenizer=tokenizer,
        )
        self._link = Link(self.groups.dcp_replica, self.groups.dcp_driver, self.metrics)
        self._follower = None if self.is_driver else Follower(self._make_runner, self._link)
        self._engine = None
        if self.is_driver:
            self._engine = Engine(
                self._make_runner,
                self.layout,
                self.cache_config,
                self.engine_config,
                Sampler(vocab_size),
                self._link,
                tokenizer=tokenizer,
                metrics=self.metrics,
                tell_outcomes=self._tell_outcomes,
            )
        self._ready()

    @property
    def is_driver(self) -> bool:
        """Whether this rank schedules and samples for its replica."""
        return self._link.is_driver

    @property
    def runner(self) -> Any:
        """The `ModelRunner` with its KV pool (``runner.kv_bytes``); ``None`` before the first prompt."""
        return self._engine.runner if self._engine is not None else self._follower and self._follower.runner

    def stats(self) -> EngineStats:
        """What the engine has done so far, and does now. ``ValueError`` on ranks other than the driver."""
        return self._driven("stats()").stats()

    def weights_changed(self) -> None:
        """Forget all keys and values computed so far, because the model's weights are others now.

        ``ValueError`` while requests run.
        """
        if self._engine is not None:
            if self._engine.has_work:
                raise ValueError("the weights cannot change while requests run; wait for them, or abort them")
            self._engine.weights_changed()

    def _ready(self) -> None:
        """Called at the end of the constructor."""

    def _driven(self, what: str) -> Engine:
        """The engine; ``ValueError`` where this rank has none."""
        if self._engine is None:
            ranks = torch.distributed.get_process_group_ranks(self.groups.dcp_replica)
            raise ValueError(
                f"{what} is for the driver of the replica, rank {ranks[self.groups.dcp_driver]}; this is rank "
                f"{torch.distributed.get_rank()}: ask is_driver first"
            )
        return self._engine

    def _piece(self, text: StopStrings | None, sampled: Sampled) -> str:
        """What a token adds to the text of its request."""
        if text is None:
            return ""
        request, tokens = sampled.request, [sampled.token]
        piece = text.push(self._said(request, tokens) if sampled.last else tokens)[0]
        return piece + text.finish() if sampled.last else piece

    def _output(self, request: Request) -> RequestOutput:
        assert request.finish_reason is not None
        stops = self._text(request)
        text = None
        if stops is not None:
            text = stops.push(self._said(request, request.token_ids))[0] + stops.finish()
        return RequestOutput(
            index=request.place,
            sample=request.sample,
            prompt_token_ids=request.prompt,
            token_ids=request.token_ids,
            text=text,
            finish_reason=request.finish_reason,
            logprobs=request.logprobs if request.params.logprobs else None,
            prompt_logprobs=[None, *request.prompt_logprobs] if request.params.prompt_logprobs else None,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _text(self, request: Request) -> StopStrings | None:
        """What turns the request's tokens into text; ``None`` without a tokenizer."""
        if self.tokenizer is None:
            return None
        params = request.params
        return StopStrings(self.tokenizer, request.prompt, params.stop, min_tokens=params.min_tokens)

    def _said(self, request: Request, tokens: list[int]) -> list[int]:
        """The last of its tokens, without the end-of-text that ended it: not every tokenizer knows it to be special."""
        ended = request.finish_reason == "stop" and tokens[-1] in self.prompt_reader.eos_token_ids
        return tokens[:-1] if ended else tokens

    def _make_runner(self, num_blocks: int | None) -> Runner:
        runner = ModelRunner(
            self.model,
            self.groups,
            cache=self.cache_config if num_blocks is None else replace(self.cache_config, num_blocks=num_blocks),
            engine=self.engine_config,
            vocab_size=self.prompt_reader.vocab_size,
            max_sequence_length=self.prompt_reader.max_sequence_length,
            metrics=self.metrics,
        )
        report_startup(runner)
        return runner


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Every module in eval mode inside the block; afterwards those that trained, and only those, train again."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
