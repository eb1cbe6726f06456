"""``LLM``: prompts in, tokens and text out, on every rank of a replica at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megatron_dcp import parallel_state
from megatron_dcp._cpu import default_device
from megatron_dcp.cache import KVLayout
from megatron_dcp.checkpoint import load_tokenizer
from megatron_dcp.comm.consensus import agree, same_on_all
from megatron_dcp.config import CacheConfig, DcpLayout, DtypeName, EngineConfig, check_choice
from megatron_dcp.distributed import initialize_distributed
from megatron_dcp.engine.core import Engine, Runner
from megatron_dcp.engine.loading import initialize_groups, load_checkpoint, on_all_ranks
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.prompts import Prompt, PromptReader, fingerprint
from megatron_dcp.engine.request import Request, RequestOutput
from megatron_dcp.engine.results import Decider
from megatron_dcp.engine.runner import ModelRunner
from megatron_dcp.engine.sampler import Sampler
from megatron_dcp.engine.stops import StopStrings
from megatron_dcp.layers import enable_dcp
from megatron_dcp.metrics import Metrics

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Token(NamedTuple):
    """One generated token as it comes.

    Attributes:
        index: Place of its output in what `generate` returns: that of the prompt in the call, where ``n`` is 1.
        token_id: The token.
        text: What it adds to the text: empty while a character is not complete, for an end-of-text token, and without a
            tokenizer.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody wants of a token
    token_id: int
    text: str


class LLM:
    """A Megatron model that generates, with the KV cache of every sequence sharded over the DCP group.

    SPMD: every rank of a replica (tp x dcp) makes the same calls with the same arguments and gets the same results;
    replicas are independent of each other. From a checkpoint, under torchrun or in a single process::

        llm = LLM("checkpoint", tensor_model_parallel_size=2, decode_context_parallel_size=2)
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.text)

    From a live model, e.g. between training steps: ``LLM(model, decode_context_parallel_size=2)`` shares its parameters
    and attaches to the groups that Megatron has.

    Args:
        model: Directory of a checkpoint in any format that `megatron_dcp.load_model` reads, or a Megatron
            ``GPTModel``, bare or wrapped.
        tensor_model_parallel_size: ``None``: that of the existing groups, else 1.
        pipeline_model_parallel_size: Stages that the layers are cut into, one after the other; as for tp.
        decode_context_parallel_size: Ranks that share a sequence's KV cache. ``None``: that of the existing groups,
            else 1.
        dcp_layout: ``orthogonal`` or ``within_tp``. ``None``: that of the existing groups, else ``orthogonal``.
        expert_model_parallel_size: Ranks that the experts of a mixture of experts are dealt out over; they are among
            the ranks of one replica. ``None``: that of the existing groups, else 1.
        expert_tensor_parallel_size: Ranks that split one expert. ``None``: that of the existing groups, else tp.
        cache: How the KV cache is cut, and its size. Without a size the pool is made at the first call, as large as the
            largest batch of that call needs, and made anew where a later call needs more.
        engine: Batch size, prefill chunk, exchange, back end.
        dtype: dtype of weights and cache of a checkpoint, default ``float32``; a live model keeps its own.
        device: Of a checkpoint's model; default: the current GPU, else the CPU.
        tokenizer: Has ``encode`` and ``decode``. Default: the checkpoint's, if it has one.
        vocab_size: Tokens of a live model that exist; default: all rows of its embedding, padding included.
        eos_token_ids: Tokens that end a text; default: the checkpoint's and the tokenizer's.
        timeout_s: Seconds after which a collective that another rank never joins fails; only where this call
            initialises ``torch.distributed``.
        metrics: Counts collectives and bytes.

    Raises:
        ValueError: On every rank: a broken checkpoint, sizes that do not fit, arguments that contradict each other.
    """

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
        self.cache_config = cache or CacheConfig()
        self.engine_config = engine or EngineConfig()
        self.metrics = metrics
        self._busy = False
        sizes = {
            "tensor_model_parallel_size": tensor_model_parallel_size,
            "pipeline_model_parallel_size": pipeline_model_parallel_size,
            "decode_context_parallel_size": decode_context_parallel_size,
            "dcp_layout": dcp_layout,
            "expert_model_parallel_size": expert_model_parallel_size,
            "expert_tensor_parallel_size": expert_tensor_parallel_size,
        }
        initialize_distributed(timeout_s)
        if isinstance(model, torch.nn.Module):
            _refuse("a live model keeps its own", dtype=dtype, device=device)
            self._live = True
            bare = enable_dcp(model)
            initialize_groups(sizes)
            self.model, context, eos = model, bare.max_sequence_length, set()
            vocab_size = bare.vocab_size if vocab_size is None else vocab_size
        else:
            self._live = False
            _refuse("a checkpoint states its own", vocab_size=vocab_size)
            check_choice("dtype", dtype or "float32", tuple(DTYPES))
            path = os.fspath(model)
            self.model, config = load_checkpoint(path, sizes, DTYPES[dtype or "float32"], device or default_device())
            context, vocab_size, eos = config.max_position_embeddings, config.vocab_size, set(config.eos_token_ids)
            tokenizer = tokenizer or on_all_ranks(load_tokenizer, path)
        self.tokenizer = tokenizer
        if getattr(tokenizer, "eos_token_id", None) is not None:
            eos.add(tokenizer.eos_token_id)
        self.groups = parallel_state.get_process_group_collection()
        self.engine_config.exchange_for(self.groups.dcp_layout)  # now, not at the first call
        dtype_of_model = next(self.model.parameters()).dtype
        settings = {"cache": self.cache_config, "engine": self.engine_config, "dtype": dtype_of_model}
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
        self._engine = Engine(
            self._make_runner,
            self.layout,
            self.cache_config,
            self.engine_config,
            Decider(Sampler(vocab_size), self.groups.dcp_replica, metrics),
            tokenizer,
        )

    @property
    def runner(self) -> Any:
        """The `ModelRunner` with its KV pool (``runner.pool.bytes``); ``None`` before the first call of `generate`."""
        return self._engine.runner

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[int, int, str], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt.

        Args:
            prompts: Text, a list of token ids, or a list of such; lengths may differ.
            sampling_params: One for all prompts or one for each; default: greedy, up to 128 tokens.
            on_token: Called as ``on_token(index, token_id, text)`` for every token as it comes, see `Token`. On every
                rank; an exception on one rank alone leaves the others waiting until their time limit.

        Returns:
            An output for each sample of each prompt, in the order of the prompts, the same on every rank.

        Raises:
            ValueError: On every rank and before anything has run: a prompt that the model or the pool cannot take,
                or prompts and parameters that differ between ranks. During the run: logits that are not finite.
        """
        requests = self._read(prompts, sampling_params)
        if on_token is None:
            for _ in self._run(requests):
                pass
        else:
            for token in self._tokens(requests):
                on_token(*token)
        return [self._output(request) for request in requests]

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Token]:
        """As `generate`, but hands out every token as it comes: ``for index, token_id, text in llm.stream(...)``.

        The prompts are checked in the call itself. Every rank iterates to the same place; leaving the loop early ends
        the generation. The model is in eval mode until then.
        """
        return self._tokens(self._read(prompts, sampling_params))

    def _read(self, prompts: Any, sampling_params: Any) -> list[Request]:
        """The requests, checked, and the same on every rank of the replica."""
        group = self.groups.dcp_replica
        requests, error = [], None
        try:
            self._check_idle()
            requests = self.prompt_reader.read(prompts, sampling_params)
        except Exception as caught:  # also what a tokenizer raises: all ranks have to hear of it
            error = caught
        agree(error, group)
        same_on_all(fingerprint(requests), group, "prompts and sampling parameters")
        return requests

    def _run(self, requests: list[Request]) -> Generator[tuple[Request, int], None, None]:
        """Run the requests and yield every token as it is sampled."""
        self._check_idle()
        self._busy = True
        try:
            with _eval_mode(self.model):
                if self._live:  # it may have been trained since
                    self._engine.weights_changed()
                self._engine.add(requests)
                while self._engine.has_work:
                    yield from self._engine.step()
        finally:
            self._busy = False
            self._engine.clear()

    def _check_idle(self) -> None:
        if self._busy:
            raise ValueError("a generation of this LLM is still running; finish or close its iterator first")

    def _tokens(self, requests: list[Request]) -> Iterator[Token]:
        texts = {request: self._text(request) for request in requests} if self.tokenizer is not None else {}
        with closing(self._run(requests)) as run:
            for request, token in run:
                text = ""
                if request in texts:
                    text = texts[request].push(self._said(request, [token]))[0]
                    text += texts[request].finish() if request.finish_reason else ""
                yield Token(request.index, token, text)

    def _output(self, request: Request) -> RequestOutput:
        assert request.finish_reason is not None
        text = None
        if self.tokenizer is not None:
            stops = self._text(request)
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

    def _text(self, request: Request) -> StopStrings:
        params = request.params
        return StopStrings(self.tokenizer, request.prompt, params.stop, min_tokens=params.min_tokens)

    def _said(self, request: Request, tokens: list[int]) -> list[int]:
        """The last of its tokens, without the end-of-text that ended it: not every tokenizer knows it to be special."""
        ended = request.finish_reason == "stop" and tokens[-1] in self.prompt_reader.eos_token_ids
        return tokens[:-1] if ended else tokens

    def _make_runner(self, num_blocks: int | None) -> Runner:
        return ModelRunner(
            self.model,
            self.groups,
            cache=self.cache_config if num_blocks is None else replace(self.cache_config, num_blocks=num_blocks),
            engine=self.engine_config,
            vocab_size=self.prompt_reader.vocab_size,
            max_sequence_length=self.prompt_reader.max_sequence_length,
            metrics=self.metrics,
        )


def _refuse(why: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} cannot be given: {why}; leave it out")


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Every module in eval mode inside the block; afterwards those that trained, and only those, train again."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
