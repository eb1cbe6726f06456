"""What ``verify`` found: numbers for a program, a table and a verdict for a person. No torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

MEANING = {
    "rounding": "training forward against itself with noise in the last bit",
    "hf": "Hugging Face twin against training forward",
    "prefill": "training forward against prefill",
    "decode": "training forward against decode, token by token",
    "generate": "training forward against generated tokens",
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first token whose likeliest successor is another one.

    Attributes:
        position: Of the token in the text, from 0; what comes next is what the two disagree on.
        reference_token, token: What the reference and the other side find likeliest.
        reference_text, text: The same as text, with a tokenizer.
        margin: By how much the reference prefers its own, in logits. Small: rounding decides.
    """

    position: int
    reference_token: int
    token: int
    reference_text: str | None = None
    text: str | None = None
    margin: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One side against its reference, over the same tokens.

    Attributes:
        name: A key of `MEANING`.
        positions: Of the tokens compared.
        logprob_diffs: Absolute difference of the log-probability of the token that comes next, for each of them.
        max_logit_share: Largest logit difference, as a share of the range of the reference's logits.
        max_kl, mean_kl: KL divergence from the reference's distribution; ``None`` where only the log-probabilities of
            the generated tokens are known.
        different_argmax: At how many tokens another token is the likeliest.
        first_difference: The first of these.
        layers: Relative difference of the hidden states after the embedding (-1) and after every layer, numbered from
            0: the largest of any token.
        first_layer: The first of them that is above what rounding explains.
    """

    name: str
    positions: tuple[int, ...]
    logprob_diffs: tuple[float, ...]
    max_logit_share: float | None = None
    max_kl: float | None = None
    mean_kl: float | None = None
    different_argmax: int = 0
    first_difference: Difference | None = None
    layers: dict[int, float] | None = None
    first_layer: int | None = None

    @property
    def max_logprob_diff(self) -> float:
        """Infinite where a log-probability is not a number."""
        return max(math.inf if math.isnan(each) else each for each in self.logprob_diffs)

    @property
    def mean_logprob_diff(self) -> float:
        """Over all tokens compared; infinite where a log-probability is not a number."""
        mean = sum(self.logprob_diffs) / len(self.logprob_diffs)
        return math.inf if math.isnan(mean) else mean


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The outcome of ``verify``; ``str()`` of it is the report that a person reads.

    Attributes:
        settings: What was compared and how it ran, by name.
        comparisons: In the order of a token's way: hf, prefill, decode, generate.
        rounding: The training forward against itself with noise in the last bit of what each layer hands on: how far
            rounding alone may take any of the others.
        max_logprob_diff, mean_logprob_diff: The largest differences that pass.
    """

    settings: dict[str, Any]
    comparisons: tuple[Comparison, ...]
    rounding: Comparison
    max_logprob_diff: float
    mean_logprob_diff: float

    @property
    def passed(self) -> bool:
        """Whether all comparisons are within the thresholds."""
        return all(map(self._passes, self.comparisons))

    def _passes(self, each: Comparison) -> bool:
        return each.max_logprob_diff <= self.max_logprob_diff and each.mean_logprob_diff <= self.mean_logprob_diff

    def __getitem__(self, name: str) -> Comparison:
        """The comparison of that name; ``KeyError`` if there is none."""
        for each in self.comparisons:
            if each.name == name:
                return each
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Everything, of types that JSON has; numbers that JSON lacks are ``None``."""
        found = asdict(self) | {"passed": self.passed}
        entries = [found["rounding"], *found["comparisons"]]
        for entry, each in zip(entries, (self.rounding, *self.comparisons), strict=True):
            entry["max_logprob_diff"], entry["mean_logprob_diff"] = each.max_logprob_diff, each.mean_logprob_diff
            if each.layers is not None:
                entry["layers"] = {layer_name(layer): value for layer, value in each.layers.items()}
            entry["first_layer"] = None if each.first_layer is None else layer_name(each.first_layer)
        cleaned: dict[str, Any] = _without_nonfinite(found)
        return cleaned

    def __str__(self) -> str:
        width = max(map(len, self.settings))
        lines = [f"{name.ljust(width)}  {value}" for name, value in self.settings.items()]
        lines += ["", *self._table(), ""]
        details = [line for each in self.comparisons for line in _details(each)]
        return "\n".join([*lines, *details, *([""] if details else []), self._verdict()])

    def _table(self) -> list[str]:
        rows: list[tuple[str, ...]] = [
            ("", "", "log-prob difference", "", "logits", "KL", "", "other", "layers"),
            ("compared", "tokens", "max", "mean", "of range", "max", "mean", "argmax", "largest difference"),
        ]
        for each in (self.rounding, *self.comparisons):
            worst = max(each.layers.items(), key=lambda item: item[1]) if each.layers else None
            numbers = (each.max_logprob_diff, each.mean_logprob_diff, each.max_logit_share, each.max_kl, each.mean_kl)
            layer = "-" if worst is None else f"{worst[1]:.1e} ({layer_name(worst[0])})"
            rows.append(
                (each.name, str(len(each.positions)), *map(_number, numbers), str(each.different_argmax), layer)
            )
        widths = [max(len(row[i]) for row in rows if row[0] or i not in (2,)) for i in range(len(rows[0]))]
        widths[2] = max(widths[2], len("log-prob difference") - widths[3] - 2)
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    def _verdict(self) -> str:
        failed = [each for each in self.comparisons if not self._passes(each)]
        shown = failed or self.comparisons
        numbers = ", ".join(
            f"{kind} {max(getattr(each, f'{kind}_logprob_diff') for each in shown):.1e} "
            f"(allowed {getattr(self, f'{kind}_logprob_diff'):.1e})"
            for kind in ("max", "mean")
        )
        if not failed:
            return f"PASS  log-probabilities differ by {numbers}: trainer and generator agree."
        names = ", ".join(each.name for each in failed)
        return f"FAIL  {names}: log-probabilities differ by {numbers}.\n      {_advice(failed[0])}"


def layer_name(layer: int) -> str:
    """As the checkpoint names it."""
    return "embedding" if layer < 0 else f"decoder.layers.{layer}"


def _details(each: Comparison) -> list[str]:
    lines = []
    if each.first_layer is not None and each.layers is not None:
        name = layer_name(each.first_layer)
        lines.append(f"{each.name}: {name} is the first to differ, by {each.layers[each.first_layer]:.1e}")
    if (first := each.first_difference) is not None:
        reference, other = (
            f"{token}" + (f" {text!r}" if text is not None else "")
            for token, text in ((first.reference_token, first.reference_text), (first.token, first.text))
        )
        lines.append(
            f"{each.name}: first other token after position {first.position}: {reference} in the reference, {other} "
            f"here (margin {first.margin:.2g} logits)"
        )
    return lines


def _advice(first: Comparison) -> str:
    """What to do about the first comparison that failed; those after it mostly fail with it."""
    if first.name == "hf":
        where = ", though no layer stands out (the final norm or output layer, or more adds up than rounding explains)"
        if first.first_layer is not None:
            where = f" from {layer_name(first.first_layer)} on"
        return (
            f"The checkpoint is not its Hugging Face twin{where}: convert it again, and compare the two configurations "
            "(family, RoPE base and scaling, heads, norm epsilon)."
        )
    if first.first_layer is None:
        return (
            "No layer stands out: the final norm or the output layer differs, or more adds up than rounding explains. "
            "See whether it is there with --dtype float32; a difference that you know and accept is allowed with "
            "--max-logprob-diff."
        )
    if first.name == "prefill":
        return (
            f"Do not trust this deployment: {layer_name(first.first_layer)} computes something else than in training. "
            "See whether it does so at --dcp 1 and with --prefill replicated, and report it with this output."
        )
    return (
        "Prefill agrees, decode does not: the fault is in what is read back from the KV cache. See whether it is there "
        "at --dcp 1 and with another --exchange, and report it with this output."
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nonfinite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
