"""Two models' logits and hidden states at the same tokens, compared.

Shapes: ``B`` tokens of one comparison, ``V`` vocabulary, ``h`` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ROWS = 64  # at a time: the comparison is in fp64


@dataclass(frozen=True)
class Rows:
    """What was found at every token. Each an array ``[B]``.

    Attributes:
        position: Of the token that the logits come after.
        reference_logprob, logprob: Of the token that really comes next, in both.
        kl: KL divergence of the other's distribution from the reference's.
        logit: Largest logit difference.
        span: Range of the reference's logits.
        reference_argmax, argmax: The likeliest token of both.
        margin: By how much the reference prefers its own likeliest token to the other's, in logits.
    """

    position: np.ndarray
    reference_logprob: np.ndarray
    logprob: np.ndarray
    kl: np.ndarray
    logit: np.ndarray
    span: np.ndarray
    reference_argmax: np.ndarray
    argmax: np.ndarray
    margin: np.ndarray

    @classmethod
    def joined(cls, parts: list[Rows]) -> Rows:
        """One after the other."""
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    @classmethod
    def worst(cls, runs: list[Rows]) -> Rows:
        """Of several comparisons of the same tokens, for each token the one whose log-probability differs most."""
        differences = np.stack([np.nan_to_num(abs(run.reference_logprob - run.logprob), nan=np.inf) for run in runs])
        run_B, token_B = differences.argmax(0), np.arange(differences.shape[1])
        return cls(*(np.stack([getattr(run, each.name) for run in runs])[run_B, token_B] for each in fields(cls)))


def compare_logits(reference_BV: Tensor, other_BV: Tensor, targets: list[int], first: int) -> Rows:
    """Compare logits, row by row.

    Args:
        reference_BV, other_BV: Of the same tokens.
        targets: The tokens that come next.
        first: Position of the first row; the others follow.
    """
    parts = []
    for start in range(0, len(targets), _ROWS):
        rows = slice(start, start + _ROWS)
        here = torch.tensor(targets[rows], device=reference_BV.device)
        parts.append(_compare(reference_BV[rows].double(), other_BV[rows].double(), here, first + start))
    return Rows.joined(parts)


def _compare(reference_BV: Tensor, other_BV: Tensor, targets_B: Tensor, first: int) -> Rows:
    p, q = reference_BV.log_softmax(-1), other_BV.log_softmax(-1)

    def at(values_BV: Tensor, tokens_B: Tensor) -> Tensor:
        return values_BV.gather(1, tokens_B[:, None])[:, 0]

    own, others = reference_BV.argmax(-1), other_BV.argmax(-1)
    found: tuple[Any, ...] = (
        torch.arange(first, first + len(targets_B)),
        at(p, targets_B),
        at(q, targets_B),
        (p.exp() * (p - q)).sum(-1).clamp(min=0),  # rounding can make it -1e-17
        (reference_BV - other_BV).abs().amax(-1),
        reference_BV.amax(-1) - reference_BV.amin(-1),
        own,
        others,
        at(reference_BV, own) - at(reference_BV, others),
    )
    return Rows(*(each.cpu().numpy() for each in found))


class LayerDifferences:
    """The largest relative difference of a token's hidden states after every layer, ``|a - b| / |b|`` over ``h``."""

    def __init__(self) -> None:
        self.worst: dict[int, float] = {}

    def add(self, reference: dict[int, Tensor], other: dict[int, Tensor], positions: Any) -> None:
        """Compare ``other``'s rows with the reference's at these positions, for all layers of this rank."""
        for layer, state_Bh in other.items():
            if len(positions) == 0:
                continue
            want_Bh = reference[layer][torch.as_tensor(positions, device=state_Bh.device)].double()
            size_B = want_Bh.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
            found = float(((state_Bh.double() - want_Bh).norm(dim=-1) / size_B).nan_to_num(nan=np.inf).max())
            self.worst[layer] = max(self.worst.get(layer, 0.0), found)

    @staticmethod
    def merged(parts: list[dict[int, float]]) -> dict[int, float]:
        """The largest over all ranks, in the order of the layers."""
        layers = sorted({layer for part in parts for layer in part})
        return {layer: max(part[layer] for part in parts if layer in part) for layer in layers}
