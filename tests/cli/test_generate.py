"""``generate`` and ``convert`` as a user runs them: in this process, on ranks, and under torchrun."""

import json
import os
import shlex
import sys

import pytest
import torch
from cli_runs import ROOT, lines_of, model, run_main, torchrun, write_prompts

from megatron_dcp import parallel_state
from megatron_dcp.cli import convert, generate, main
from models import hf_model, tiny_model
from workers import run_on_ranks

KEYS = ["index", "prompt_token_ids", "token_ids", "text", "finish_reason", "logprobs"]


@pytest.fixture
def alone(monkeypatch):
    """One process without torchrun, whose groups go with the test."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def reference(prompt: list[int], tokens: list[int]) -> tuple[list[int], list[float]]:
    """By ``transformers``: the greedy token after each prefix of the text, and the log-probabilities of ``tokens``."""
    with torch.no_grad():
        logits = hf_model(model())(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist(), logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()


def check_outputs(outputs: list[dict], max_tokens: int) -> None:
    assert [output["index"] for output in outputs] == [0, 1, 2]
    assert outputs[0]["prompt_token_ids"] and outputs[1]["prompt_token_ids"] == [1, 2, 3]
    for output in outputs:
        assert list(output) == KEYS
        greedy, logprobs = reference(output["prompt_token_ids"], output["token_ids"])
        assert output["token_ids"] == greedy and len(greedy) == max_tokens
        assert output["logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert output["finish_reason"] == "length"
        assert isinstance(output["text"], str)


def test_prompt_file_to_output_file(alone, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    args = ["generate", "--checkpoint", str(model()), "--prompt-file", write_prompts(tmp_path), "--output", str(out)]
    assert main([*args, "--max-new-tokens", "9", "--ignore-eos", "--logprobs", "--block-size", "4"]) == 0
    check_outputs(lines_of(out), 9)
    assert capsys.readouterr().out == ""
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "prompts.jsonl"]
    assert not torch.distributed.is_initialized()


def test_a_prompt_to_stdout(alone, capsys):
    args = ["generate", "--checkpoint", str(model()), "--prompt", "abc", "--max-new-tokens", "4", "--ignore-eos"]
    assert main(args) == 0
    (output,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert list(output) == KEYS and output["logprobs"] is None and len(output["token_ids"]) == 4


def test_on_a_terminal_the_text_is_shown_as_it_comes(alone, capsys, monkeypatch):
    args = ["generate", "--checkpoint", str(model()), "--prompt", "abc", "--max-new-tokens", "4", "--ignore-eos"]
    assert main(args) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(args) == 0
    assert capsys.readouterr().out == text + "\n"


def test_seed_and_sampling_options_reach_the_sampler(alone, capsys):
    args = ["generate", "--checkpoint", str(model()), "--prompt", "abc", "--max-new-tokens", "12", "--ignore-eos"]

    def tokens(*options):
        assert main([*args, *options]) == 0
        return json.loads(capsys.readouterr().out)["token_ids"]

    greedy = tokens()
    drawn = tokens("--temperature", "5", "--seed", "1")
    assert drawn != greedy
    assert tokens("--temperature", "5", "--seed", "1") == drawn
    assert tokens("--temperature", "5", "--seed", "2") != drawn
    assert tokens("--temperature", "5", "--seed", "1", "--top-k", "1") == greedy
    assert tokens("--temperature", "5", "--seed", "1", "--top-p", "1e-6") == greedy


def test_without_a_tokenizer_text_is_null(alone, tmp_path, capsys):
    path = write_prompts(tmp_path, [{"token_ids": [5]}])
    args = ["generate", "--checkpoint", str(tiny_model("llama")), "--max-new-tokens", "2"]
    assert main([*args, "--prompt-file", path]) == 0
    assert json.loads(capsys.readouterr().out)["text"] is None
    assert main([*args, "--prompt", "a"]) == 1
    assert "prompt 0 is text, but the model came without a tokenizer" in capsys.readouterr().err


def test_convert_and_generate_from_what_was_written(alone, tmp_path, capsys):
    outputs = []
    checkpoint = model()
    for number, target in enumerate(("torch_dist", "legacy", "hf")):
        new = tmp_path / f"{number}-{target}"
        assert main(["convert", str(checkpoint), str(new), "--to", target]) == 0
        assert capsys.readouterr().out == f"wrote {new} ({target})\n"
        out = tmp_path / f"{number}.jsonl"
        assert main(["generate", "--checkpoint", str(new), "--prompt-file", write_prompts(tmp_path), "--output",
                     str(out), "--max-new-tokens", "5", "--ignore-eos", "--logprobs"]) == 0  # fmt: skip
        outputs.append(lines_of(out))
        checkpoint = new
    check_outputs(outputs[0], 5)
    assert outputs[1] == outputs[0] and outputs[2] == outputs[0]


def test_convert_refuses_what_it_cannot_do(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "there").mkdir()
    for src, dst, message in ((model(), tmp_path / "there", "exists"), (tmp_path / "no", tmp_path / "new", "no")):
        assert main(["convert", str(src), str(dst), "--to", "hf"]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert os.listdir(tmp_path) == ["there"] and not os.listdir(tmp_path / "there")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["convert", str(model()), str(tmp_path / "new"), "--to", "hf"]) == 1
    assert "one process" in capsys.readouterr().err


def test_ranks_fail_together_and_leave_nothing_behind(tmp_path):
    out = tmp_path / "out" / "out.jsonl"
    out.parent.mkdir()
    good = write_prompts(tmp_path)
    bad_line = tmp_path / "bad.jsonl"
    bad_line.write_text('{"prompt": "a"}\n{"token_ids": "b"}\n')
    base = ["generate", "--dcp", "2", "--output", str(out)]
    checkpoint = ["--checkpoint", str(model())]
    prompts = ["--prompt-file", good]
    cases = [
        ([[*base, *prompts, "--checkpoint", str(tmp_path / "none")]], "none"),
        ([[*base, *prompts, *checkpoint], [*base, *prompts, "--checkpoint", str(tmp_path / "none")]], "none"),
        ([[*base, *checkpoint, "--prompt-file", str(tmp_path / "none.jsonl")]], "none.jsonl"),
        ([[*base, *checkpoint, *prompts], [*base, *checkpoint, "--prompt-file", "/none.jsonl"]], "none.jsonl"),
        ([[*base, *checkpoint, "--prompt-file", str(bad_line)]], "bad.jsonl:2: 'token_ids' is not a list"),
        ([[*base, *checkpoint, "--prompt", ""]], "prompt 0 has 0 tokens"),
        ([[*base, *checkpoint, "--prompt", "x" * 65]], "prompt 0 has 65 tokens"),
        ([[*base, *checkpoint, "--prompt", "x" * 60, "--block-size", "4", "--num-blocks", "7"]], "holds 56"),
        ([[*base, *checkpoint, *prompts, "--bytes-per-rank", "100"]], "100 bytes"),
        ([["generate", "--dcp", "2", *checkpoint, *prompts, "--output", str(tmp_path)]], "is a directory"),
        (
            [["generate", "--dcp", "2", *checkpoint, *prompts, "--output", str(tmp_path / "no" / "f")]],
            "cannot be written",
        ),
    ]
    by_rank = run_on_ranks(2, run_main, [command for command, _ in cases], timeout=240)
    for number, (command, message) in enumerate(cases):
        for rank in (0, 1):
            code, stdout, stderr = by_rank[rank][number]
            assert code == 1 and stdout == "", (rank, command, stderr)
            assert stderr.startswith(f"[rank {rank}] megatron-dcp generate: error: ") and message in stderr, stderr
            assert stderr.count("\n") == 1, stderr
    assert os.listdir(out.parent) == []


@pytest.mark.mcore_line
def test_torchrun(tmp_path):
    out = tmp_path / "out.jsonl"
    done = torchrun(
        "-m", "megatron_dcp", "generate", "--checkpoint", str(model()), "--tp", "1", "--dcp", "2", "--kv-interleave",
        "2", "--block-size", "4", "--prompt-file", write_prompts(tmp_path), "--output", str(out), "--max-new-tokens",
        "9", "--ignore-eos", "--logprobs",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("megatron_dcp: tp 1 x dcp 2 (orthogonal), pp 1\n  ranks      dcp [0 1]; ") == 1
    check_outputs(lines_of(out), 9)


def test_the_example_in_the_help_of_generate_works():
    words = shlex.split(generate.EXAMPLE.replace("\\\n", " "))
    assert words[:3] == ["torchrun", "--nproc-per-node", "4"]
    done = torchrun(*words[3:], ranks=4)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 16


def test_the_example_in_the_help_of_convert_works(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert main(shlex.split(convert.EXAMPLE)[1:]) == 0
    assert (tmp_path / "build" / "quickstart-hf" / "model.safetensors").is_file()


DIES = """
import os, signal, sys
from megatron_dcp.cli import convert, generate, main
from megatron_dcp.engine.runner import ModelRunner
if os.environ["RANK"] == os.environ["DIES"]:
    step = ModelRunner.step
    steps = iter(range(3))
    def dying(self, batch):
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batch)
    ModelRunner.step = dying
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("dies", "survives"), [(1, 0), (0, 1)], ids=["follower", "driver"])
def test_a_rank_that_dies_ends_all_with_an_error_and_no_output(tmp_path, monkeypatch, dies, survives):
    monkeypatch.setenv("DIES", str(dies))
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    out = tmp_path / "out" / "out.jsonl"
    out.parent.mkdir()
    done = torchrun(
        str(script), "generate", "--checkpoint", str(model()), "--dcp", "2", "--timeout", "60", "--prompt", "abc",
        "--output", str(out), "--max-new-tokens", "20", "--ignore-eos",
    )  # fmt: skip
    assert done.returncode != 0
    assert f"[rank {survives}] megatron-dcp generate: error: " in done.stderr, done.stderr
    assert "died or hung" in done.stderr
    assert not out.exists()
    assert dies == 0 or os.listdir(out.parent) == []  # rank 0 writes; killed, it cannot take its temporary file away
