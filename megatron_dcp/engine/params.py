"""How a request wants its tokens chosen. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_dcp.config import check_at_least, check_flag

LARGEST_BIAS = 1e9
LARGEST_SEED = 2**63 - 1
MOST_SAMPLES = 2**16


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends. The defaults decode greedily.

    The logits of a step pass, in this order, through ``logit_bias``, the three penalties, ``min_tokens``,
    ``temperature``, ``top_k``, ``top_p`` and ``min_p``. Every value is hashable and prints the same in every process.

    Attributes:
        max_tokens: Most tokens to generate. A sequence also ends where the model's context ends.
        min_tokens: Tokens to generate before the sequence may end: until then no end-of-text or stop token is chosen,
            and no stop string ends it.
        n: Samples of the same prompt, each with random numbers of its own; at most 65536.
        temperature: Logits are divided by it; 0 is greedy (of equal logits the lowest token id wins).
        top_k: Only the ``top_k`` most likely tokens can be drawn (of equals the lowest ids); 0 for no limit.
        top_p: Only the smallest set of most likely tokens whose probability reaches ``top_p`` can be drawn; applied
            after ``top_k``, on the distribution that it leaves.
        min_p: Only tokens that are at least ``min_p`` times as likely as the most likely one can be drawn; 0 for all.
        repetition_penalty: The logits of tokens of the prompt and the output are divided by it where they are positive
            and multiplied where not; above 1 it discourages repetition (Keskar et al. 2019, arXiv:1909.05858).
        presence_penalty: Taken from the logit of every token that the output holds already.
        frequency_penalty: Taken from the logit of a token as often as the output holds it already.
        logit_bias: Token id to what is added to its logit; -1e9 forbids a token. Kept as a tuple of pairs in the order
            of the ids.
        seed: Seed of this request's own random numbers: with it, a request draws the same tokens alone or in any
            batch. ``None`` draws a new seed each time. Means nothing to greedy decoding.
        stop: Strings that end the sequence; the text ends before the first of them. One string is taken as a list of
            one.
        stop_token_ids: Tokens that end the sequence, besides the model's end-of-text tokens.
        ignore_eos: Do not end at the model's end-of-text tokens.
        logprobs: Also return the log-probability of every generated token; those of other tokens are not to be had.
        prompt_logprobs: Also return the log-probability of every token of the prompt but the first.
        cache_salt: Cached prefixes are shared only between requests of the same salt: name what else the keys depend
            on, as an adapter does, or who may see that a prefix is known.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    cache_salt: str = ""

    def __post_init__(self) -> None:
        self._check_numbers()
        check_flag("ignore_eos", self.ignore_eos)
        only_chosen = "; there are no log-probabilities of the top k tokens, only that of the token itself"
        check_flag("logprobs", self.logprobs, only_chosen)
        check_flag("prompt_logprobs", self.prompt_logprobs, only_chosen)
        for name, value in (
            ("logit_bias", _bias(self.logit_bias)),
            ("stop", _stop_strings(self.stop)),
            ("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids)),
        ):
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without chance."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether what came before changes the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def _check_numbers(self) -> None:
        check_at_least("max_tokens", self.max_tokens, 1)
        check_at_least("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower the one or raise the other"
            )
        check_at_least("n", self.n, 1)
        if self.n > MOST_SAMPLES:
            raise ValueError(f"n={self.n} must be at most {MOST_SAMPLES}; give the prompt several times for more")
        check_at_least("top_k", self.top_k, 0)
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature!r} must be a finite number >= 0; 0 is greedy")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} must be a number in (0, 1]; 1 keeps all tokens")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p!r} must be a number in [0, 1]; 0 keeps all tokens")
        if not _is_number(self.repetition_penalty) or not 0.01 <= self.repetition_penalty <= 100:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty!r} must be a number in [0.01, 100]; 1 changes nothing"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -2 <= value <= 2:
                raise ValueError(f"{name}={value!r} must be a number in [-2, 2]; 0 changes nothing")
        if not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt={self.cache_salt!r} must be a string; leave it out for none")
        if self.seed is not None:
            check_at_least("seed", self.seed, 0)
            if self.seed > LARGEST_SEED:
                raise ValueError(f"seed={self.seed} must be below 2**63")


def _bias(bias: Mapping[int, float] | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    try:
        pairs = dict(bias)
    except (TypeError, ValueError):
        raise ValueError(
            f"logit_bias={bias!r} must map token ids to numbers, as in {{17: -1.5}}; leave it out for none"
        ) from None
    for token, value in pairs.items():
        check_at_least("a token id of logit_bias", token, 0)
        if not _is_number(value) or not abs(value) <= LARGEST_BIAS:
            raise ValueError(
                f"logit_bias={value!r} of token {token} must be a number in [-1e9, 1e9]; -1e9 forbids a token"
            )
    return tuple(sorted((token, float(value)) for token, value in pairs.items()))


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _as_tuple("stop", stop, "strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop={stop!r} must hold strings of at least one character; leave it out for none")
    return strings


def token_ids(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """``values`` as a tuple; ``ValueError`` naming the argument ``name`` unless they are token ids."""
    if isinstance(values, str | bytes | Mapping):
        raise ValueError(f"{name}={values!r} must be a list of token ids, as in [2]")
    tokens = _as_tuple(name, values, "token ids")
    for token in tokens:
        check_at_least(f"a token id of {name}", token, 0)
    return tokens


def _as_tuple(name: str, values: Iterable, kind: str) -> tuple:
    try:
        return tuple(values)
    except TypeError:
        raise ValueError(f"{name}={values!r} must be a list of {kind}; leave it out for none") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
