"""The page by itself: its data, its safety, and, where there is a browser, that it runs."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from megatron_dcp.profiling.advice import Advice
from megatron_dcp.profiling.clock import KINDS, PARTS, Step, key_of
from megatron_dcp.profiling.page import MAX_SEGMENTS, MAX_STEPS, page, page_data
from megatron_dcp.profiling.report import PHASES, KVPoint, ProfileReport, RankRun, phase_report

HOSTILE = '</script><script>console.error("broken")</script><!-- <b>&amp;'


def step(number, *, phase="decode", attention=0.002, rest=0.003):
    parts = [0.0] * (len(KINDS) * len(PARTS))
    keys = (key_of("full attention", "attention"), key_of("engine", "rest"))
    for key, seconds in zip(keys, (attention, rest), strict=True):
        parts[key] = seconds
    return Step(
        phase=phase,
        tokens=2,
        start_s=0.01 * number,
        seconds=attention + rest,
        parts=tuple(parts),
        times=(0.0, attention),
        keys=keys,
        marks=4,
    )


def steps_of(rank, count):
    """One of prefill, the others of decode; the higher the rank, the longer they take."""
    for number in range(count):
        yield step(number, phase="decode" if number else "prefill", attention=0.002 + 0.001 * rank)


def report(ranks=3, steps=5, window_held=None):
    runs = tuple(RankRun(rank, rank, 0, rank == 0, list(steps_of(rank, steps))) for rank in range(ranks))
    return ProfileReport(
        settings={"model": HOSTILE, "ranks": "dcp 3"},
        phases=tuple(each for phase in PHASES if (each := phase_report(phase, runs)) is not None),
        runs=runs,
        kv=tuple(
            KVPoint(0.01 * i, 0.2 * i, tuple(0.1 * i for _ in range(ranks)), 0, window_held) for i in range(steps)
        ),
        mark_s=1e-6,
        preemptions=1,
        prefix_hits=0.25,
        advice=(Advice("none", HOSTILE),),
    )


def test_numbers_of_a_phase():
    phase = report()["decode"]
    assert (phase.steps, phase.tokens, phase.phase) == (4, 8, "decode")
    assert (
        phase.wall
        == pytest.approx(4 * 0.006)
        == pytest.approx(sum(map(sum, (p.values() for p in phase.table.values()))))
    )
    assert set(phase.table) == {"full attention", "engine"}
    assert phase.table["full attention"]["attention"] == pytest.approx(4 * 0.003)
    assert phase.slowest.rank == 2
    assert phase.imbalance == pytest.approx(0.004 / 0.003 - 1) and phase.spread == pytest.approx(1.0)
    assert phase.engine_share == pytest.approx(0.5) and phase.communication_share == 0
    assert phase.gpu_wait_share is None
    assert report().cost_share("decode") == pytest.approx(4e-6 / 0.005)


def test_waiting_for_the_driver_is_no_communication_of_the_model():
    parts = [0.0] * (len(KINDS) * len(PARTS))
    parts[key_of("engine", "communication")], parts[key_of("experts", "communication")] = 3.0, 1.0
    one = replace(step(0), parts=tuple(parts), seconds=4.0, waited_s=1.0)
    phase = phase_report("decode", [RankRun(0, 0, 0, False, [one])])
    assert phase.communication_share == 0.25 and phase.ranks[0].communication == 1 and phase.ranks[0].compute == 0
    assert phase.gpu_wait_share == 0.25
    assert phase_report("prefill", [RankRun(0, 0, 0, False, [one])]) is None


def test_the_report_for_a_person_and_for_a_program():
    text = str(report())
    assert "at most 80% of the blocks held;" in text
    assert "at most 80% of the blocks held (75% of the windows' own);" in str(report(window_held=0.75))
    assert "decode: 4 steps, 8 tokens, 0.024 s" in text and "slowest rank 2" in text and "preemptions: 1" in text
    found = json.loads(json.dumps(report().to_dict(), allow_nan=False))
    assert [each["phase"] for each in found["phases"]] == ["prefill", "decode"]
    assert found["ranks"][1]["steps"][0]["parts"] == {
        "attention": pytest.approx(0.003), "communication": 0, "gemm": 0, "rest": pytest.approx(0.003),
    }  # fmt: skip


class Collector(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.scripts, self.data = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


def test_the_page_is_whole_and_nothing_in_it_can_break_it():
    collector = Collector()
    collector.feed(page(report()))
    collector.close()
    assert len(collector.scripts) == 2
    data = json.loads(collector.scripts[0])
    assert data == json.loads(json.dumps(page_data(report()))) and data["advice"] == [HOSTILE]
    links = [value for _, attrs in collector.tags for name, value in attrs.items() if name in ("src", "href")]
    assert links == ["data:,"] and "http" not in page(report())


def test_long_runs_are_cut():
    data = page_data(report(ranks=1, steps=MAX_STEPS + 5))
    (rank,) = data["ranks"]
    assert len(rank["steps"]) == MAX_STEPS and "first 3,000 of 3,005 steps" in data["notes"]
    many = replace(step(0), times=tuple(0.0 for _ in range(MAX_SEGMENTS // 4)), keys=(1,) * (MAX_SEGMENTS // 4))
    one = report(ranks=1)
    (rank,) = page_data(replace(one, phases=(), runs=(RankRun(0, 0, 0, True, [many] * 8),)))["ranks"]
    assert sorted(rank["segments"]) == [0, 2, 4, 6]  # every second one


@pytest.fixture
def browser():
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium here: apt-get install chromium")
    return found


@pytest.mark.parametrize(("ranks", "window_held"), [(1, 0.75), (3, None)])
def test_in_a_browser_it_runs_without_an_error_and_has_a_row_per_rank(browser, tmp_path, ranks, window_held):
    path = tmp_path / "page.html"
    path.write_text(page(report(ranks=ranks, window_held=window_held)), encoding="utf-8")
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}",
            "--enable-logging=stderr", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    assert len(re.findall(r'class="row rank"', done.stdout)) == ranks
    assert done.stdout.count("<canvas") == ranks + 2
    assert done.stdout.count("<span>the same of layers with a sliding window</span>") == (window_held is not None)
    assert "Preemptions: 1; 25% of the prompt tokens" in done.stdout  # the last thing that its script writes
    assert "&lt;/script&gt;" in done.stdout
