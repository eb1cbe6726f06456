"""The numbers of a comparison, and what a person reads of them."""

import json
import math
from dataclasses import replace

import pytest
import torch

from megatron_dcp.verification import Comparison, Difference, VerifyReport
from megatron_dcp.verification.compare import LayerDifferences, Rows, compare_logits


def test_rows_are_what_torch_says():
    generator = torch.Generator().manual_seed(0)
    reference, other = (torch.randn(150, 40, generator=generator) for _ in range(2))
    targets = torch.randint(40, (150,), generator=generator).tolist()
    rows = compare_logits(reference, other, targets, first=7)
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert torch.allclose(torch.from_numpy(rows.kl), kl)
    assert rows.position.tolist() == list(range(7, 157))
    assert rows.reference_logprob.tolist() == pytest.approx([float(p[i, t]) for i, t in enumerate(targets)])
    assert rows.logprob.tolist() == pytest.approx([float(q[i, t]) for i, t in enumerate(targets)])
    assert rows.argmax.tolist() == other.argmax(-1).tolist()
    margin = reference.amax(-1) - reference.gather(1, other.argmax(-1, keepdim=True))[:, 0]
    assert rows.margin.tolist() == pytest.approx(margin.tolist(), abs=1e-6)
    assert rows.logit.tolist() == pytest.approx((reference - other).abs().amax(-1).tolist())


def test_of_several_runs_the_worst_counts_at_every_token():
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 1.0]])
    first, second = logits.clone(), logits.clone()
    first[0, 0] += 1.0
    second[1, 2] += 2.0
    runs = [compare_logits(logits, other, [0, 2], 5) for other in (first, second)]
    worst = Rows.worst(runs)
    assert worst.logprob.tolist() == [runs[0].logprob[0], runs[1].logprob[1]]
    assert worst.logit.tolist() == [1.0, 2.0] and worst.position.tolist() == [5, 6]


def test_layers_are_compared_at_the_positions_of_the_rank_and_by_their_size():
    layers = LayerDifferences()
    reference = {0: torch.ones(4, 9), 1: torch.full((4, 9), 100.0)}
    layers.add(reference, {0: torch.ones(2, 9), 1: torch.full((2, 9), 101.0)}, [1, 3])
    layers.add(reference, {0: torch.zeros(0, 9), 1: torch.zeros(0, 9)}, [])
    assert layers.worst == {0: 0.0, 1: pytest.approx(0.01)}
    layers.add(reference, {0: torch.full((1, 9), torch.nan)}, [0])
    assert layers.worst[0] == math.inf
    assert LayerDifferences.merged([{2: 1.0}, {0: 0.5, 1: 0.1}, {0: 0.7}]) == {0: 0.7, 1: 0.1, 2: 1.0}


def comparison(name="prefill", diffs=(1e-6, 3e-6), **changes) -> Comparison:
    fields = dict(max_logit_share=1e-6, max_kl=1e-9, mean_kl=1e-10, layers={-1: 0.0, 0: 1e-7, 1: 2e-7})
    return Comparison(name=name, positions=(4, 5), logprob_diffs=diffs, **{**fields, **changes})


def report(*comparisons: Comparison) -> VerifyReport:
    return VerifyReport(
        settings={"model": "here", "ranks": "tp 1"},
        comparisons=comparisons,
        rounding=comparison("rounding"),
        max_logprob_diff=1e-4,
        mean_logprob_diff=2e-5,
    )


def test_a_report_that_passes():
    good = report(comparison("prefill"), comparison("decode"))
    assert good.passed and good["decode"].mean_logprob_diff == pytest.approx(2e-6)
    last = str(good).splitlines()[-1]
    assert last.startswith("PASS  log-probabilities differ by max 3.0e-06 (allowed 1.0e-04), mean 2.0e-06")
    with pytest.raises(KeyError):
        good["hf"]


@pytest.mark.parametrize("diffs", [(0.0, 2e-4), (3e-5, 3e-5), (0.0, math.nan), (math.inf, 0.0)])
def test_what_is_too_large_or_no_number_fails(diffs):
    bad = report(comparison("prefill", diffs=diffs, layers={-1: 0.0, 0: 1.0}, first_layer=0), comparison("decode"))
    assert not bad.passed
    assert "FAIL  prefill:" in str(bad) and "decoder.layers.0 computes something else than in training" in str(bad)
    loaded = json.loads(json.dumps(bad.to_dict(), allow_nan=False))
    assert loaded["passed"] is False and loaded["comparisons"][0]["first_layer"] == "decoder.layers.0"


@pytest.mark.parametrize(
    "name,first_layer,advice",
    [
        ("hf", 3, "is not its Hugging Face twin from decoder.layers.3 on: convert it again"),
        ("hf", None, "is not its Hugging Face twin, though no layer stands out"),
        ("decode", 1, "Prefill agrees, decode does not"),
        ("decode", None, "No layer stands out"),
        ("generate", None, "No layer stands out"),
    ],
)
def test_the_verdict_says_what_to_do(name, first_layer, advice):
    layers = {layer: 1.0 for layer in range(-1, 4)}
    bad = comparison(name, diffs=(1.0, 1.0), layers=layers, first_layer=first_layer)
    assert advice in str(report(bad))


def test_the_first_other_token_is_shown_with_its_text():
    first = Difference(position=9, reference_token=5, token=7, reference_text=" a", text=" b", margin=0.25)
    shown = str(report(comparison(first_difference=first, different_argmax=1)))
    assert "prefill: first other token after position 9: 5 ' a' in the reference, 7 ' b' here (margin 0.25" in shown
    bare = replace(first, reference_text=None, text=None)
    assert "9: 5 in the reference, 7 here" in str(report(comparison(first_difference=bare)))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    from megatron_dcp.verification.plot import plot

    path = tmp_path / f"a.{suffix}"
    plot(report(comparison("prefill"), comparison("decode", diffs=(0.0, 0.5))), str(path))
    assert path.stat().st_size > 1000
