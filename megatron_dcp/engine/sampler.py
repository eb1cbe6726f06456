"""From logits to tokens, in one process for the whole replica.

Shapes: ``R`` rows of logits, ``V`` tokens of the vocabulary, ``C`` tokens that may be drawn.

Only the driver of a replica chooses; the other ranks are told. So they hold the same tokens even where their logits
differ in the last bit, and never part ways.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.engine.batch import Entry, Result
from megatron_dcp.engine.params import SamplingParams
from megatron_dcp.engine.request import Request

SHORTLIST = 256  # tokens that hold top_p of the probability most of the time
SCORED_ROWS = 256  # rows whose log-probabilities are worked out at once; bounds the work space


def choose(logits_V: Tensor, params: SamplingParams, draw: float) -> Tensor:
    """The token that a uniform random number stands for, by the inverse of the distribution function.

    In fp64: temperature, then top-k, then top-p on the distribution that top-k leaves, then min-p. Nothing here depends
    on other rows of a batch. Of equally likely tokens the lower id comes first.

    Args:
        logits_V: Finite peak; ``-inf`` never comes out.
        params: ``temperature > 0``.
        draw: In ``[0, 1)``, a multiple of 2**-53.

    Returns:
        Token id, int64, 0-dim, on the device of the logits.
    """
    ids_C = None
    if params.top_k:
        logits_V, ids_C = (x_C[: params.top_k] for x_C in _sorted_top(logits_V, params.top_k))
    prob_C = torch.softmax((logits_V.double() - logits_V.max()) / params.temperature, dim=0)
    if params.top_p < 1:
        prob_C, order_C = _nucleus(prob_C, params.top_p)
        ids_C = order_C if ids_C is None else ids_C[order_C]
    if params.min_p:
        prob_C = prob_C.masked_fill(prob_C < params.min_p * prob_C.max(), 0.0)
    index = _invert(prob_C, draw)
    return index if ids_C is None else ids_C[index]


def _nucleus(prob_V: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens in falling order, 0 where those before have reached ``top_p``; and their ids."""
    for count in (SHORTLIST, prob_V.numel()):
        prob_C, ids_C = _sorted_top(prob_V, count)
        kept_C = prob_C.cumsum(0) - prob_C < top_p
        if not kept_C[-1]:
            break  # else the nucleus may reach beyond the shortlist
    return prob_C * kept_C, ids_C


def _sorted_top(values_V: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest and all that equal the least of them, in falling order, equals by rising id; and ids."""
    if count >= values_V.numel():
        return torch.sort(values_V, descending=True, stable=True)
    ids_C = (values_V >= torch.topk(values_V, count).values[-1]).nonzero().squeeze(1)
    values_C, order_C = torch.sort(values_V[ids_C], descending=True, stable=True)
    return values_C, ids_C[order_C]


def _invert(prob_C: Tensor, draw: float) -> Tensor:
    """First index with any probability at which the cumulated one, made to end at 1, exceeds ``draw``.

    There always is one: ``draw <= 1 - 2**-53``, and that times a number rounds to less than the number. Parallel sums
    need not rise monotonically, so this is no binary search.
    """
    cumulated_C = prob_C.cumsum(0).masked_fill(prob_C == 0, 0.0)
    return (cumulated_C > cumulated_C.max() * draw).to(torch.uint8).argmax()


def uniform(seed: int, sample: int, position: int) -> float:
    """Random number in ``[0, 1)``, a multiple of 2**-53, for one output position of one sample.

    Counter-based (BLAKE2b of the three numbers): no state, so it does not matter what was drawn before.
    """
    digest = hashlib.blake2b(struct.pack("<3Q", seed, sample, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def logprobs_of(logits_BV: Tensor, token_B: Tensor) -> Tensor:
    """Log-probability of one token per row under the unmodified logits, fp32, natural log."""
    logits_BV = logits_BV.float()
    return logits_BV.gather(1, token_B.unsqueeze(1)).squeeze(1) - logits_BV.logsumexp(dim=1)


class Sampler:
    """Chooses the next tokens of every sampled sequence.

    A request gets the same tokens alone and in any batch, with and without drafts, and after a preemption: its random
    numbers depend on its seed, its ``sample`` and the position in its output, its penalties on its tokens.

    Args:
        vocab_size: Tokens that exist, and columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._seeds: dict[Request, int] = {}
        self._shapers: dict[Request, _Shaper] = {}

    def check(self, params: SamplingParams) -> None:
        """Raise ``ValueError`` if ``params`` name tokens that do not exist."""
        for token in dict(params.logit_bias):
            if token >= self.vocab_size:
                raise ValueError(f"logit_bias names token {token}; the vocabulary ends at {self.vocab_size - 1}")

    def sample(self, logits_RV: Tensor, entries: Sequence[Entry]) -> list[Result]:
        """Next tokens and the log-probabilities that were asked for (else NaN).

        Drafts are verified exactly: each row's token is chosen as if nothing had been drafted, and a draft is accepted
        as long as it equals the token chosen.

        Args:
            logits_RV: fp32; the rows of the entries one after the other, see `Entry`.
            entries: What is wanted of the rows. All tokens of a result must be appended to the request, in this order,
                before it is sampled again.

        Returns:
            A result for each entry; one with an ``error`` where a row has no finite maximum (a NaN or an infinity among
            its logits), or ``min_tokens`` leaves a request no token.
        """
        if not entries:
            return []
        likeliest = _likeliest(logits_RV)
        chosen: list[list[int] | ValueError] = []
        scored: list[tuple[int, int]] = []  # row, token
        row = 0
        for entry in entries:
            end = row + entry.num_logits
            try:
                tokens = self._tokens(logits_RV, likeliest, row, entry)
            except ValueError as error:
                chosen.append(error)
            else:
                chosen.append(tokens)
                scored += enumerate(entry.prompt_targets, row)
                if entry.request.params.logprobs:
                    scored += enumerate(tokens, row + len(entry.prompt_targets))
            row = end
        assert row == len(likeliest), (row, len(likeliest))
        scores = _scores(logits_RV, scored)
        return [_result(entry, tokens, scores) for entry, tokens in zip(entries, chosen, strict=True)]

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        self._seeds.pop(request, None)
        self._shapers.pop(request, None)

    def _tokens(self, logits_RV: Tensor, likeliest: list[int | None], row: int, entry: Entry) -> list[int]:
        """The tokens of an entry whose first row of logits is ``row``; ``ValueError`` where there are none."""
        if None in likeliest[row : row + entry.num_logits]:
            request = entry.request
            raise ValueError(
                f"the logits of prompt {request.place} hold NaN or infinity after {request.num_tokens} tokens; look "
                "for broken weights in the checkpoint, or use dtype float32 or bfloat16 where float16 overflows"
            )
        return self._decide(logits_RV, likeliest, row + len(entry.prompt_targets), entry) if entry.sample else []

    def _decide(self, logits_RV: Tensor, likeliest: list[Any], row: int, entry: Entry) -> list[int]:
        """The accepted drafts of an entry and the token after them; ``row`` decides the first."""
        request, params = entry.request, entry.request.params
        position = len(request.token_ids)
        shaped = params.penalises or params.logit_bias or position < params.min_tokens
        if params.greedy and not shaped and not entry.draft:
            return [likeliest[row]]
        shaper = self._shaper(request, logits_RV.device) if shaped else None
        tokens: list[int] = []
        for drafted in (*entry.draft, None):
            if params.greedy and not shaper:
                token = likeliest[row]
            else:
                logits_V = shaper.shape(logits_RV[row], position) if shaper else logits_RV[row]
                token = int(self._choose(logits_V, request, position))
            tokens.append(token)
            if token != drafted:
                break
            if shaper:
                shaper.add([token])
            row, position = row + 1, position + 1
        return tokens

    def _choose(self, logits_V: Tensor, request: Request, position: int) -> Tensor:
        params = request.params
        if params.greedy:
            return logits_V.max(dim=0).indices
        seed = params.seed
        if seed is None:
            seed = self._seeds.setdefault(request, secrets.randbits(63))
        return choose(logits_V, params, uniform(seed, request.sample, position))

    def _shaper(self, request: Request, device: torch.device) -> _Shaper:
        shaper = self._shapers.get(request)
        if shaper is None:
            shaper = self._shapers[request] = _Shaper(request, self.vocab_size, device)
        assert shaper.length <= len(request.token_ids)
        shaper.add(request.token_ids[shaper.length :])
        return shaper


class _Shaper:
    """Bias, penalties and forbidden stops of one request, with the counts of its tokens that they need."""

    def __init__(self, request: Request, vocab_size: int, device: torch.device) -> None:
        self.request = request
        self.params = request.params
        self.length = 0  # output tokens counted
        bias = dict(self.params.logit_bias)
        self._bias_ids = torch.tensor(list(bias), dtype=torch.long, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float64, device=device)
        stops = sorted(token for token in request.stop_ids if token < vocab_size)
        self._stops = torch.tensor(stops, dtype=torch.long, device=device)
        if self.params.penalises:
            self._count_V = torch.zeros(vocab_size, device=device)  # in the output
            self._seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # in prompt and output
            self._seen_V[torch.tensor(request.prompt, device=device)] = True

    def add(self, tokens: list[int]) -> None:
        """Count output tokens."""
        self.length += len(tokens)
        if tokens and self.params.penalises:
            ids = torch.tensor(tokens, device=self._count_V.device)
            self._count_V.index_add_(0, ids, torch.ones(len(tokens), device=ids.device))
            self._seen_V[ids] = True

    def shape(self, logits_V: Tensor, position: int) -> Tensor:
        """The logits, fp64, that decide the output token at ``position``."""
        logits_V = logits_V.double()
        if len(self._bias):
            logits_V = logits_V.index_add(0, self._bias_ids, self._bias)
        if self.params.penalises:
            logits_V = self._penalise(logits_V)
        if position < self.params.min_tokens and len(self._stops):
            logits_V = logits_V.index_fill(0, self._stops, -math.inf)
            if logits_V.max() == -math.inf:
                raise ValueError(
                    f"min_tokens={self.params.min_tokens} of prompt {self.request.place} forbids every token that the "
                    "model's logits leave; lower it, or take stop_token_ids away"
                )
        return logits_V

    def _penalise(self, logits_V: Tensor) -> Tensor:
        factor = self.params.repetition_penalty
        if factor != 1:
            weaker_V = torch.where(logits_V > 0, logits_V / factor, logits_V * factor)
            logits_V = torch.where(self._seen_V, weaker_V, logits_V)
        if self.params.presence_penalty:
            logits_V = logits_V - self.params.presence_penalty * (self._count_V > 0).double()
        if self.params.frequency_penalty:
            logits_V = logits_V - self.params.frequency_penalty * self._count_V.double()
        return logits_V


def _likeliest(logits_RV: Tensor) -> list[int | None]:
    """Per row the most likely token, of equals the first, ``None`` without one; one transfer from the device."""
    peak_R, token_R = logits_RV.max(dim=1)  # NaN if there is one
    peaks, tokens = torch.stack((peak_R.double(), token_R.double())).tolist()
    return [int(token) if math.isfinite(peak) else None for peak, token in zip(peaks, tokens, strict=True)]


def _scores(logits_RV: Tensor, scored: list[tuple[int, int]]) -> Iterator[float]:
    """Log-probabilities of tokens under their rows, a bounded number of rows at a time."""
    for first in range(0, len(scored), SCORED_ROWS):
        rows, tokens = zip(*scored[first : first + SCORED_ROWS], strict=True)
        rows_B, token_B = torch.tensor([rows, tokens], device=logits_RV.device)
        yield from logprobs_of(logits_RV if len(rows) == len(logits_RV) else logits_RV[rows_B], token_B).tolist()


def _result(entry: Entry, tokens: list[int] | ValueError, scores: Iterator[float]) -> Result:
    if isinstance(tokens, ValueError):
        return Result([], [], [], tokens)
    prompt_logprobs = list(islice(scores, len(entry.prompt_targets)))
    if entry.request.params.logprobs:
        logprobs = list(islice(scores, len(tokens)))
    else:
        logprobs = [math.nan] * len(tokens)
    return Result(tokens, logprobs, prompt_logprobs)
