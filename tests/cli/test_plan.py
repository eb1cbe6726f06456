"""``megatron-dcp plan``: models by name, checkpoint, config.json and shape; outputs; what goes wrong."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dcp.cli import main
from megatron_dcp.cli.arguments import CHECKPOINT
from models import tiny_model

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


def test_a_checkpoint(capsys):
    text = run(f"plan {ROOT / CHECKPOINT} --gpu A100 --gpus 2 --context 512", capsys)
    assert "checkpoint: 0.0 B parameters" in text and "Take tp" in text


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan lama-3-70b --gpu H200 --context 8", "model 'lama-3-70b' is not known; did you mean .*llama-3-70b"),
        ("plan llama-3-70b --gpu H20 --context 8", "GPU 'H20' is not known; did you mean .*H200"),
        ("plan some/where --gpu H200 --context 8", "'some/where' does not exist; give a checkpoint, a config.json or"),
        ("plan llama-3-70b --gpu H200 --context 200000", "context=200000 is beyond the 131072 positions"),
        ("plan llama-3-70b --gpu H200 --context 8 --tp 3", "tensor_model_parallel_size=3 does not fit"),
        ("plan llama-3-70b --gpu H200 --context 8 --gpus 6 --tp 4", "world_size=6 is no multiple of 4"),
        ("plan llama-3-70b --gpu H200 --context 8 --weight-dtype nvfp4", "is for experts, and the model has none"),
        ("plan llama-3-70b --gpu H200 --context 8 --kv-interleave 7", "kv_interleave_size=7 does not divide"),
        ("plan llama-3-70b --gpu H200 --context 8 --layout within_tp --exchange fold", "exchange='fold'"),
        ("plan llama-3-70b --gpu H200 --context 8 --plot a.txt", "'a.txt' names no format for a plot"),
        ("plan llama-3-70b --gpu H200 --context 8 --json no/a.json", "'no' is no directory"),
        ("plan --gpu H200 --context 8", "give a MODEL, or its shape: --num-layers, .* are missing"),
        ("plan --gpu H200 --context 8 --num-layers 2", "give a MODEL, or its shape: --hidden-size, .* are missing"),
        ("plan llama-3-70b --gpu H200 --context 8 --num-layers 2", "--num-layers is for a model without a name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(line, message, capsys):
    error = run(line, capsys, code=1)
    assert re.search(message, error), error
    assert error.startswith("megatron-dcp plan: error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        "plan llama-3-70b --context 8",
        "plan llama-3-70b --gpu H200",
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


def test_a_known_model_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; from megatron_dcp.cli import main; "
        "sys.exit(main(['plan', 'deepseek-v3', '--gpu', 'B200', '--context', '65536', '--weight-dtype', 'fp8']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "Take tp" in done.stdout, done.stderr
