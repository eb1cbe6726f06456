"""One list of prompts for all replicas of the world: who continues which, and how all of them end."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_dcp.engine.request import RequestOutput

if TYPE_CHECKING:
    from megatron_dcp.engine.llm import LLM
    from megatron_dcp.engine.params import SamplingParams
    from megatron_dcp.engine.prompts import Prompt

PAUSE_S = 0.1


def generate(
    llm: LLM,
    prompts: list[Prompt],
    params: SamplingParams,
    *,
    on_token: Callable[[int, int, str], None] | None = None,
    progress: bool = False,
) -> list[RequestOutput]:
    """Continue every prompt on one of the replicas. Every rank of the world calls it with the same arguments.

    The prompts are dealt out in turns. No replica waits for another before its share is done, however long that takes.

    Args:
        params: Of every prompt; one sample each.
        on_token: As for ``LLM.generate``, with the replica's own numbers of its prompts.
        progress: As for ``LLM.generate``; of the first replica's share.

    Returns:
        The outputs of all replicas in the order of the prompts, on every rank.

    Raises:
        ValueError: On every rank: a prompt that the model cannot take; it is named by its place among all.
        RuntimeError: Another replica failed.
    """
    from megatron_dcp.engine.loading import on_all_ranks, replica_place

    index, count = replica_place(llm.groups)
    if count == 1:
        return llm.generate(prompts, params, on_token=on_token, progress=progress)
    requests = on_all_ranks(llm.prompt_reader.read, prompts, params)
    share = [request.prompt for request in requests[index::count]]
    ending = _Ending()
    try:
        progress = progress and index == 0
        outputs = llm.generate(share, params, on_token=on_token, progress=progress) if share else []
    except Exception as caught:
        error = _numbered_as_all(caught, index, count)
        ending.report(error)
        raise error from caught
    ending.wait()
    return ending.gather(llm, [replace(output, index=index + count * output.index) for output in outputs])


def _numbered_as_all(error: Exception, index: int, count: int) -> Exception:
    """``error``, whose text names a prompt of the replica's share, with its place among all prompts."""
    if not isinstance(error, ValueError):
        return error
    return ValueError(
        re.sub(r"(?<=\bprompt )\d+", lambda match: str(index + count * int(match[0])), str(error), count=1)
    )


class _Ending:
    """How replicas learn that all are done, or that one has failed.

    They look into the store of ``torch.distributed``: a collective would have to end within a time limit that is meant
    for ranks that compute together, and a replica may be done hours before another.
    """

    def __init__(self) -> None:
        from torch import distributed

        from megatron_dcp.comm.collectives import gather_objects

        world = distributed.group.WORLD
        assert world is not None
        self._world = world
        name = gather_objects(uuid.uuid4().hex, world)[0]  # a new one for every call
        self._store = distributed.PrefixStore(f"megatron_dcp/{name}", distributed.distributed_c10d._get_default_store())

    def report(self, error: Exception) -> None:
        """Tell all other ranks that this one has failed; the first report counts."""
        if self._store.add("failures", 1) == 1:
            kind = "ValueError" if isinstance(error, ValueError) else "RuntimeError"
            self._store.set("failed", f"{kind}\nrank {self._world.rank()} failed with {type(error).__name__}: {error}")

    def wait(self) -> None:
        """Return when every rank has come here; raise what another has reported."""
        self._store.add("done", 1)
        while self._store.add("done", 0) < self._world.size():
            if self._store.check(["failed"]):
                kind, _, text = self._store.get("failed").decode().partition("\n")
                raise (ValueError if kind == "ValueError" else RuntimeError)(text)
            time.sleep(PAUSE_S)

    def gather(self, llm: LLM, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs of all replicas by their index; of each, those of its first rank."""
        from megatron_dcp.comm.collectives import gather_objects

        own = outputs if llm.groups.dcp_replica.rank() == 0 else []
        return sorted((each for some in gather_objects(own, self._world) for each in some), key=lambda each: each.index)
