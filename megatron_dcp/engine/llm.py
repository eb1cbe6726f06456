"""``LLM``: prompts in, tokens and text out, on every rank of a replica at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from megatron_dcp.comm.consensus import agree, same_on_all
from megatron_dcp.engine.core import Sampled
from megatron_dcp.engine.follower import Follower
from megatron_dcp.engine.front import Front, eval_mode
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.prompts import Prompt, fingerprint
from megatron_dcp.engine.request import Request, RequestOutput
from megatron_dcp.engine.wire import Outcome


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


class LLM(Front):
    """A Megatron model that generates, with the KV cache of every sequence sharded over the DCP group.

    SPMD: every rank of a replica (tp x dcp) makes the same calls with the same arguments and gets the same results;
    replicas are independent of each other. From a checkpoint, under torchrun or in a single process::

        llm = LLM("checkpoint", tensor_model_parallel_size=2, decode_context_parallel_size=2)
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.text)

    From a live model, e.g. between training steps: ``LLM(model, decode_context_parallel_size=2)`` shares its parameters
    and attaches to the groups that Megatron has.

    Arguments and errors: see `Front`.
    """

    _tell_outcomes = True
    _busy = False

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[int, int, str], None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue every prompt.

        Args:
            prompts: Text, a list of token ids, or a list of such; lengths may differ.
            sampling_params: One for all prompts or one for each; default: greedy, up to 128 tokens.
            on_token: Called as ``on_token(index, token_id, text)`` for every token as it comes, see `Token`. On every
                rank, at the same places between the steps.
            progress: Show a bar of finished samples, on the driver of the replica.

        Returns:
            An output for each sample of each prompt, in the order of the prompts, the same on every rank.

        Raises:
            ValueError: On every rank and before anything has run: a prompt that the model or the pool cannot take,
                or prompts and parameters that differ between ranks. During the run: logits that are not finite.
            RuntimeError: The driver left the call with an exception of ``on_token`` that this rank does not have.
        """
        requests = self._read(prompts, sampling_params)
        with closing(self._run(requests)) as run, self._bar(len(requests), progress) as finished_one:
            texts = {request: self._text(request) for request in requests} if on_token is not None else {}
            for sampled in run:
                if on_token is not None:
                    request = sampled.request
                    on_token(request.index, sampled.token, self._piece(texts[request], sampled))
                if sampled.last:
                    finished_one()
        return [self._output(request) for request in requests]

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Token]:
        """As `generate`, but hands out every token as it comes: ``for index, token_id, text in llm.stream(...)``.

        The prompts are checked in the call itself. Every rank iterates to the same place, where it may also communicate
        with the others; leaving the loop early ends the generation. The model is in eval mode until then.
        """
        return self._tokens(self._read(prompts, sampling_params))

    def weights_changed(self) -> None:
        """As `Front.weights_changed`; every call with a live model does it by itself."""
        self._check_idle()
        super().weights_changed()

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

    def _check_idle(self) -> None:
        if self._busy:
            raise ValueError("a generation of this LLM is still running; finish or close its iterator first")

    def _tokens(self, requests: list[Request]) -> Iterator[Token]:
        texts = {request: self._text(request) for request in requests}
        with closing(self._run(requests)) as run:
            for sampled in run:
                request = sampled.request
                yield Token(request.index, sampled.token, self._piece(texts[request], sampled))

    def _run(self, requests: list[Request]) -> Generator[Sampled, None, None]:
        """Run the requests and yield every token, on every rank at the same place: after the next step is announced."""
        self._check_idle()
        if not requests:
            return
        self._busy = True
        try:
            with eval_mode(self.model):
                yield from self._drive(requests) if self.is_driver else self._follow(requests)
        finally:
            self._busy = False

    def _drive(self, requests: list[Request]) -> Generator[Sampled, None, None]:
        engine = self._driven("a run")
        try:
            if self._live:  # it may have been trained since
                engine.weights_changed()
            engine.add(requests)
            sampled: list[Sampled] = []
            while engine.has_work:
                engine.plan()
                yield from sampled
                sampled = engine.compute()
            engine.end()
            yield from sampled
        except GeneratorExit:
            engine.end()
            raise
        except Exception as error:
            engine.fail(error)
            raise
        finally:
            engine.clear()

    def _follow(self, requests: list[Request]) -> Generator[Sampled, None, None]:
        assert isinstance(self._follower, Follower)
        by_index = {request.index: request for request in requests}
        messages = self._follower.follow()
        try:
            for outcomes in messages:
                for outcome in outcomes:
                    yield from _apply(outcome, by_index[outcome.request])
        except GeneratorExit:
            for _ in messages:  # the driver ends the run where it leaves it
                pass
            raise
        if any(request.finish_reason is None for request in requests):
            raise RuntimeError(
                "the driver of this replica left the generation before its end, most likely with an error of its own; "
                "look for it in that rank's log"
            )

    @contextmanager
    def _bar(self, total: int, progress: bool) -> Iterator[Callable[[], object]]:
        """What counts a finished sample."""
        if progress and self.is_driver:
            from tqdm import tqdm

            with tqdm(total=total, desc="generate", unit="sample") as bar:
                yield bar.update
        else:
            yield lambda: None


def _apply(outcome: Outcome, request: Request) -> Iterator[Sampled]:
    """Write to a follower's own copy of a request what a step brought it."""
    request.prompt_logprobs += outcome.prompt_logprobs
    request.token_ids += outcome.tokens
    request.logprobs += outcome.logprobs
    request.finish_reason = outcome.finish_reason
    request.num_cached_tokens = outcome.num_cached_tokens
    end = len(outcome.tokens) if outcome.finish_reason is not None else 0
    for number, (token, logprob) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True), 1):
        yield Sampled(request, token, logprob, number == end)
