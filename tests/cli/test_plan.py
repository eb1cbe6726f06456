"""``megatron-dcp plan``: models by name, checkpoint, config.json and shape; outputs; what goes wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_runs import kill_rank_1, run_main
from small_calibration import shrink_calibration

from megatron_dcp.cli import calibration, main
from megatron_dcp.cli import plan as plan_command
from megatron_dcp.cli.arguments import CHECKPOINT
from megatron_dcp.planner import machine
from megatron_dcp.planner.measured import save_machine
from models import tiny_model
from workers import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
QWEN = "plan qwen2.5-72b --gpu H200 --context 131072 --batch 8"


def run(line: str, capsys: pytest.CaptureFixture[str], *, code: int = 0) -> str:
    assert main(shlex.split(line)) == code
    out, err = capsys.readouterr()
    assert (out == "") == (code != 0)
    return err if code else out


def test_table_advice_and_what_does_not_fit(capsys):
    text = run(QWEN, capsys)
    assert "qwen2.5-72b: 72.7 B parameters in bfloat16, KV in bfloat16" in text
    assert re.search(r"^\* tp 8 +18\.2 +42\.95 +1 ", text, re.M)
    assert "Take tp 8:" in text and "The next larger dcp, tp 4 x dcp 2" in text
    assert "tp 1 x dcp 8 (orthogonal): weights of 145.4 GB alone exceed 126.9 GB" in text


def test_top_and_pins(capsys):
    text = run(f"{QWEN} --top 2", capsys)
    assert len(re.findall(r"^[* ] tp \d", text, re.M)) == 2 + 3  # what does not fit is listed in the same form
    text = run(f"{QWEN} --tp 2 --dcp 4 --layout orthogonal --exchange a2a --kv-cache-dtype int8", capsys)
    assert "KV in int8" in text and "* tp 2 x dcp 4 (orthogonal), int8 KV" in text
    text = run(f"{QWEN} --kv-cache-dtype all --top 30", capsys)
    assert "KV in bfloat16 and fp8_e4m3 and int8" in text and "tp 8, fp8_e4m3 KV" in text


def test_json_and_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run(f"{QWEN} --json {tmp_path}/p.json --plot {tmp_path}/p.png", capsys)
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["model"] == "qwen2.5-72b" and found["configurations"][found["best"]]["name"] == "tp 8"
    assert (tmp_path / "p.png").stat().st_size > 20_000
    run(f"{QWEN} --batch 1000 --plot {tmp_path}/none.svg", capsys)  # nothing fits
    assert "does not fit" in (tmp_path / "none.svg").read_text() or (tmp_path / "none.svg").stat().st_size > 20_000
    run(f"plan qwen2.5-72b --gpu H100 --gpus 1 --context 8192 --plot {tmp_path}/never.png", capsys)  # at no batch
    assert (tmp_path / "never.png").stat().st_size > 10_000


def test_a_checkpoint(capsys):
    text = run(f"plan {ROOT / CHECKPOINT} --gpu A100 --gpus 2 --context 512", capsys)
    assert "checkpoint: 0.75 M parameters" in text and "Take tp" in text


def test_a_config_json_says_its_shape_whatever_stores_the_weights(tmp_path, capsys):
    values = json.loads((tiny_model("deepseek_v3") / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | {"quantization_config": {"quant_method": "fp8"}}))
    assert "Take tp" in run(f"plan {path} --gpu H100 --gpus 2 --context 8 --weight-dtype fp8", capsys)
    path.write_text("{")
    assert "is truncated or no JSON" in run(f"plan {path} --gpu H100 --context 8", capsys, code=1)


def test_a_shape_by_flags(capsys):
    shape = "--num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --vocab-size 32000"
    text = run(f"plan --gpu A100 --gpus 8 --context 131072 --tp 8 --dcp 1 {shape}", capsys)
    assert "model: 13.0 B parameters" in text and "13.42" in text  # 107.4 GB over 8 GPUs
    text = run(f"plan --gpu A100 --context 131072 --tp 8 --dcp 1 --num-query-groups 8 {shape}", capsys)
    assert " 2.68 " in text


WIDTH = "--hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 8 --vocab-size 9"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan lama-3-70b --gpu H200 --context 8", "model 'lama-3-70b' is not known; did you mean .*llama-3-70b"),
        ("plan llama-3-70b --gpu H20 --context 8", "GPU 'H20' is not known; did you mean .*H200"),
        ("plan some/where --gpu H200 --context 8", "'some/where' does not exist; give a checkpoint, a config.json or"),
        ("plan llama-3-70b --gpu H200 --context 200000", "--context 200000 is beyond the 131072 positions"),
        ("plan llama-3-70b --gpu H200 --context 8 --tp 3", "--tp 3 does not fit"),
        ("plan llama-3-70b --gpu H200 --context 8 --gpus 6 --tp 4", "--gpus 6 is no multiple of 4 .--tp 4 x --pp 1.;"),
        ("plan llama-3-70b --gpu H200 --context 8 --weight-dtype nvfp4", "is for experts, and the model has none"),
        ("plan llama-3-70b --gpu H200 --context 8 --kv-interleave 7", "--kv-interleave 7 does not divide"),
        ("plan llama-3-70b --gpu H200 --context 8 --layout within_tp --exchange fold", "--exchange 'fold'"),
        ("plan llama-3-70b --gpu H200 --context 8 --plot a.txt", "'a.txt' names no format for a plot"),
        ("plan llama-3-70b --gpu H200 --context 8 --json no/a.json", "--json no/a.json cannot be written: make the"),
        ("plan llama-3-70b --gpu H200 --context 8 --json .", "--json . is a directory"),
        ("plan llama-3-70b --gpu H200", "give --context"),
        ("plan llama-3-70b --gpu none.json --context 8", "'none.json' does not exist; write it with"),
        ("plan llama-3-70b --gpu setup.py/a --context 8", "'setup.py/a' does not exist; write it with"),
        ("plan llama-3-70b --gpu /dev/null --context 8", "'/dev/null' is no file; write it with"),
        ("plan llama-3-70b --gpu examples/quickstart/checkpoint/tokenizer.json --context 8", "is no measured machine"),
        ("plan llama-3-70b --gpu H200 --context 8 --json a.svg --plot ./a.svg", "--json and --plot are to be"),
        ("plan --calibrate a", "--calibrate a: give a name that ends in .json"),
        ("plan --calibrate a.json --tp 2", "--tp is for a plan; give a MODEL, or leave it out"),
        ("plan --calibrate a.json --expert-tp 2", "--expert-tp is for a plan"),
        ("plan llama-3-70b --calibrate a.json --context 200000", "--context 200000 is beyond the 131072 positions"),
        ("plan llama-3-70b --calibrate a.json --context 8 --tp 3", "--tp 3 does not fit"),
        ("plan --calibrate no/a.json", "--calibrate no/a.json cannot be written: make the folder"),
        ("plan --calibrate .", "--calibrate . is a directory"),
        ("plan --calibrate a.json --context 8", "--context is for a plan; give a MODEL, or leave it out"),
        ("plan --calibrate a.json --plot a.png", "--plot is for a plan"),
        ("plan llama-3-70b --calibrate a.json", "give --context"),
        ("plan lama --calibrate a.json --context 8", "model 'lama' is not known"),
        ("plan --gpu H200 --context 8", "give a MODEL, or its shape: --num-layers, .* are missing"),
        ("plan --gpu H200 --context 8 --num-layers 2", "give a MODEL, or its shape: --hidden-size, .* are missing"),
        ("plan llama-3-70b --gpu H200 --context 8 --num-layers 2", "--num-layers is for a model without a name"),
        ("plan llama-3-70b --gpu H200 --context 8 --num-query-groups 2", "--num-query-groups is for a model without"),
        ("plan llama-3-70b --gpu H200 --context 8 --kv-channels 2", "--kv-channels is for a model without a name"),
        ("plan --calibrate a.json --kv-channels 2", "give --context"),
        ("plan --calibrate a.json --batch 1", "--batch is for a plan"),
        ("plan --calibrate a.json --memory-share=0.5", "--memory-share is for a plan"),
        ("plan --calibrate a.json --tensor-model-parallel-size 2", "--tensor-model-parallel-size is for a plan"),
        ("plan --calibrate a.json --gpus 2000", "--gpus 2000 cannot be measured: there is no GPU, and for its cores"),
        ("plan llama-3-70b --gpu H200 --context 8 --ep 2", "--ep 2 shares out experts, and the model has none; leave"),
        ("plan llama-3-70b --gpu H200 --context 8 --expert-tp 2", "--expert-tp 2 shares out experts, and the model"),
        ("plan setup.py --gpu H200 --context 8", "'setup.py' is neither a checkpoint nor a config.json"),
        (f"plan --gpu H200 --context 8 --num-layers 20000 {WIDTH}", "--num-layers 20000 is above 16384"),
        (f"plan --gpu H200 --context 8 --num-layers 9 {WIDTH} --num-query-groups 5", "--num-query-groups 5 does not "
         "divide --num-attention-heads 8"),
        (f"plan --gpu H200 --context 8 --num-layers 9 {WIDTH} --num-attention-heads 7", "--hidden-size 64 is no multi"
         "ple of --num-attention-heads 7; give the head dim as --kv-channels"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(line, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    error = run(line, capsys, code=1)
    assert re.search(message, error), error
    assert error.startswith("megatron-dcp plan: error: ") and error.count("\n") == 1


def test_a_full_disk_is_one_line_that_names_the_file(capsys):
    assert main(shlex.split("plan llama-3-70b --gpu H200 --context 8 --json /dev/full")) == 1
    assert "error: --json /dev/full cannot be written: No space left on device" in capsys.readouterr().err


def test_absurd_sizes_take_no_longer(capsys):
    """Nothing is counted up to them."""
    sizes = " ".join(f"--{name} {2**31 - 1}" for name in ("context", "batch", "prefill-chunk-size", "hidden-size",
                     "ffn-hidden-size", "num-attention-heads", "vocab-size"))  # fmt: skip
    assert "Nothing fits" in run(f"plan --gpu H200 --gpus 4096 --num-layers 16384 {sizes}", capsys)
    error = run(f"plan --gpu H200 --gpus 8 --tp 8 --num-layers 2 {sizes}", capsys, code=1)
    assert "--tp 8 does not fit --num-attention-heads 2147483647" in error and error.endswith("use one of 1\n")


@pytest.mark.parametrize(
    "line",
    [
        "plan llama-3-70b --context 8",
        "plan",
        "plan llama-3-70b --gpu H200 --calibrate a.json --context 8",
        "plan llama-3-70b --gpu H200 --context 0",
        "plan llama-3-70b --gpu H200 --context 8 --gpus 0",
        "plan llama-3-70b --gpu H200 --context 8 --memory-share 1.1",
        "plan llama-3-70b --gpu H200 --context 8 --layout helix",
        "plan llama-3-70b --gpu H200 --context 8 --weight-dtype int3",
    ],
)
def test_wrong_usage_is_2(line, capsys):
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(line))
    assert caught.value.code == 2 and "error:" in capsys.readouterr().err


def shrunk_main(rank: int, world: int, commands: list[list[list[str]]]) -> list[tuple[int, str, str]]:
    """`run_main` with a calibration that measures little."""
    shrink_calibration()
    return run_main(rank, world, commands)


def test_calibrate_measures_writes_and_plans(tmp_path, capsys):
    path, plan = tmp_path / "m.json", tmp_path / "plan.json"
    model = ["llama-3-8b", "--context", "1024", "--weight-dtype", "float32", "--memory-share", "1", "--json", str(plan)]
    commands = [
        [["plan", "--calibrate", str(path)]],
        [["plan", "--calibrate", str(path), *model]],
        [["plan", "--calibrate", str(tmp_path / "no" / "m.json")]],
    ]
    first, second = run_on_ranks(2, shrunk_main, commands)
    assert [code for code, *_ in first] == [code for code, *_ in second] == [0, 0, 1], first
    assert [out for _, out, _ in second] == ["", "", ""]
    alone, planned = first[0][1], first[1][1]
    assert alone.splitlines()[-1] == f"written to {path}" and "llama" not in alone
    parts = "ranks 2, threads per rank 1, communication gloo", "memory ", "int8 ", "a latent of 576 dims", "all_to_all "
    for part in (*parts, "a layer ", "to merge"):
        assert part in alone
    assert "llama-3-8b: 8.0 B parameters" in planned
    found = json.loads(plan.read_text())
    assert found["gpus"] == found["machine"]["ranks"] == 2 and len(found["machine"]["collectives"]) == 20
    for error in (first[2][2], second[2][2]):
        assert "make the folder" in error and error.count("\n") == 1
    text = run(f"plan llama-3-8b --gpu {path} --gpus 4 --context 1024", capsys)
    assert "measured with 2 ranks, 2 to a machine: larger groups are extrapolated from these" in text
    assert sorted(os.listdir(tmp_path)) == ["m.json", "plan.json"]


def test_a_pipe_or_device_is_not_replaced(tmp_path, capsys):
    os.mkfifo(tmp_path / "m.json")
    assert "m.json is no file; give the name of one" in run(f"plan --calibrate {tmp_path}/m.json", capsys, code=1)
    assert stat.S_ISFIFO(os.stat(tmp_path / "m.json").st_mode)


def test_calibrate_alone_starts_ranks(monkeypatch, capfd):
    """As torchrun would: each knows its place, and says for itself what is wrong. The run itself is the test above."""
    started = []
    monkeypatch.setattr(plan_command, "start_ranks", lambda *args: started.append(args) or 3)
    for line in (["plan", "--calibrate", "a.json"], ["plan", "--calibrate", "a.json", "--gpus", "3"]):
        assert main(line) == 3
        assert started.pop() == (3 if "--gpus" in line else 2, line)
    before = dict(os.environ)
    assert calibration.start_ranks(2, ["plan", "--calibrate", ""]) == 2
    assert os.environ == before
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == [
        f"[rank {rank}] megatron-dcp plan: error: argument --calibrate: the path is empty; give the name of a file or "
        "directory (see --help)"
        for rank in (0, 1)
    ]


def test_a_rank_for_every_gpu(monkeypatch):
    assert calibration.ranks_here(5) == 5 and calibration.ranks_here(None) == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert calibration.ranks_here(None) == 4 and calibration.ranks_here(3) == 3
    with pytest.raises(ValueError, match="--gpus 5 cannot be measured: this machine has 4; leave --gpus out"):
        calibration.ranks_here(5)


def test_one_rank_cannot_tell_what_several_take(tmp_path, capsys):
    path = tmp_path / "m.json"
    save_machine(replace(machine("H100"), ranks=1), path, {})
    assert "Take tp 1" in run(f"plan llama-3-8b --gpu {path} --context 1024", capsys)
    error = run(f"plan llama-3-8b --gpu {path} --gpus 2 --context 1024", capsys, code=1)
    assert "was measured with one rank, so without collectives; for 2 GPUs measure it with several: `mega" in error
    (tmp_path / "new.json").write_text("kept")
    error = run(f"plan llama-3-8b --calibrate {tmp_path}/new.json --gpus 1 --dcp 2 --context 8", capsys, code=1)
    assert "does not divide the 1 ranks that hold" in error and (tmp_path / "new.json").read_text() == "kept"


def test_a_known_model_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from megatron_dcp.cli import main; "
        "sys.exit(main(['plan', 'deepseek-v3', '--gpu', 'B200', '--context', '65536', '--weight-dtype', 'fp8']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "Take tp" in done.stdout, done.stderr


def deaf(ready):
    """As a rank is that waits in C++ for another's store."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(600)


def test_ranks_that_do_not_listen_are_ended_by_force(monkeypatch):
    monkeypatch.setattr(calibration, "GRACE_S", 0.0)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=deaf, args=(ready,))
    process.start()
    assert ready.wait(60)
    calibration._end([process])
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def test_a_rank_that_a_signal_ends_is_one_line(monkeypatch):
    monkeypatch.setattr(calibration, "_run_rank", kill_rank_1)
    with pytest.raises(ValueError, match="rank 1 was ended by SIGKILL; the measurement is lost"):
        calibration.start_ranks(2, [])
