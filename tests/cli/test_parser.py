import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dcp.cli import COMMANDS, arguments, build_parser, main

ROOT = Path(__file__).resolve().parents[2]
GENERATE = ["generate", "--checkpoint", "dir"]


def test_every_option_of_the_contract_by_short_and_long_name():
    short = build_parser().parse_args(
        [*GENERATE, *shlex.split(
            "--tp 2 --dcp 3 --dcp-layout within_tp --kv-interleave 4 --block-size 8 --exchange ag_rs --dtype bfloat16 "
            "--prompt-file p.jsonl --output o.jsonl --max-new-tokens 5 --temperature 0.5 --top-k 7 --top-p 0.9 "
            "--seed 3 --ignore-eos --logprobs"
        )]
    )  # fmt: skip
    long = build_parser().parse_args(
        [*GENERATE, *shlex.split(
            "--tensor-model-parallel-size 2 --decode-context-parallel-size 3 --dcp-layout within_tp "
            "--kv-interleave-size 4 --block-size 8 --exchange ag_rs --dtype bfloat16 --prompt-file p.jsonl "
            "--output o.jsonl --max-new-tokens 5 --temperature 0.5 --top-k 7 --top-p 0.9 --seed 3 --ignore-eos "
            "--logprobs"
        )]
    )  # fmt: skip
    assert vars(short) == vars(long)
    assert (short.tp, short.dcp, short.kv_interleave, short.exchange) == (2, 3, 4, "ag_rs")
    assert (short.temperature, short.top_k, short.top_p, short.seed) == (0.5, 7, 0.9, 3)
    assert short.ignore_eos and short.logprobs


@pytest.mark.parametrize(
    "line",
    [
        "",
        "unknown",
        "generate --checkpoint d",
        "generate --prompt a",
        "generate --checkpoint d --prompt a --prompt-file f",
        "generate --checkpoint d --prompt a --tp 0",
        "generate --checkpoint d --prompt a --dcp two",
        "generate --checkpoint d --prompt a --dcp-layout helix",
        "generate --checkpoint d --prompt a --exchange ring",
        "generate --checkpoint d --prompt a --dtype int8",
        "generate --checkpoint d --prompt a --max-new-tokens 0",
        "generate --checkpoint d --prompt a --temperature -1",
        "generate --checkpoint d --prompt a --temperature nan",
        "generate --checkpoint d --prompt a --top-p 0",
        "generate --checkpoint d --prompt a --top-p 1.5",
        "generate --checkpoint d --prompt a --top-k -1",
        "generate --checkpoint d --prompt a --num-blocks 1 --bytes-per-rank 1",
        "generate --checkpoint d --prompt a --max-new 5",
        "convert a b",
        "convert a b --to gguf",
        "convert a --to hf",
        "convert a b --to legacy --tp 0",
        "convert a b --to hf --max-shard-size 0",
        "convert a b --to hf --max-shard-size 5TBB",
        "convert a b --to hf --via nemo",
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(line, capsys):
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(line))
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tp 2 --dcp 3", "--tp 2 x --dcp 3 takes 6 processes, but 1 was started.*torchrun --nproc-per-node 6 -m"),
        ("--tp 2 --dcp 3 --pp 2", "--tp 2 x --dcp 3 x --pp 2 takes 12 processes, but 1 was started"),
        ("--tp 4 --dcp 2 --dcp-layout within_tp", r"--tp 4 \(--dcp within it\) takes 4 processes"),
        ("--tp 3 --dcp 2 --dcp-layout within_tp", "--dcp 2 does not divide --tp 3.*use one of 1, 3"),
        (
            "--block-size 6 --kv-interleave 4",
            "--kv-interleave 4 does not divide --block-size 6; use one of 1, 2, 3, 6",
        ),
        ("--tp 2 --dcp 2 --dcp-layout within_tp --exchange fold", "--exchange 'fold' adds"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line_and_1(line, message, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main([*GENERATE, "--prompt", "a", *shlex.split(line)]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1 and error.startswith("megatron-dcp generate: error: ")


def test_processes_that_are_no_multiple_of_what_the_sizes_take(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert main([*GENERATE, "--prompt", "a", "--tp", "3"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("[rank 3] ") and "takes 3 processes, but 4 were started" in error
    assert "several times as many for replicas" in error


@pytest.mark.parametrize("command", [c.__name__.rpartition(".")[2] for c in COMMANDS])
def test_help_shows_an_example_that_parses(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    example = capsys.readouterr().out.rpartition("example (from")[2].partition("\n")[2].replace("\\\n", " ")
    words = shlex.split(example)
    args = words[words.index("megatron_dcp" if "megatron_dcp" in words else "megatron-dcp") + 1 :]
    assert build_parser().parse_args(args).command == command
    assert arguments.CHECKPOINT in args or command in ("env", "plan")


def test_the_examples_checkpoint_is_there():
    assert (ROOT / arguments.CHECKPOINT / "latest_checkpointed_iteration.txt").is_file()


def test_help_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from megatron_dcp.cli import build_parser; build_parser().parse_args"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}(['generate', '-h'])"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and "--dcp-layout" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--timeout 1e300", "argument --timeout: 1e300 must be above 0, at most 2592000"),
        ("--num-blocks 2147483648", "argument --num-blocks: 2147483648 is above 2147483647"),
        ("--block-size 99999999999", "argument --block-size: 99999999999 is above 2147483647"),
        (f"--seed {2**63}", f"argument --seed: {2**63} is above {2**63 - 1}"),
        (f"--tp {'1' * 5000}", f"'{'1' * 40}' is not a whole number that can be read"),
        ("--output ''", "argument --output: the path is empty"),
        ("--checkpoint ''", "argument --checkpoint: the path is empty"),
    ],
)
def test_values_out_of_bounds_are_one_line_of_every_rank(line, message, capsys, monkeypatch):
    words = [*GENERATE, "--prompt", "a", *shlex.split(line)]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        main(words)
    error = capsys.readouterr().err
    assert error.startswith("usage: ") and message in error
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("[rank 3] megatron-dcp generate: error: ") and error.endswith(" (see --help)\n")
    assert error.count("\n") == 1 and message in error


def test_sizes_in_bytes_may_be_large():
    words = [*GENERATE, "--prompt", "a", "--bytes-per-rank", str(2**40)]
    assert build_parser().parse_args(words).bytes_per_rank == 2**40
