"""Megatron's own forward on the ranks of a model, against the whole model on one rank."""

import pytest
import torch
from megatron_models import random_state, sharded_model, single_rank_groups, tiny_config, training_logits, whole_model

from megatron_dcp import load_model, parallel_state
from models import tiny_model
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line

TEXT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]


def tensor_parallel_case(rank, world):
    """Largest difference from one rank's logits, with and without noise, and how far the noise moves them."""
    from megatron.core.tensor_parallel import random

    from megatron_dcp.layers.forward import recorded_layers, rounding_noise, training_forward

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    groups, alone = parallel_state.get_process_group_collection(), single_rank_groups()
    config = tiny_config()
    model, oracle = (make(config, random_state(config)) for make in (sharded_model, whole_model))
    before = random.get_cuda_rng_tracker()
    with recorded_layers(model) as states, recorded_layers(oracle) as wanted:
        ours, theirs = training_forward(model, TEXT, groups), training_forward(oracle, TEXT, alone)
    assert random.get_cuda_rng_tracker() is before, "the stand-in is gone"
    assert ours.shape == (len(TEXT), config.padded_vocab_size) and not ours.requires_grad
    assert list(states) == list(wanted) == [-1, 0, 1]
    assert all(torch.allclose(states[layer], wanted[layer], rtol=1e-4, atol=1e-5) for layer in states)
    with rounding_noise(model, 0), rounding_noise(oracle, 0):
        moved, theirs_moved = training_forward(model, TEXT, groups), training_forward(oracle, TEXT, alone)
    assert torch.equal(training_forward(model, TEXT, groups), ours), "the noise is gone"
    assert torch.equal(training_logits(oracle, TEXT), theirs)
    span = float(theirs.max() - theirs.min())
    found = [(ours - theirs).abs().max(), (moved - theirs_moved).abs().max(), (ours - moved).abs().max()]
    return [float(each) / span for each in found]


def test_tensor_parallel_forward_is_that_of_one_rank_and_noise_is_rounding():
    for plain, with_noise, by_noise in run_on_ranks(2, tensor_parallel_case):
        assert plain < 1e-5 and with_noise < 1e-5
        assert 1e-8 < by_noise < 1e-5


def stages_case(rank, world, path):
    from megatron_dcp.layers.forward import recorded_layers, training_forward

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    model, _ = load_model(path, parallel_state.get_process_group_collection())
    with recorded_layers(model) as states:
        logits = training_forward(model, TEXT, parallel_state.get_process_group_collection())
    oracle, _ = load_model(path, single_rank_groups())
    want = training_logits(oracle, TEXT)
    error = None if logits is None else float((logits - want).abs().max() / (want.max() - want.min()))
    return list(states), error


def test_stages_have_their_own_layers_by_global_number_and_the_last_has_the_logits():
    (first, none), (last, error) = run_on_ranks(2, stages_case, str(tiny_model("llama", layers=4)))
    assert first == [-1, 0, 1] and none is None
    assert last == [2, 3] and error < 1e-6
