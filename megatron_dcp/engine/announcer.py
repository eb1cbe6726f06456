"""What the driver of a replica tells its followers in the course of a run."""

from __future__ import annotations

from contextlib import suppress

from megatron_dcp.comm.collectives import CollectiveError
from megatron_dcp.engine.link import Link
from megatron_dcp.engine.request import Request
from megatron_dcp.engine.scheduler import Step
from megatron_dcp.engine.wire import Kind, Known, Message, Outcome


class Announcer:
    """Makes messages of steps and of what they brought. A run ends with `end` or `fail`; then `clear` begins the next.

    Args:
        link: To the followers.
        tell_outcomes: Whether they hear what becomes of the requests.

    Attributes:
        over: Whether the followers listen no more in this run: it was ended, or they have most likely failed as well.
    """

    def __init__(self, link: Link, *, tell_outcomes: bool) -> None:
        self.link = link
        self.over = False
        self._tell_outcomes = tell_outcomes and not link.alone
        self._known = Known()
        self._outcomes: list[Outcome] = []  # not told yet
        self._told: dict[Request, int] = {}  # log-probabilities of the prompt that were

    def step(self, step: Step, running: list[Request]) -> None:
        """A step to compute; ``running`` are the requests that hold blocks."""
        if not self.link.alone:
            indices = [request.index for request in step.requests]
            seqs, gone = self._known.plan(indices, step.batch.seqs, {request.index for request in running})
            self._send(Message(Kind.STEP, seqs=seqs, gone=gone))

    def pool(self, num_blocks: int | None) -> None:
        """A pool to make, and a runner with it."""
        self._known.clear()
        self._send(Message(Kind.POOL, num_blocks=num_blocks or 0))

    def idle(self) -> None:
        """The driver is alive."""
        self._send(Message(Kind.IDLE))

    def end(self) -> None:
        """No more comes."""
        if not self.over:
            self._send(Message(Kind.END))
        self.over = True

    def fail(self, error: BaseException) -> None:
        """No more comes because of this error, unless the followers know, or cannot be told."""
        if not self.over and not isinstance(error, CollectiveError):
            is_value_error = isinstance(error, ValueError)
            text = str(error) if is_value_error else f"the driver failed with {type(error).__name__}: {error}"
            with suppress(CollectiveError):  # the error at hand says more
                self._send(Message(Kind.ERROR, text=text, is_value_error=is_value_error))
        self.over = True

    def outcome(self, request: Request, num_tokens: int) -> None:
        """Let the next message say what is new of a request: its last tokens, and log-probabilities of its prompt."""
        if not self._tell_outcomes:
            return
        first, first_prompt = len(request.token_ids) - num_tokens, 0
        if request.params.prompt_logprobs:
            first_prompt = self._told.get(request, 0)
            self._told[request] = len(request.prompt_logprobs)
        self._outcomes.append(
            Outcome(
                request.index,
                request.token_ids[first:],
                request.logprobs[first:],
                request.prompt_logprobs[first_prompt:],
                request.finish_reason,
                request.num_cached_tokens,
            )
        )

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        self._told.pop(request, None)

    def clear(self) -> None:
        """Begin a new run."""
        self._outcomes.clear()
        self._told.clear()
        self._known.clear()
        self.over = False

    def _send(self, message: Message) -> None:
        outcomes, self._outcomes = self._outcomes, []
        try:
            self.link.send(message._replace(outcomes=outcomes))
        except BaseException:
            self.over = True
            raise
