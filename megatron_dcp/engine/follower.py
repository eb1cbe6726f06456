"""What every rank but the driver does: receive a message, compute what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from megatron_dcp.comm.collectives import CollectiveError
from megatron_dcp.comm.consensus import agree
from megatron_dcp.engine.batch import StepBatch, Window
from megatron_dcp.engine.link import Link
from megatron_dcp.engine.wire import Kind, Outcome, Tables


class Runner(Protocol):
    """What computes a step; `megatron_dcp.engine.runner.ModelRunner` is the real one."""

    @property
    def num_blocks(self) -> int:
        """Physical blocks of the pool on every rank."""

    @property
    def window(self) -> Window | None:
        """Pool of the layers with a sliding window, if the model has such layers."""

    def step(self, batch: StepBatch) -> Tensor:
        """Logits ``[batch.num_logits, vocab]`` fp32; only the driver's are looked at."""


MakeRunner = Callable[[int | None], Runner]
"""Makes the runner, and with it the KV pool, from a number of blocks; ``None`` where the configuration gives it."""


class Follower:
    """Computes what the driver plans.

    Attributes:
        runner: ``None`` before the first pool, and where one could not be made.
    """

    def __init__(self, make_runner: MakeRunner, link: Link) -> None:
        self._make_runner = make_runner
        self._link = link
        self.runner: Runner | None = None

    def follow(self) -> Iterator[Sequence[Outcome]]:
        """Take part until the driver ends the run; yields what each message says of the step before.

        A step is computed when the next item is asked for. So a caller that has taken an item stands where the driver
        stands that has handed out the same tokens: its next step is announced, but not begun.

        Raises:
            ValueError, RuntimeError: What the driver failed with.
            CollectiveError: A rank of the replica died or hangs.
        """
        tables = Tables()
        while True:
            message = self._link.receive()
            yield message.outcomes
            if message.kind is Kind.STEP:
                assert self.runner is not None
                self.runner.step(tables.batch(message))
            elif message.kind is Kind.POOL:
                self.runner = None
                tables = Tables()
                try:
                    self.runner = make_together(self._make_runner, message.num_blocks or None, self._link.group)
                except CollectiveError:
                    raise
                except Exception:  # the driver has one too, and decides what follows
                    continue
            elif message.kind is Kind.ERROR:
                raise (ValueError if message.is_value_error else RuntimeError)(message.text)
            elif message.kind is Kind.END:
                return


def make_together(make_runner: MakeRunner, num_blocks: int | None, group: Any) -> Runner:
    """A runner on every rank of the replica, or an error on every rank."""
    runner, error = None, None
    try:
        runner = make_runner(num_blocks)
    except Exception as caught:  # whatever it is: the other ranks must not wait for this one
        error = caught
    agree(error, group)
    assert runner is not None
    return runner
