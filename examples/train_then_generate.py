"""A Megatron training loop that generates from the live model between steps: no reload, no second copy of the weights.

    torchrun --nproc-per-node 4 examples/train_then_generate.py      # tp 2 x dcp 2, on GPUs or on a CPU

The model learns to count upwards modulo 50. While it trains, the two DCP ranks of a TP rank are data-parallel ranks
with batches of their own; while it generates, they share one sharded KV cache.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from megatron_dcp import (
    LLM,
    ModelConfig,
    SamplingParams,
    build_model,
    default_device,
    local_layer_spec,
    megatron_on_cpu,
)
from megatron_dcp import parallel_state as dcp
from megatron_dcp.layers import sdpa_layer_spec

MODULUS, LENGTH, BATCH, STEPS, EVERY = 50, 32, 8, 120, 30


def make_model() -> torch.nn.Module:
    """A GPTModel as a training script has it: Megatron's groups and layers, nothing of DCP."""
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(1)  # the same on every rank: each cuts its shard out of the same random matrix
    config = ModelConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        vocab_size=MODULUS,
        padded_vocab_size=64,
        max_position_embeddings=256,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    spec = sdpa_layer_spec(local_layer_spec(config))
    return build_model(config, groups, device=default_device(), layer_spec=spec, perform_initialization=True).train()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> float:
    """One step of Megatron training: every data-parallel rank has its own batch, gradients are averaged."""
    start = torch.randint(MODULUS, (BATCH, 1), generator=generator)
    tokens = ((start + torch.arange(LENGTH + 1)) % MODULUS).to(default_device())
    positions = torch.arange(LENGTH, device=tokens.device).expand(BATCH, LENGTH)
    with megatron_on_cpu():
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mpu.get_data_parallel_group())
        parameter.grad /= mpu.get_data_parallel_world_size()
    optimizer.step()
    return loss.item()


def main() -> None:
    dcp.initialize_distributed()
    model = make_model()
    # Attaches to Megatron's groups: the two data-parallel ranks of each TP rank become one DCP group.
    dcp.initialize_model_parallel(decode_context_parallel_size=2)
    llm = LLM(model, vocab_size=MODULUS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(mpu.get_data_parallel_rank())
    prompt = [7, 8, 9, 10, 11]
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=12))
            if dist.get_rank() == 0:
                print(f"step {step:3}: {prompt} -> {output.token_ids}", flush=True)
        loss = train_step(model, optimizer, generator)
    if dist.get_rank() == 0:
        print(f"final loss {loss:.4f}; counted right: {output.token_ids == list(range(12, 24))}", flush=True)


if __name__ == "__main__":
    main()
