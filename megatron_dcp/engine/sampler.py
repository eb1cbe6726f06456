"""From logits to tokens, on one rank for the whole replica.

Shapes: ``B`` rows of logits, ``V`` tokens of the vocabulary, ``C`` tokens that may be drawn.

The first rank of the replica chooses; the others are told. So the ranks of a replica hold the same tokens even where
their logits differ in the last bit, and never part ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.comm.collectives import broadcast
from megatron_dcp.engine.request import Request, SamplingParams
from megatron_dcp.metrics import Metrics

NOT_FINITE = -1


def choose(logits_V: Tensor, params: SamplingParams, draw: float) -> Tensor:
    """The token that a uniform random number stands for, by the inverse of the distribution function.

    In fp64: temperature, then top-k, then top-p on the distribution that top-k leaves. Nothing here depends on other
    rows of a batch. Of equally likely tokens the lower id comes first.

    Args:
        logits_V: Finite peak; ``-inf`` never comes out.
        params: ``temperature > 0``.
        draw: In ``[0, 1)``.

    Returns:
        Token id, int64, 0-dim, on the device of the logits.
    """
    scaled_V = (logits_V.double() - logits_V.max()) / params.temperature
    ids_C = None
    if 0 < params.top_k < scaled_V.numel():
        least = torch.topk(scaled_V, params.top_k).values[-1]
        ids_C = (scaled_V >= least).nonzero().squeeze(1)  # more than top_k where several are equal to the least
    elif params.top_p < 1:
        ids_C = torch.arange(scaled_V.numel(), device=scaled_V.device)
    if ids_C is None:
        return _invert(torch.softmax(scaled_V, dim=0), draw)
    scaled_C, order_C = torch.sort(scaled_V[ids_C], descending=True, stable=True)
    if params.top_k:
        scaled_C = scaled_C[: params.top_k]
    prob_C = torch.softmax(scaled_C, dim=0)
    if params.top_p < 1:
        before_C = prob_C.cumsum(0) - prob_C
        prob_C = torch.where(before_C < params.top_p, prob_C, torch.zeros_like(prob_C))
    return ids_C[order_C[_invert(prob_C, draw)]]


def _invert(prob_C: Tensor, draw: float) -> Tensor:
    """Index at which the cumulated probability, made to end at 1, first exceeds ``draw``."""
    cumulated_C = prob_C.cumsum(0)
    index = torch.searchsorted(cumulated_C, cumulated_C[-1:] * draw, right=True)
    # Rounding may carry draw * total up to the total itself; the answer is then the last token with any probability.
    last = prob_C.nonzero()[-1]
    return torch.minimum(index, last).squeeze(0)


def logprobs_of(logits_BV: Tensor, token_B: Tensor) -> Tensor:
    """Log-probability of one token per row under the unmodified logits, fp32, natural log."""
    logits_BV = logits_BV.float()
    return logits_BV.gather(1, token_B.unsqueeze(1)).squeeze(1) - logits_BV.logsumexp(dim=1)


class Sampler:
    """Chooses the next token of every sampled sequence; the same answer on every rank of ``group``.

    Args:
        group: Process group of the replica. Its first rank samples; one broadcast of 16 bytes per sequence follows,
            none where the group has one rank.
        metrics: Counts that broadcast.
    """

    def __init__(self, group: Any, metrics: Metrics | None = None) -> None:
        self.group = group
        self.metrics = metrics
        self.size: int = group.size()
        self.samples_here = group.rank() == 0
        self._generators: dict[Request, torch.Generator] = {}

    def sample(self, logits_BV: Tensor, requests: Sequence[Request]) -> tuple[list[int], list[float]]:
        """Next tokens and their log-probabilities (NaN for requests that did not ask for any).

        Args:
            logits_BV: fp32, one row per request; only those of the group's first rank are looked at.
            requests: Those behind the rows.

        Raises:
            ValueError: On every rank, if a row has no finite maximum (a NaN or an infinity among its logits).
            CollectiveError: A rank of the replica died, or did not come within the time limit.
        """
        if not requests:
            return [], []
        answer_B2 = self._choose_all(logits_BV, requests) if self.samples_here else None
        if self.size > 1:
            if answer_B2 is None:
                answer_B2 = torch.empty(len(requests), 2, dtype=torch.float64, device=logits_BV.device)
            broadcast(answer_B2, self.group, self.metrics)
        assert answer_B2 is not None
        rows = answer_B2.tolist()  # fp64 holds any token id and any fp32 exactly
        tokens = [int(row[0]) for row in rows]
        if NOT_FINITE in tokens:
            request = requests[tokens.index(NOT_FINITE)]
            raise ValueError(
                f"the logits of prompt {request.index} hold NaN or infinity after "
                f"{len(request.prompt) + len(request.token_ids)} tokens; look for broken weights in the checkpoint, or "
                "use dtype float32 or bfloat16 where float16 overflows"
            )
        return tokens, [row[1] for row in rows]

    def forget(self, request: Request) -> None:
        """Drop the random numbers of a request that has ended."""
        self._generators.pop(request, None)

    def _choose_all(self, logits_BV: Tensor, requests: Sequence[Request]) -> Tensor:
        peak_B, token_B = logits_BV.max(dim=1)  # of equals the first; NaN if there is one
        finite_B = torch.isfinite(peak_B)
        drawn = [i for i, request in enumerate(requests) if not request.params.greedy]
        if drawn and bool(finite_B[drawn].all()):
            chosen = [choose(logits_BV[i], requests[i].params, self._draw(requests[i])) for i in drawn]
            token_B[drawn] = torch.stack(chosen)
        logprob_B = torch.full_like(peak_B, torch.nan)
        wanted = [i for i, request in enumerate(requests) if request.params.logprobs]
        if len(wanted) == len(requests):
            logprob_B = logprobs_of(logits_BV, token_B)
        elif wanted:
            logprob_B[wanted] = logprobs_of(logits_BV[wanted], token_B[wanted])
        token_B = torch.where(finite_B, token_B, NOT_FINITE)
        return torch.stack((token_B.double(), logprob_B.double()), dim=1)

    def _draw(self, request: Request) -> float:
        """The request's next uniform random number, from its own generator (on the CPU: the same on every device)."""
        generator = self._generators.get(request)
        if generator is None:
            generator = self._generators[request] = torch.Generator()
            if request.params.seed is None:
                generator.seed()
            else:
                generator.manual_seed(request.params.seed)
        return float(torch.rand((), generator=generator, dtype=torch.float64))
