"""What the exchanges of `megatron_dcp.comm.exchange` send, from sizes alone. No torch.

Shapes: ``P`` ranks of the group, ``T`` tokens, ``N`` query heads, ``H`` head dim of what is merged.
"""

from __future__ import annotations

from collections.abc import Callable


def head_slice(num_heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """``(first head, number of heads)`` that ``rank`` ends with after ``ag_rs`` and ``a2a``."""
    per_rank = -(-num_heads // ranks)
    first = min(rank * per_rank, num_heads)
    return first, min(first + per_rank, num_heads) - first


def expected_traffic(name: str, T: int, N: int, H: int, P: int, rank: int = 0) -> dict[str, tuple[int, int]]:
    """Collectives of one exchange: ``op -> (calls, bytes that rank sends)``, for one layer and ``T`` tokens.

    Without the sum over the group that ``fold`` leaves to the output projection.
    """
    if P == 1:
        return {}
    lse = 4 * T * N
    formulas: dict[str, Callable[[], dict[str, tuple[int, int]]]] = {
        "fold": lambda: {"all_gather": (1, (P - 1) * lse)},
        "all_reduce": lambda: {"all_reduce": (2, 2 * (P - 1) * lse // P + 2 * (P - 1) * lse * (H + 1) // P)},
        "ag_rs": lambda: {
            "all_gather": (1, (P - 1) * lse),
            "reduce_scatter": (1, (P - 1) * 4 * T * -(-N // P) * H),
        },
        "a2a": lambda: {"all_to_all": (1, 4 * T * (N - head_slice(N, P, rank)[1]) * (H + 1))},
    }
    return formulas[name]()
