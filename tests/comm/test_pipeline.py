"""Hidden states go from stage to stage as they are; a stage that does not come is one clear error."""

from datetime import timedelta

import pytest
import torch
from torch import distributed

from megatron_dcp.comm.collectives import CollectiveError
from megatron_dcp.comm.pipeline import receive_from_previous_stage, send_to_next_stage
from workers import run_on_ranks


def pass_on(rank: int, world: int, dtype: torch.dtype, num_tokens: int) -> bool:
    """Ranks 1, 2 and 3 of a world of 4 are the stages."""
    group = distributed.new_group([1, 2, 3])
    if rank == 0:
        return True
    want = torch.arange(num_tokens * 5).view(5, 1, num_tokens).permute(2, 1, 0).to(dtype)
    hidden = want
    if group.rank() > 0:
        hidden = receive_from_previous_stage(num_tokens, 5, dtype, group)
    if group.rank() < 2:
        send_to_next_stage(hidden, group)
    return torch.equal(hidden, want)


@pytest.mark.parametrize(("dtype", "num_tokens"), [(torch.float32, 3), (torch.bfloat16, 1)])
def test_hidden_states_arrive_as_they_were_sent(dtype: torch.dtype, num_tokens: int) -> None:
    assert run_on_ranks(4, pass_on, dtype, num_tokens) == [True] * 4


def waits_in_vain(rank: int, world: int) -> None:
    group = distributed.new_group(timeout=timedelta(seconds=1))
    try:
        if rank == 1:
            receive_from_previous_stage(2, 4, torch.float32, group)
    finally:
        distributed.barrier()


def test_a_stage_that_does_not_send_is_an_error_within_the_time_limit() -> None:
    first, second = run_on_ranks(2, waits_in_vain, expect_errors=True)
    assert first is None and isinstance(second, CollectiveError)
    assert "receive over ranks [0, 1] failed on rank 1" in str(second) and "logs of ranks [0]" in str(second)
