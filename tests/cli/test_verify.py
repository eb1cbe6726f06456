"""``megatron-dcp verify`` as a user runs it: what it prints, what it writes, and its exit code."""

import json
import shutil

import pytest
import torch
from cli_runs import model, run_main, torchrun

from megatron_dcp.checkpoint import convert
from models import hf_tensors, tiny_model
from workers import run_on_ranks

pytestmark = pytest.mark.mcore_line

SHORT = ["--max-new-tokens", "6", "--decode-tokens", "9", "--block-size", "4"]


def test_a_good_checkpoint_with_its_twin_and_a_prompt(tmp_path):
    """At pp 2, from another format; the numbers go to a file."""
    checkpoint, out, prompt = tmp_path / "checkpoint", tmp_path / "out.json", tmp_path / "prompt.txt"
    convert(model(), checkpoint, to="torch_dist")
    prompt.write_text("h\u00e9llo world")
    command = ["verify", str(checkpoint), "--hf", str(model()), "--prompt-file", str(prompt), "--json", str(out)]
    (first,), (second,) = run_on_ranks(2, run_main, [[[*command, "--pp", "2", *SHORT]]])
    assert first[0] == second[0] == 0, first
    assert second[1:] == ("", "") and first[2] == ""
    lines = first[1].splitlines()
    assert lines[0].split() == ["model", str(checkpoint)]
    assert "12 prompt tokens and 6 generated" in first[1] and "pp 2" in first[1]
    assert [line.split()[0] for line in lines[8:13]] == ["rounding", "hf", "prefill", "decode", "generate"]
    assert lines[-1].startswith("PASS  ")
    found = json.loads(out.read_text())
    assert found["passed"] is True and [len(c["positions"]) for c in found["comparisons"]] == [17, 17, 9, 6]
    assert list(found["comparisons"][0]["layers"]) == ["embedding", "decoder.layers.0", "decoder.layers.1"]


def twin_with_fault(tmp_path, change):
    """A copy of a tiny model that `change` has worked on: what a wrong conversion makes of it."""
    from safetensors.torch import save_file

    path = tmp_path / "wrong"
    shutil.copytree(model(), path)
    tensors = hf_tensors(model())
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    return path


def swap_key_and_value(tensors):
    names = [f"model.layers.1.self_attn.{each}_proj.weight" for each in "kv"]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


def swap_query_heads(tensors):
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = torch.cat(tensors[name].chunk(2)[::-1])


@pytest.mark.parametrize("change", [swap_key_and_value, swap_query_heads])
def test_a_swapped_order_of_qkv_is_found_and_its_layer_named(tmp_path, change):
    command = ["verify", str(twin_with_fault(tmp_path, change)), "--hf", str(model()), "--prompt", "abcdefgh", *SHORT]
    ((code, out, _),) = run_on_ranks(1, run_main, [[command]])[0]
    assert code == 1
    assert "hf: decoder.layers.1 is the first to differ" in out
    assert "The checkpoint is not its Hugging Face twin from decoder.layers.1 on: convert it again" in out


def perturbed_main(rank, world, command, fault):
    """The command, with a fault in every step of the generator and none in the training forward."""
    from megatron_dcp.engine.runner import ModelRunner

    step = ModelRunner.step

    def wrong(self, batch):
        if fault == "weight":
            weight = self.model.decoder.layers[1].self_attention.linear_proj.weight.data
            right = weight.clone()
            weight[3, 2] += 0.5 if self.dtype == torch.float32 else 16.0
            try:
                return step(self, batch)
            finally:
                weight.copy_(right)
        base = 12000.0 if self.dtype == torch.float32 else 100.0
        inv_freq = self.rotaries[0].inv_freq
        inv_freq[:] = base ** -torch.linspace(0, 1, len(inv_freq) + 1)[:-1]
        return step(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "step", wrong)
        return run_main(rank, world, [[command]])


@pytest.mark.parametrize("fault,layer", [("weight", "decoder.layers.1"), ("rope", "decoder.layers.0")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_of_decoding_is_found_and_its_layer_named(fault, layer, dtype):
    command = ["verify", str(model()), "--dcp", "2", "--prompt", "abcdefghijklmnop", "--dtype", dtype, *SHORT]
    ranks = run_on_ranks(2, perturbed_main, command, fault)
    assert [code for ((code, *_),) in ranks] == [1, 1]
    out = ranks[0][0][1]
    assert f"prefill: {layer} is the first to differ" in out, out
    assert f"decode: {layer} is the first to differ" in out
    assert f"Do not trust this deployment: {layer} computes something else than in training" in out


def test_what_cannot_run_is_one_line_on_every_rank(tmp_path):
    other = str(tiny_model("llama", hidden=48))
    incomplete = twin_with_fault(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    wrong = [
        (["--hf", other], "has 2 layers, hidden size 48 and 100 tokens, the checkpoint 2, 32 and 260"),
        (["--hf", str(tmp_path)], "transformers cannot load"),
        (["--hf", str(incomplete)], "lacks model.layers.0.mlp.up_proj.weight and 0 more: it is incomplete"),
        (["--hf", str(tmp_path / "none")], "is no directory; --hf takes that of a Hugging Face checkpoint"),
        (["--prompt-file", str(tmp_path / "none")], "No such file or directory"),
        (["--prompt-file", str(tmp_path / "latin.txt")], "is no UTF-8 text"),
        (["--prompt", ""], "the prompt is empty"),
        (["--token-ids", "3,260"], "prompt 0 has token id 260"),
        (["--json", str(tmp_path / "none" / "a")], "is no directory; make it first"),
        (["--plot", str(tmp_path / "a.txt")], "names no format for a plot"),
        (["--dcp", "3"], "takes 3 processes, but 2 were started"),
        (["--dcp", "1"], "verify runs one replica, of 1 process here, but 2 were started"),
    ]
    commands = [[["verify", str(model()), "--dcp", "2", *more]] for more, _ in wrong]
    for rank, results in enumerate(run_on_ranks(2, run_main, commands, timeout=200)):
        for (code, out, err), (_, message) in zip(results, wrong, strict=True):
            assert code == 1 and out == "", (out, err)
            (line,) = err.splitlines()
            assert line.startswith(f"[rank {rank}] megatron-dcp verify: error: ")
            assert message in line


def test_exit_code_under_torchrun():
    """No rank may leave before the report is out: torchrun ends all once one has left with exit code 1."""
    more = ["--dcp", "2", "--prompt", "abc", "--max-logprob-diff", "0", *SHORT]
    done = torchrun("-m", "megatron_dcp", "verify", str(model()), *more)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2].startswith("FAIL  prefill"), done.stderr
