"""The passes of ``verify`` over one text: with noise, by the twin, by prefill and decode, and what the engine said."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dcp.cache import WindowPool
from megatron_dcp.engine.batch import SeqStep, StepBatch
from megatron_dcp.engine.llm import LLM
from megatron_dcp.engine.places import place_tokens
from megatron_dcp.engine.runner import ModelRunner
from megatron_dcp.layers import is_striped
from megatron_dcp.layers.forward import cached_as, recorded_layers, rounding_noise, training_forward
from megatron_dcp.layers.specs import unwrap
from megatron_dcp.verification.compare import LayerDifferences, Rows, compare_logits
from megatron_dcp.verification.twin import Twin

NOISE_RUNS = 3


@dataclass(frozen=True)
class Found:
    """What one rank knows of a comparison: rows on the driver, layers of its own stage."""

    name: str
    rows: Rows | None
    layers: dict[int, float]


class Passes:
    """The text, and what the training forward says to it: logits on the last stage, states of the own layers."""

    def __init__(self, llm: LLM, text: list[int], logits: Tensor | None, states: dict[int, Tensor]) -> None:
        self.llm, self.inputs, self.targets = llm, text[:-1], text[1:]
        self.vocab_size = llm.prompt_reader.vocab_size
        self.logits = None if logits is None else logits[:, : self.vocab_size]
        self.states = states

    def rounding(self, trained: Any) -> Found:
        """The training forward against itself with noise in the last bit, keys and values as the cache stores them.

        For every token the worst of some runs.
        """
        layers, runs = LayerDifferences(), []
        kv_dtype = self.llm.runner.kv_dtype
        for seed in range(NOISE_RUNS):
            with rounding_noise(trained, seed), cached_as(trained, kv_dtype), recorded_layers(trained) as states:
                logits = training_forward(trained, self.inputs, self.llm.groups)
            layers.add(self.states, states, range(len(self.inputs)))
            if self.llm.is_driver:
                assert self.logits is not None and logits is not None
                runs.append(compare_logits(self.logits, logits[:, : self.vocab_size], self.targets, 0))
        return Found("rounding", Rows.worst(runs) if runs else None, layers.worst)

    def generated(self, prompt_len: int, logprobs: list[float]) -> Found:
        """The log-probabilities that the engine gave to its own tokens."""
        if not self.llm.is_driver:
            return Found("generate", None, {})
        assert self.logits is not None
        first = prompt_len - 1
        logits = self.logits[first:]
        rows = compare_logits(logits, logits, self.targets[first:], first)
        chosen = torch.tensor(self.targets[first:], device=logits.device)
        likeliest = torch.tensor(rows.reference_argmax, device=logits.device)
        margin = logits.gather(1, likeliest[:, None]) - logits.gather(1, chosen[:, None])
        return Found(
            "generate",
            replace(
                rows,
                logprob=torch.tensor(logprobs, dtype=torch.float64).numpy(),
                argmax=chosen.cpu().numpy(),
                margin=margin[:, 0].double().cpu().numpy(),
            ),
            {},
        )

    def twin(self, twin: Twin) -> Found:
        """The training forward against ``transformers``, which is the reference here."""
        layers = LayerDifferences()
        for layer in range(-1, unwrap(self.llm.model).config.num_layers):
            theirs = twin.states(layer)
            if layer in self.states:
                layers.add({layer: theirs}, {layer: self.states[layer]}, range(len(theirs)))
        logits, rows = twin.logits(), None
        if self.llm.is_driver:
            assert self.logits is not None
            rows = compare_logits(logits, self.logits, self.targets, 0)
        return Found("hf", rows, layers.worst)

    def steps(self, name: str, runner: ModelRunner, runs: list[tuple[int, int, int]], compare_from: int = 0) -> Found:
        """Feed the text to a fresh cache and compare: tokens ``start`` to ``stop``, ``step`` at a time, of each run."""
        layout, window = runner.layout, None
        table = list(range(layout.blocks_for(len(self.inputs))))
        if runner.window is not None:
            window = WindowPool(runner.window.num_blocks, runner.window.tokens, layout.logical_block_tokens)
            window.start(0, ())
        layers, rows = LayerDifferences(), []
        for start, stop, step in runs:
            for first in range(start, stop, step):
                last = min(first + step, stop)
                wanted = last - first if first >= compare_from else 0
                in_window: list[int] = []
                if window is not None:
                    window.slide(0, first)
                    window.reserve(0, layout.blocks_for(last))
                    in_window = window.pool.table(0)
                batch = StepBatch([SeqStep(self.inputs[first:last], first, table, wanted, in_window)])
                with recorded_layers(runner.model) as states:
                    logits = runner.step(batch)
                if not wanted:
                    continue
                layers.add(self.states, states, _positions(runner, batch))
                if self.llm.is_driver:
                    assert self.logits is not None
                    rows.append(compare_logits(self.logits[first:last], logits, self.targets[first:last], first))
        return Found(name, Rows.joined(rows) if rows else None, layers.worst)


def _positions(runner: ModelRunner, batch: StepBatch) -> Any:
    """Of the tokens that this rank computed."""
    striped = is_striped([len(seq.token_ids) for seq in batch.seqs], runner.layout, runner.prefill)
    return place_tokens(batch, runner.layout, runner.rank, striped).positions_T


def make_runner(llm: LLM, tokens: int) -> ModelRunner:
    return ModelRunner(
        llm.model,
        llm.groups,
        cache=replace(llm.cache_config, num_blocks=llm.layout.blocks_for(tokens), bytes_per_rank=None),
        engine=llm.engine_config,
        vocab_size=llm.prompt_reader.vocab_size,
        max_sequence_length=llm.prompt_reader.max_sequence_length,
    )


def clear_pool(runner: ModelRunner) -> None:
    """Clear the pool: keys that prefill wrote would hide that decode did not."""
    for pool in runner.pools:
        pool.clear()
