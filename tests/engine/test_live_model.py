"""Generation between the steps of a training loop, from the very model that is trained."""

import pytest
import torch
import torch.nn.functional as F
from megatron_models import random_state, sharded_model, tiny_config, whole_model

from megatron_dcp import LLM, CacheConfig, SamplingParams, parallel_state
from megatron_dcp._cpu import megatron_on_cpu
from workers import run_on_ranks

CONFIG = tiny_config()


def train_step(model, optimizer, step: int) -> float:
    """One step on random tokens, with Megatron's own forward; the loss."""
    tokens = torch.randint(0, 100, (1, 17), generator=torch.Generator().manual_seed(step))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
    with megatron_on_cpu():
        logits = model(inputs, torch.arange(16)[None], mask)
    loss = F.cross_entropy(logits[0].float(), labels[0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def greedy_by_forward(model, prompt: list[int], steps: int) -> list[int]:
    """Tokens by Megatron's training forward alone, without any cache."""
    tokens = list(prompt)
    for _ in range(steps):
        n = len(tokens)
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)[None, None]
        with megatron_on_cpu(), torch.no_grad():
            logits = model(torch.tensor([tokens]), torch.arange(n)[None], mask)
        tokens.append(int(logits[0, -1, :100].argmax()))
    return tokens[len(prompt) :]


def train(rank, world, dcp, generates: bool):
    """Losses of a short training, and what the model said on the way next to what its own forward says."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    mpu.initialize_model_parallel()  # the training stack's own groups: dp = world
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # a CPU's, which draws nothing
    state = random_state(CONFIG)
    model = whole_model(CONFIG, state).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    llm = None
    if generates:
        llm = LLM(model, decode_context_parallel_size=dcp, cache=CacheConfig(block_size=4), vocab_size=100)
    losses, said = [], []
    params = SamplingParams(max_tokens=7)
    for step in range(3):
        losses.append(train_step(model, optimizer, step))
        if llm is not None:
            outputs = llm.generate([[1, 2, 3], [9]], params)
            said.append([(o.token_ids, greedy_by_forward(model, o.prompt_token_ids, 7)) for o in outputs])
    names = [name for name, _ in model.named_parameters()]
    return losses, said, names


@pytest.mark.mcore_line
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_generates_between_its_training_steps(world):
    plain = run_on_ranks(world, train, world, False)
    mixed = run_on_ranks(world, train, world, True)
    for (losses, _, names), (mixed_losses, said, mixed_names) in zip(plain, mixed, strict=True):
        assert mixed_losses == losses  # to the bit: generation leaves no trace in training
        assert mixed_names == names
        assert losses[0] != losses[-1]
        for step in said:
            for tokens, by_forward in step:
                assert tokens == by_forward
        assert said[0] != said[-1]  # the live weights were used


def flags_and_storage(rank, world):
    parallel_state.initialize_model_parallel()
    model = sharded_model(CONFIG, random_state(CONFIG)).train()
    model.decoder.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    storage = {name: p.data_ptr() for name, p in model.named_parameters()}
    llm = LLM(model, vocab_size=100)
    seen = []
    llm.generate([1, 2], SamplingParams(max_tokens=3), on_token=lambda *_: seen.append(model.training))
    assert seen == [False] * 3
    try:
        llm.generate([1, 2], SamplingParams(max_tokens=3), on_token=lambda *_: 1 / 0)
    except ZeroDivisionError:
        pass
    assert {name: module.training for name, module in model.named_modules()} == before
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == storage
    assert all(p.requires_grad for p in model.parameters())
    return llm.generate([1, 2], SamplingParams(max_tokens=3))[0].token_ids


def test_training_flags_and_parameters_are_left_as_they_were():
    assert len(run_on_ranks(1, flags_and_storage)[0]) == 3
