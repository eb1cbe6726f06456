"""Making ranks fail together: an error on one rank, or ranks that were given different things, is an error on all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import distributed
from torch.distributed import ProcessGroup, ReduceOp

from megatron_dcp.comm.collectives import CollectiveError, all_gather, all_reduce, gather_objects, group_device


def agree(error: BaseException | None, group: ProcessGroup | None) -> None:
    """Return where no rank of the group (``None``: of all ranks) has an error; else raise on every rank.

    A collective call. Where ranks can fail one by one (reading a file, checking a request) this comes before the next
    collective, which would hang for the ranks that did not fail.

    Raises:
        The given error where there is one. Elsewhere ``ValueError`` if the first error (in rank order) is one, else
        ``RuntimeError``, with its rank, type and message.
    """
    group = group or distributed.group.WORLD
    assert group is not None
    if group.size() == 1:
        if error is not None:
            raise error
        return
    try:
        flag = torch.tensor([error is not None], dtype=torch.int32, device=group_device(group))
        if not all_reduce(flag, group, op=ReduceOp.MAX).item():
            return
        reports = gather_objects(None if error is None else _report(error), group)
    except CollectiveError:
        if error is not None:
            raise error from None  # it says more than that the others, seeing theirs, have gone
        raise
    if error is not None:
        raise error
    ranks = distributed.get_process_group_ranks(group)
    failures = [(rank, *report) for rank, report in zip(ranks, reports, strict=True) if report is not None]
    rank, is_value_error, text = failures[0]
    others = f" (and errors on ranks {[other for other, *_ in failures[1:]]})" if failures[1:] else ""
    raise (ValueError if is_value_error else RuntimeError)(f"rank {rank} failed with {text}{others}")


def _report(error: BaseException) -> tuple[bool, str]:
    return isinstance(error, ValueError), f"{type(error).__name__}: {error}"


def same_on_all(value: bytes | str | Sequence[tuple[str, str]], group: ProcessGroup, what: str) -> None:
    """Check that every rank of the group has the same value. A collective call.

    Args:
        value: Compared by its SHA-256 hash; a short string is also shown where it differs. Of pairs of a name and a
            text, the error shows the first that differs.
        what: What it is, for the error.

    Raises:
        ValueError: On every rank; names the ranks that have each of the values.
    """
    if group.size() == 1:
        return
    data = value if isinstance(value, bytes) else (value if isinstance(value, str) else repr(list(value))).encode()
    digest = hashlib.sha256(data).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(group_device(group))
    digests = all_gather(own, group)
    if bool((digests == digests[0]).all()):
        return
    if isinstance(value, bytes | str):
        short = isinstance(value, str) and len(value) <= 80
        shown = gather_objects(value if short else f"SHA-256 {digest.hex()[:12]}", group)
    else:
        first, shown = _first_difference(gather_objects(list(value), group))
        what = f"{what} ({first})"
    ranks = distributed.get_process_group_ranks(group)
    ranks_of: dict[str, list[int]] = {}
    for rank, text in zip(ranks, shown, strict=True):
        ranks_of.setdefault(text, []).append(rank)
    differences = "; ".join(f"on ranks {some}: {text}" for text, some in ranks_of.items())
    raise ValueError(f"{what} must be the same on ranks {ranks}, but there is {differences}; start all with the same")


def _first_difference(lists: list[list[tuple[str, str]]]) -> tuple[str, list[str]]:
    """The name of the first pair that is not the same in all lists, and its text in each of them."""
    missing = ("", "nothing")
    column = next(pairs for pairs in zip_longest(*lists, fillvalue=missing) if len(set(pairs)) > 1)
    name = next(name for name, _ in column if name)
    return name, [text for _, text in column]
