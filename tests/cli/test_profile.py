"""``megatron-dcp profile`` as a user runs it: what it prints, what it writes, and how it fails."""

import json
import os

from cli_runs import model, run_main, write_prompts

from workers import run_on_ranks


def test_random_prompts_and_a_file_of_prompts(tmp_path):
    base = ["profile", "--checkpoint", str(model()), "--dcp", "2", "--max-new-tokens", "3", "--block-size", "4"]
    html, numbers = tmp_path / "out.html", tmp_path / "out.json"
    commands = [
        [[*base, "--prompt-tokens", "20", "--batch", "2", "--html", str(html), "--json", str(numbers)]],
        [[*base, "--prompt-file", write_prompts(tmp_path)]],
    ]
    first, second = run_on_ranks(2, run_main, commands)
    assert [each[0] for each in first + second] == [0] * 4, first
    assert [each[1:] for each in second] == [("", "")] * 2
    lines = first[0][1].splitlines()
    assert lines[0].split() == ["model", str(model())] and "2 prompts of 20 tokens" in first[0][1]
    assert any(line.startswith("prefill: 1 steps, 40 tokens") for line in lines)
    assert any(line.startswith("decode: 2 steps, 4 tokens") for line in lines) and "advice" in lines
    assert "3 prompts of 3 to 40 tokens" in first[1][1]
    found = json.loads(numbers.read_text())
    assert len(found["ranks"]) == 2 and found["settings"]["model"] == str(model())
    assert html.read_text().startswith("<!doctype html>")


def test_ranks_fail_together_in_one_line(tmp_path):
    base = ["profile", "--checkpoint", str(model()), "--dcp", "2"]
    tokens = ["--prompt-tokens", "8"]
    cases = [
        ([[*base, *tokens, "--cuda-graphs", "full"]], "profile without --cuda-graphs"),
        ([[*base, *tokens, "--html", str(tmp_path)]], "is a directory"),
        ([[*base, *tokens, "--trace", str(tmp_path / "no" / "t.json")]], "make the folder"),
        ([[*base, "--prompt-file", write_prompts(tmp_path), "--batch", "2"]], "--batch is the number of prompts of"),
        ([[*base, "--prompt-tokens", "100"]], "prompt 0 has 100 tokens"),
        ([["profile", "--checkpoint", str(tmp_path / "none"), "--dcp", "2", *tokens]], "none"),
        ([["profile", "--checkpoint", str(model()), *tokens]], "profile runs one replica, of 1 rank"),
    ]
    by_rank = run_on_ranks(2, run_main, [command for command, _ in cases])
    for number, (command, message) in enumerate(cases):
        for rank in (0, 1):
            code, stdout, stderr = by_rank[rank][number]
            assert code == 1 and stdout == "", (rank, command, stderr)
            assert stderr.startswith(f"[rank {rank}] megatron-dcp profile: error: ") and message in stderr, stderr
            assert stderr.count("\n") == 1, stderr
    assert os.listdir(tmp_path) == ["prompts.jsonl"]
