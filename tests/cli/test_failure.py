import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from torch import distributed

from megatron_dcp.cli import failure
from megatron_dcp.comm.collectives import CollectiveError
from workers import run_on_ranks


def fail_with(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("tp=3 is too\n much"), "tp=3 is too much"),
        (CollectiveError("all_gather failed:\nrank 1 died"), "all_gather failed: rank 1 died"),
        (FileNotFoundError(2, "No such file or directory", "p.jsonl"), "p.jsonl: No such file or directory"),
        (BrokenPipeError(32, "Broken pipe"), "BrokenPipeError: [Errno 32] Broken pipe (--debug shows where)"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero (--debug shows where)"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(error, line, capsys):
    assert failure.failing_together(fail_with(error), "generate", debug=False) == 1
    assert capsys.readouterr() == ("", f"megatron-dcp generate: error: {line}\n")


def test_parameters_are_told_by_the_options_that_set_them():
    options = {"tp_size": "--tp", "layout": "--layout", "num_blocks": "--num-blocks"}
    for text, told in (
        (
            "tp_size=3 does not divide layout='x', cp=2; use tp_size=1",
            "--tp 3 does not divide --layout 'x', cp=2; use --tp 1",
        ),
        ("raise num_blocks, or num_ranks (tp_size).", "raise --num-blocks, or num_ranks (--tp)."),
        ("another layout; tp_size = 3", "another layout; --tp = 3"),
        ("a.tp_size=3 n_tp_size=4 tp_size_2 'num_blocks' num_blocks.json /num_blocks/x --num_blocks", None),
    ):
        assert failure.describe(ValueError(text), options) == (told or text)


PRINT = """
import sys
from megatron_dcp.cli.failure import failing_together
sys.exit(failing_together(lambda: print("x" * int(sys.argv[1])), "plan", debug=False))
"""


@pytest.mark.parametrize("count", [9, 1 << 20])  # fewer and more characters than are buffered
def test_output_that_nobody_reads_is_no_error(count):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", PRINT, str(count)], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("count", [9, 1 << 20])
def test_output_for_which_there_is_no_room_is_one(count):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", PRINT, str(count)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "No space left" in done.stderr and done.stderr.count("\n") == 1


def test_without_stdout_a_command_does_its_work():
    command = ["sh", "-c", 'exec "$0" -c "$1" 9 >&-', sys.executable, PRINT]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_debug_adds_the_traceback(capsys):
    assert failure.failing_together(fail_with(KeyError("x")), "convert", debug=True) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error and error.endswith("KeyError: 'x' (--debug shows where)\n")


def test_success_is_0_and_restores_signals(capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert failure.failing_together(lambda: None, "generate", debug=False) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr() == ("", "")


def test_sigterm_ends_a_command_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr(failure, "GRACE_S", 0.2)

    def run():
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            time.sleep(0.01)

    assert failure.failing_together(run, "generate", debug=False) == 1
    assert capsys.readouterr().err == "megatron-dcp generate: error: stopped by SIGTERM before it was done\n"


def test_an_error_right_after_sigterm_is_the_one_that_is_told(capsys):
    def run():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("the real reason")

    assert failure.failing_together(run, "generate", debug=False) == 1
    assert capsys.readouterr().err == "megatron-dcp generate: error: the real reason\n"


def fail_late(rank, world):
    """When this rank failed, rank 1 a second after the others, and when it had waited for them."""

    def run():
        nonlocal failed
        time.sleep(1.0 if rank else 0.0)
        failed = time.monotonic()
        raise ValueError("no")

    failed = 0.0
    distributed.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure, "GRACE_S", 60.0)  # on a busy machine, a second may become many
        assert failure.failing_together(run, "generate", debug=False) == 1
    return failed, time.monotonic()


def test_a_failed_rank_waits_for_the_others_to_report():
    failed, ended = zip(*run_on_ranks(2, fail_late), strict=True)
    assert min(ended) >= max(failed)  # one clock: that of the machine


def fail_alone(rank, world):
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failure, "GRACE_S", 0.3)
            return failure.failing_together(fail_with(ValueError("only here")), "generate", debug=False)
    return None


def test_a_rank_that_fails_alone_does_not_wait_for_ever():
    assert run_on_ranks(2, fail_alone, timeout=60)[0] == 1


RANK = """
import sys
from datetime import timedelta
from torch import distributed
from megatron_dcp.cli import failure

def run():
    print("ready", flush=True)
    input()
    raise ValueError("the other rank is gone")

failure.GRACE_S = 1.0
store = distributed.TCPStore("127.0.0.1", int(sys.argv[2]), 2, sys.argv[1] == "0", timedelta(seconds=120))
distributed.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
sys.exit(failure.failing_together(run, "generate", debug=False))
"""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_frozen_or_dead_host_of_the_store_costs_neither_the_end_nor_more_lines(number):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, rank, port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "RANK": rank},
        )
        for rank in "01"
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 2
        ranks[0].send_signal(number)
        _, error = ranks[1].communicate("\n", timeout=100)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[1].returncode == 1
    assert error == "[rank 1] megatron-dcp generate: error: the other rank is gone\n"


def test_ctrl_c_is_one_line_of_every_rank_and_130(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    before = signal.getsignal(signal.SIGINT)
    assert failure.failing_together(fail_with(KeyboardInterrupt()), "generate", debug=False) == 130
    assert capsys.readouterr() == ("", "[rank 1] megatron-dcp generate: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before
