"""The examples run as their first lines say, on the checkpoint that ships with the project."""

from __future__ import annotations

import shlex

from cli_runs import ROOT, torchrun


def run(script: str) -> list[str]:
    """Lines of what the command in the example's docstring prints."""
    (line,) = (line for line in (ROOT / script).read_text().splitlines() if line.startswith("torchrun "))
    words = shlex.split(line)
    at = words.index(script)
    done = torchrun(*words[at:], ranks=int(words[words.index("--nproc-per-node") + 1]))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_serve() -> None:
    lines = run("examples/serve.py")
    whole = [line for line in lines if line.endswith("(length)")]
    assert sorted(line[:3] for line in whole) == ["[0]", "[1]", "[2]"]
    assert all(prompt in "".join(whole) for prompt in ("The harbour was", "At dawn", "Nobody knew"))
    assert lines[-1].startswith("3 requests, 48 tokens; KV cache of the group: 8192 tokens")


def test_generate() -> None:
    *streamed, _, first, second, cache = run("examples/generate.py")  # the text may have several lines
    assert streamed[0].startswith("The harbour was") and len("".join(streamed)) > 20
    outputs = [first, second]
    assert cache.startswith("KV cache: ")
    assert [line[:3] for line in outputs] == ["[0]", "[1]"]
    assert all("mean log-probability -" in line for line in outputs)
