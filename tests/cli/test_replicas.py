"""Prompts shared out over replicas: every prompt once, answers in order, nobody in anybody's way."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cli_runs import lines_of, model, run_main, torchrun, write_prompts
from torch import distributed

from megatron_dcp import RequestOutput, SamplingParams, parallel_state
from megatron_dcp.cli import replicas
from megatron_dcp.engine.loading import replica_place
from megatron_dcp.engine.prompts import PromptReader
from workers import run_on_ranks

TIME_LIMIT_S = 2


class FakeLLM:
    """Answers with the prompt reversed; what a replica does besides is up to the test."""

    def __init__(self, behaviour: Any = None) -> None:
        self.groups = parallel_state.get_process_group_collection()
        self.prompt_reader = PromptReader(vocab_size=100, max_sequence_length=50, eos_token_ids=[99])
        self.behaviour = behaviour
        self.prompts: list[list[int]] | None = None

    def generate(self, prompts: Any, params: Any, on_token: Any = None, progress: bool = False) -> list[RequestOutput]:
        assert prompts, "a replica without prompts has nothing to call this for"
        self.prompts = prompts
        if self.behaviour is not None:
            self.behaviour()
        return [
            RequestOutput(
                index=index,
                prompt_token_ids=prompt,
                token_ids=prompt[::-1],
                text=None,
                finish_reason="length",
                logprobs=None,
            )
            for index, prompt in enumerate(prompts)
        ]


def answers(outputs: list[RequestOutput]) -> list[tuple[int, list[int], list[int]]]:
    return [(each.index, each.prompt_token_ids, each.token_ids) for each in outputs]


def share_case(rank: int, world: int, sizes: dict[str, Any], prompts: list[list[int]]) -> Any:
    parallel_state.initialize_model_parallel(**sizes)
    llm: Any = FakeLLM()
    outputs = replicas.generate(llm, prompts, SamplingParams())
    return replica_place(llm.groups), llm.prompts, answers(outputs)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_every_prompt_is_answered_once_and_in_order(count: int) -> None:
    prompts = [[i, i + 1] for i in range(count)]
    want = [(i, [i, i + 1], [i + 1, i]) for i in range(count)]
    by_rank = run_on_ranks(4, share_case, dict(decode_context_parallel_size=2), prompts)
    for rank, (place, share, outputs) in enumerate(by_rank):
        assert place == (rank // 2, 2)
        assert share == (prompts[rank // 2 :: 2] or None) and outputs == want


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        (dict(pipeline_model_parallel_size=2), [(0, 2), (1, 2), (0, 2), (1, 2)]),  # stages are the outermost ranks
        (dict(tensor_model_parallel_size=2), [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (dict(pipeline_model_parallel_size=2, decode_context_parallel_size=2), [(0, 1)] * 4),
    ],
)
def test_places_of_replicas(sizes: dict[str, Any], places: list[tuple[int, int]]) -> None:
    assert [place for place, *_ in run_on_ranks(4, share_case, sizes, [[1]])] == places


def slow_case(rank: int, world: int, prompts: list[list[int]]) -> Any:
    parallel_state.initialize_model_parallel()
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=TIME_LIMIT_S), distributed.group.WORLD)
    llm: Any = FakeLLM(lambda: time.sleep(2 * TIME_LIMIT_S) if rank == 1 else None)
    return answers(replicas.generate(llm, prompts, SamplingParams()))


def test_a_replica_may_take_longer_than_the_time_limit_of_collectives() -> None:
    want = [(i, [i], [i]) for i in range(2)]
    assert run_on_ranks(3, slow_case, [[0], [1]]) == [want] * 3


def failing_case(rank: int, world: int, error: Exception) -> str:
    parallel_state.initialize_model_parallel()

    def fail() -> None:
        raise error

    started = time.monotonic()
    llm: Any = FakeLLM({0: None, 1: fail, 2: lambda: time.sleep(4)}[rank])
    with pytest.raises(type(error)) as caught:
        replicas.generate(llm, [[1], [2], [3], [4], [5]], SamplingParams())
    assert rank == 2 or time.monotonic() - started < 4, "an idle replica hears of it before a busy one is done"
    return str(caught.value)


def test_an_error_of_a_replica_reaches_all_and_names_the_prompt_by_its_place_among_all() -> None:
    own = "prompt 4 is of no use, unlike prompt 1"
    first, second, third = run_on_ranks(3, failing_case, ValueError("prompt 1 is of no use, unlike prompt 1"))
    assert second == own and first == third == f"rank 1 failed with ValueError: {own}"
    first, second, third = run_on_ranks(3, failing_case, RuntimeError("prompt 1"))
    assert second == "prompt 1" and first == third == "rank 1 failed with RuntimeError: prompt 1"


def refused_case(rank: int, world: int) -> str:
    parallel_state.initialize_model_parallel()
    llm: Any = FakeLLM()
    with pytest.raises(ValueError) as caught:
        replicas.generate(llm, [[1], [2], [3], [100]], SamplingParams())
    assert llm.prompts is None
    return str(caught.value)


def test_prompts_are_checked_by_all_before_any_replica_starts() -> None:
    for message in run_on_ranks(2, refused_case):
        assert message.startswith("prompt 3 has token id 100")


# --- the command line


DRAWN = ["--temperature", "2", "--seed", "7", "--max-new-tokens", "12", "--ignore-eos", "--logprobs"]


def command(out: Path, prompts: str, *options: str) -> list[list[str]]:
    line = ["generate", "--checkpoint", str(model()), "--prompt-file", prompts, "--output", str(out), *options]
    return [[*line, *DRAWN, "--block-size", "4"]]


def check_same(ours: list[dict], theirs: list[dict]) -> None:
    """Up to the rounding of log-probabilities, which depends on what is in a batch."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.pop("logprobs") == pytest.approx(b.pop("logprobs"), abs=1e-4)
        assert a == b


@pytest.mark.mcore_line
@pytest.mark.parametrize(("world", "options"), [(2, []), (4, ["--dcp", "2"]), (4, ["--dcp", "2", "--pp", "2"])])
def test_drawn_tokens_do_not_depend_on_the_number_of_replicas(world: int, options: list[str], tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path)
    alone, all_ranks = tmp_path / "alone.jsonl", tmp_path / "all.jsonl"
    ((code, _, stderr),) = run_on_ranks(1, run_main, [command(alone, prompts)])[0]
    assert code == 0, stderr
    for ((code, stdout, stderr),) in run_on_ranks(world, run_main, [command(all_ranks, prompts, *options)]):
        assert code == 0 and stdout == "", stderr
    check_same(lines_of(all_ranks), lines_of(alone))


def test_fewer_prompts_than_replicas() -> None:
    words = ["generate", "--checkpoint", str(model()), "--prompt", "abc", "--max-new-tokens", "4", "--ignore-eos"]
    (first,), *others = run_on_ranks(3, run_main, [[words]])
    assert first[0] == 0, first[2]
    (output,) = map(json.loads, first[1].splitlines())
    assert output["index"] == 0 and len(output["token_ids"]) == 4
    assert all(result[:2] == (0, "") for (result,) in others)


def test_an_error_of_one_replica_is_one_line_of_every_rank(tmp_path: Path) -> None:
    prompts = write_prompts(
        tmp_path, [{"token_ids": [1]}, {"token_ids": [2]}, {"token_ids": [3]}, {"prompt": "x" * 40}]
    )
    out = tmp_path / "out" / "out.jsonl"
    out.parent.mkdir()
    results = run_on_ranks(2, run_main, [command(out, prompts, "--num-blocks", "5")])
    for rank, ((code, stdout, stderr),) in enumerate(results):
        assert code == 1 and stdout == "" and stderr.count("\n") == 1
        assert stderr.startswith(f"[rank {rank}] megatron-dcp generate: error: ")
        assert "prompt 3 needs 51 tokens of KV cache" in stderr
    assert list(out.parent.iterdir()) == []


FAILS = """
import os, sys, time
from megatron_dcp.cli import main
from megatron_dcp.engine.core import Engine
def slow_or_failing(self):
    if os.environ["RANK"] == "1":
        raise ValueError("this replica is out of luck")
    time.sleep(600)
Engine.compute = slow_or_failing
sys.exit(main(sys.argv[1:]))
"""


def test_under_torchrun_an_error_of_one_replica_ends_the_busy_ones(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    done = torchrun(str(script), "generate", "--checkpoint", str(model()), "--prompt-file", write_prompts(tmp_path))
    assert done.returncode != 0 and done.stdout == ""
    assert "[rank 1] megatron-dcp generate: error: this replica is out of luck\n" in done.stderr, done.stderr
