"""Train the small Megatron-Core model of the quickstart on a CPU.

The model learns one skill, to give back a fact that stands anywhere in a long text, in stages of growing length:

    python tools/train_quickstart_model.py --output build/quickstart

Every stage is seeded by itself, and a run that was stopped goes on from its last finished stage.
Tensor names: `B` batch, `S` sequence, `N` query heads, `K` KV heads, `H` head dim.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import shutil
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.jit")  # Megatron lists every package it misses

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402
from quickstart_data import DocumentSampler, save_tokenizer, train_tokenizer  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from megatron_dcp import (  # noqa: E402
    ModelConfig,
    build_model,
    local_layer_spec,
    megatron_on_cpu,
    parallel_state,
)
from megatron_dcp.checkpoint import save_model  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
HAYSTACK = ROOT / "examples" / "quickstart" / "haystack.txt"
SHAPE = ModelConfig(
    num_layers=3,
    hidden_size=128,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=64,
    vocab_size=1280,
    padded_vocab_size=1280,
    max_position_embeddings=5376,
    rotary_base=1_000_000.0,  # its slow dimensions compare content over thousands of positions
    eos_token_ids=(0,),
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the schedule: `steps` batches of `batch` sequences of `length` tokens."""

    steps: int
    length: int
    batch: int
    questions: int
    lr: float


STAGES = (
    Stage(steps=150, length=256, batch=8, questions=6, lr=2e-3),
    Stage(steps=100, length=1024, batch=2, questions=20, lr=1.5e-3),
    Stage(steps=100, length=2048, batch=1, questions=40, lr=1e-3),
    Stage(steps=80, length=4096, batch=1, questions=60, lr=8e-4),
    Stage(steps=50, length=5376, batch=1, questions=70, lr=5e-4),
)


# --- Megatron on a CPU


class CpuCoreAttention(torch.nn.Module):
    """Causal core attention in place of Megatron's cuda-bound one; in bf16 while training, for speed."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """`query [S, B, N, H]`, `key` and `value [S, B, K, H]` to `[S, B, N * H]`."""
        dtype = torch.bfloat16 if self.training else query.dtype
        group = query.shape[2] // key.shape[2]
        q_BNSH = query.permute(1, 2, 0, 3).to(dtype)
        k_BNSH = key.permute(1, 2, 0, 3).repeat_interleave(group, dim=1).to(dtype)
        v_BNSH = value.permute(1, 2, 0, 3).repeat_interleave(group, dim=1).to(dtype)
        length = query.shape[0]
        if self.training and length <= 512:  # two matrix products beat the fused kernel on short sequences
            mask_SS = torch.full((length, length), -torch.inf, dtype=dtype).triu(1)
            scores_BNSS = torch.baddbmm(
                mask_SS, q_BNSH.flatten(0, 1), k_BNSH.flatten(0, 1).transpose(1, 2), alpha=self.scale
            )
            out_BNSH = (scores_BNSS.softmax(-1) @ v_BNSH.flatten(0, 1)).unflatten(0, q_BNSH.shape[:2])
        else:
            out_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH, is_causal=True, scale=self.scale)
        return out_BNSH.permute(2, 0, 1, 3).flatten(2).to(query.dtype)


def make_model() -> GPTModel:
    """A new model in fp32, of Megatron's local layers with the core attention above."""
    spec = local_layer_spec(SHAPE)
    spec.submodules.self_attention.submodules.core_attention = CpuCoreAttention
    groups = parallel_state.get_process_group_collection()
    return build_model(SHAPE, groups, layer_spec=spec, perform_initialization=True).train()


# Channels that carry a token's identity from one position to another: the slow rotary ones of a head of 64.
HASH = 24


@torch.no_grad()
def initialise(model: GPTModel, shape: ModelConfig) -> None:
    """Start from a rough induction circuit, in the spirit of mimetic initialisation (Trockman and Kolter, 2023).

    Embeddings begin in a subspace of their own. The heads of layer 0 look one, two and three tokens back and write a
    hash of what they see into three further subspaces; those of layer 1 compare the hashes of the last three tokens
    with those before every other position, and copy the token there. All weights are trained from this start.
    """
    basis = torch.linalg.qr(torch.randn(shape.hidden_size, shape.hidden_size))[0]
    own, constant = basis[:, : shape.hidden_size - 3 * HASH - 1], basis[:, -1]
    back = basis[:, own.shape[1] : -1].unflatten(1, (3, HASH))
    token_hash = torch.linalg.qr(torch.randn(own.shape[1], HASH))[0].T @ own.T
    embedding = model.embedding.word_embeddings.weight
    embedding.copy_(torch.randn(embedding.shape[0], own.shape[1]) @ own.T * 0.03 + constant * 0.22)
    model.decoder.final_layernorm.weight.fill_(4.0)
    _look_back(model.decoder.layers[0].self_attention, shape, token_hash, back, constant)
    _match_and_copy(model.decoder.layers[1].self_attention, shape, token_hash, back)


def _split(attention: Any, shape: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the weights: QKV as `[K, queries per group + 2, H, hidden]`, projection as `[hidden, N, H]`."""
    per_group = shape.num_attention_heads // shape.num_query_groups
    qkv = attention.linear_qkv.weight.view(shape.num_query_groups, per_group + 2, shape.kv_channels, shape.hidden_size)
    return qkv, attention.linear_proj.weight.view(shape.hidden_size, shape.num_attention_heads, shape.kv_channels)


def _look_back(
    attention: Any, shape: ModelConfig, token_hash: torch.Tensor, back: torch.Tensor, constant: torch.Tensor
) -> None:
    """Heads 0 to 2 attend to 1 to 3 tokens back: a fixed key, a query turned back in phase."""
    qkv, proj = _split(attention, shape)
    half = shape.kv_channels // 2
    key = torch.zeros(half)
    key[:4] = torch.tensor([1.2, 1.0, 0.8, 0.7])
    frequencies = shape.rotary_base ** (-torch.arange(half) / half)
    qkv[:, -2, :half] += torch.outer(key, constant)
    qkv[:, -1, :HASH] = token_hash
    for head in range(3):
        group, slot = divmod(head, qkv.shape[1] - 2)
        angle = -(head + 1) * frequencies
        query = torch.cat((key * angle.cos(), key * angle.sin()))
        qkv[group, slot] += torch.outer(query, constant)
        proj[:, head, :HASH] = back[:, head] * 0.03


def _match_and_copy(attention: Any, shape: ModelConfig, token_hash: torch.Tensor, back: torch.Tensor) -> None:
    """Every head compares (this token, one back, two back) with (one back, two back, three back), and copies."""
    qkv, proj = _split(attention, shape)
    half = shape.kv_channels // 2
    slow = torch.cat((torch.arange(half - HASH // 2, half), torch.arange(2 * half - HASH // 2, 2 * half)))
    turns = [torch.linalg.qr(torch.randn(HASH, HASH))[0] for _ in range(3)]
    seen = [token_hash, back[:, 0].T, back[:, 1].T]
    before = [back[:, 0].T, back[:, 1].T, back[:, 2].T]
    qkv[:, :-2, slow] += 1.8 * sum(turn @ part for turn, part in zip(turns, seen, strict=True))
    qkv[:, -2, slow] += 1.8 * sum(turn @ part for turn, part in zip(turns, before, strict=True))
    copies = torch.linalg.qr(torch.randn(shape.hidden_size, shape.hidden_size))[0].view(-1, *qkv.shape[2:])
    qkv[:, -1] = copies[: qkv.shape[0]]
    per_group = qkv.shape[1] - 2
    for head in range(shape.num_attention_heads):
        proj[:, head] = copies[head // per_group].T * 0.08


# --- Training


def next_batch(sampler: DocumentSampler, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
    """`ids [B, S]` and `weights [B, S]`."""
    samples = [sampler.fact_sample(stage.length, stage.questions) for _ in range(stage.batch)]
    return torch.tensor([s.ids for s in samples]), torch.tensor([s.weights for s in samples])


def loss_and_accuracy(model: GPTModel, ids_BS: torch.Tensor, weights_BS: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The weighted loss, and the share of answer tokens (weight 1) that are the model's first choice.

    Logits are computed for all answer tokens and for a quarter of the others.
    """
    batch, length = ids_BS.shape[0], ids_BS.shape[1] - 1
    hidden_SBD = model.embedding(ids_BS[:, :-1], torch.arange(length).expand(batch, -1))
    rotary = model.rotary_pos_emb(length)
    hidden_SBD = model.decoder(hidden_SBD, attention_mask=None, rotary_pos_emb=rotary)
    target, weight = ids_BS[:, 1:].T.flatten(), weights_BS[:, 1:].T.flatten()
    chosen = ((weight == 1.0) | ((weight > 0) & (torch.rand(weight.shape) < 0.25))).nonzero().squeeze(1)
    target, weight = target[chosen], weight[chosen]
    tied = model.shared_embedding_or_output_weight()
    logits, _ = model.output_layer(hidden_SBD.flatten(0, 1)[chosen].unsqueeze(1), weight=tied)
    logits = logits.squeeze(1)
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    answers = weight == 1.0
    return loss, (logits.detach()[answers].argmax(-1) == target[answers]).float().mean().item()


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al. 2024), for the weight matrices between the embeddings."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalise(param.grad.lerp(buffer, group["momentum"]))
                param.mul_(1 - 0.01 * group["lr"])
                param.add_(update, alpha=-group["lr"] * max(1.0, param.shape[0] / param.shape[1]) ** 0.5)


def orthogonalise(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """A nearly orthogonal matrix in the direction of `matrix`, by a quintic Newton-Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
    return x.T if tall else x


def make_optimizers(model: GPTModel, lr: float) -> list[torch.optim.Optimizer]:
    """Muon at `10 * lr` for the matrices of the layers, AdamW at `lr` for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embedding" in name]
    return [Muon(matrices, lr=10 * lr), torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def run_stage(
    model: GPTModel, tokenizer: Tokenizer, haystack: str, index: int, seed: int, stage: Stage, log_every: int
) -> None:
    """Train `model` in place through one stage, with its own optimizer state, warm-up and cosine decay."""
    sampler = DocumentSampler(tokenizer, haystack, seed + index, filler_weight=0.1)
    torch.manual_seed(seed + index)
    optimizers = make_optimizers(model, stage.lr)
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    start, seen = time.monotonic(), 0
    for step in range(stage.steps):
        warm, done = min(1.0, (step + 1) / 20), step / stage.steps
        for group, lr in groups:
            group["lr"] = lr * warm * (0.3 + 0.7 * 0.5 * (1 + math.cos(math.pi * done)))
        ids_BS, weights_BS = next_batch(sampler, stage)
        loss, accuracy = loss_and_accuracy(model, ids_BS, weights_BS)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seen += ids_BS.numel()
        if step % log_every == 0 or step == stage.steps - 1:
            rate = seen / (time.monotonic() - start)
            print(
                f"stage {index} step {step}/{stage.steps} length {stage.length} loss {loss.item():.3f} "
                f"answers {accuracy:.3f} {rate:.0f} tokens/s {time.monotonic() - start:.0f} s",
                flush=True,
            )


def train(args: argparse.Namespace, shape: ModelConfig, tokenizer: Tokenizer, haystack: str) -> GPTModel:
    """Run every stage that has no snapshot in `args.work` yet; at most `args.steps` steps of each."""
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    model = make_model()
    initialise(model, shape)
    for index, stage in enumerate(STAGES):
        snapshot = args.work / f"stage-{index}.pt"
        if snapshot.exists():
            model.load_state_dict(torch.load(snapshot))
            print(f"stage {index} loaded from {snapshot}", flush=True)
            continue
        stage = replace(stage, steps=min(stage.steps, args.steps or stage.steps))
        run_stage(model, tokenizer, haystack, index, args.seed, stage, args.log_every)
        torch.save(model.state_dict(), snapshot)
    return model


# --- Command line


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoint to write")
    parser.add_argument("--work", type=Path, help="directory of snapshots (default: the output's name with .work)")
    parser.add_argument("--steps", type=int, help="at most so many steps in each stage, for a trial (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--log-every", type=int, default=10, help="steps between progress lines (default: 10)")
    args = parser.parse_args()
    args.work = args.work or args.output.with_suffix(".work")
    if args.output.exists():
        parser.error(f"--output {args.output} exists; name a new directory")
    return args


def keep_freed_memory() -> None:
    """Tell glibc not to return large blocks to the system: page faults took a third of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def main() -> int:
    args = parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    haystack = HAYSTACK.read_text()
    tokenizer = train_tokenizer(haystack, SHAPE.vocab_size, seed=0)
    parallel_state.initialize_distributed()
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.set_float32_matmul_precision("medium")
    with megatron_on_cpu():
        model = train(args, SHAPE, tokenizer, haystack)
    save_tokenizer(tokenizer, args.work / "tokenizer", SHAPE.max_position_embeddings)
    steps = sum(stage.steps for stage in STAGES)
    save_model(model, SHAPE, args.output, iteration=steps, tokenizer_dir=args.work / "tokenizer")
    shutil.rmtree(args.work)
    print(f"wrote {args.output}; evaluate it with tools/eval_quickstart_model.py", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
