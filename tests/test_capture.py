"""Recordings: what is replayed, what is cut, and what happens where recording fails."""

from __future__ import annotations

import pytest
import torch
from recorded_ops import StandInGraphs

from megatron_dcp.capture import Recorder, current_recorder, on_host


def test_replay_reads_the_inputs_of_now():
    x, graphs = torch.arange(4.0), StandInGraphs()
    recorder = Recorder(graphs, "full")
    result = recorder.record(lambda: (x * 2).relu() + 1)
    for value in (3.0, -5.0):
        x.fill_(value)
        recorder.replay()
        assert (result == max(0.0, 2 * value) + 1).all()
    assert graphs.recorded == 1 and current_recorder() is None


def test_a_step_on_the_host_is_cut_out_and_made_again():
    x, seen = torch.tensor([1.0, 2.0]), []

    def compute():
        y = x + 1

        def count():
            seen.append(float(y.sum()))  # reads values
            return y * len(seen)

        return on_host(count) + y

    assert torch.equal(compute(), torch.tensor([4.0, 6.0])), "without a recording it is simply called"
    seen.clear()
    graphs = StandInGraphs()
    recorder = Recorder(graphs, "piecewise")
    result = recorder.record(compute)
    x.fill_(7.0)
    recorder.replay()
    assert seen == [5.0, 16.0] and (result == 8 * 2 + 8).all()
    assert graphs.recorded == 2


@pytest.mark.parametrize(("mode", "pieces"), [("full", 1), ("piecewise", 2)])
def test_collectives_are_counted_at_every_replay(mode, pieces):
    x, counted = torch.ones(3), []

    def compute():
        y = x * 2
        current_recorder().collective(lambda: y.add_(1), lambda: counted.append(1))
        return y * 10

    graphs = StandInGraphs()
    recorder = Recorder(graphs, mode)
    result = recorder.record(compute)
    counted.clear()
    x.fill_(4.0)
    recorder.replay()
    assert (result == 90).all() and counted == [1] and graphs.recorded == pieces


def test_what_fails_while_recording_is_raised_and_leaves_nothing_behind():
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        Recorder(StandInGraphs(), "full").record(lambda: x * float(x.sum()))
    assert current_recorder() is None
    assert float(x.sum()) == 3.0, "operators are recorded no more"
