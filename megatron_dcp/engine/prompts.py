"""From what a caller passes to requests: every check that a prompt has to pass before anything runs. No torch."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.request import Request

Prompt = str | Sequence[int]
_SHOWN = 80  # characters of a prompt in an error
_NO_PROMPT = (bytes, Mapping, Set)  # they can be iterated over, but hold no tokens, or none in order


@dataclass(frozen=True, kw_only=True)
class PromptReader:
    """What the prompts of one model may look like.

    Attributes:
        vocab_size: Tokens that exist.
        max_sequence_length: The model's context, in tokens.
        eos_token_ids: Tokens that end a text.
        tokenizer: Has ``encode(text) -> list[int]``; ``None``: only token ids are taken.
    """

    vocab_size: int
    max_sequence_length: int
    eos_token_ids: Sequence[int] = ()
    tokenizer: Any = None

    def read(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """The requests, ``n`` for each prompt, in the order of the prompts.

        Raises:
            ValueError: Naming the first prompt that the model cannot take, the bound and the remedy.
        """
        listed = _as_list(prompts)
        requests: list[Request] = []
        for place, (prompt, own) in enumerate(zip(listed, _one_each(params, len(listed)), strict=True)):
            leader = self._request(place, prompt, own)
            requests.append(leader)
            for sample in range(1, own.n):
                own_lists: dict[str, Any] = dict(token_ids=[], logprobs=[], prompt_logprobs=[])
                requests.append(replace(leader, sample=sample, leader=leader, **own_lists))
        for index, request in enumerate(requests):
            request.index = index
        return requests

    def _request(self, index: int, prompt: Any, params: SamplingParams) -> Request:
        tokens = self._tokens(index, prompt)
        context = self.max_sequence_length
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"prompt {index} has stop strings, but the model came without a tokenizer; use stop_token_ids"
            )
        if not tokens:
            raise ValueError(f"prompt {index} has 0 tokens; give at least one")
        if len(tokens) > context:
            raise ValueError(
                f"prompt {index} has {len(tokens)} tokens, but the model's context is {context}; shorten it, or use a "
                "model with a longer context"
            )
        for place, token in enumerate(tokens):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"prompt {index} has token id {_shown(token)} at place {place}, but the model has the ids 0 to "
                    f"{self.vocab_size - 1}; encode it with the tokenizer that belongs to the model"
                )
        stop = set(params.stop_token_ids)
        return Request(
            index=index,
            place=index,
            prompt=tokens,
            params=params,
            # A prompt that fills the context still gets the token that follows it: that one is never fed back.
            max_tokens=min(params.max_tokens, max(1, context - len(tokens))),
            stop_ids=frozenset(stop if params.ignore_eos else stop.union(self.eos_token_ids)),
        )

    def _tokens(self, index: int, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"prompt {index} is text, but the model came without a tokenizer; give token ids")
            check_text(prompt, f"prompt {index}")
            return list(self.tokenizer.encode(prompt))
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if isinstance(prompt, _NO_PROMPT) or not isinstance(prompt, Iterable):
            raise ValueError(f"prompt {index} is {_short(prompt)}; give text or a list of token ids")
        tokens = list(prompt)
        try:
            if any(isinstance(token, bool) for token in tokens):
                raise TypeError
            return [operator.index(token) for token in tokens]
        except TypeError:
            raise ValueError(f"prompt {index} is not a list of whole numbers; give text or token ids") from None


def check_text(text: str, what: str) -> None:
    """Raise ``ValueError`` if ``text`` holds half of a surrogate pair, which is no character and has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has the lone surrogate {text[error.start]!r} at place {error.start}, which is no character; "
            "remove it, or write both halves of the pair"
        ) from None


def fingerprint(requests: Sequence[Request]) -> tuple[tuple[str, str], ...]:
    """What `same_on_all` compares: pairs of a name and a text, which differ wherever the requests do."""
    parts = [("number of prompts", str(len(requests)))]
    for request in requests:
        tokens = repr(request.prompt)
        if len(tokens) > _SHOWN:
            tokens = f"{len(request.prompt)} tokens with SHA-256 {hashlib.sha256(tokens.encode()).hexdigest()}"
        parts.append((f"prompt {request.place}", tokens))
        rest = (request.params, request.max_tokens, sorted(request.stop_ids))
        parts.append((f"sampling parameters of prompt {request.place}", repr(rest)))
    return tuple(parts)


def _shown(token: int) -> str:
    # Python refuses to write numbers of more than some thousand digits.
    return str(token) if token.bit_length() <= 64 else f"of {token.bit_length()} bits"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _as_list(prompts: Any) -> list[Any]:
    """``prompts`` as a list, also where it is a single text or a single list of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, _NO_PROMPT) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={_short(prompts)} must be text, a list of token ids, or a list of such")
    listed = list(prompts)
    if listed and all(hasattr(item, "__index__") and not hasattr(item, "__len__") for item in listed):
        return [listed]
    return listed


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    wrong = (
        [item for item in params if not isinstance(item, SamplingParams)] if isinstance(params, Sequence) else [params]
    )
    if wrong:
        raise ValueError(
            f"sampling_params must be SamplingParams or a list of them, not {_short(wrong[0])}; "
            "write them as in SamplingParams(max_tokens=3)"
        )
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts; give one for all, or one for each")
    return params
