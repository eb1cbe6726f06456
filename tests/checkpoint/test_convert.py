"""Every direction between the formats, bit by bit; what a new checkpoint consists of; conversions that stop midway."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dcp.checkpoint import convert, detect_format, load_tokenizer, open_source, read_config
from megatron_dcp.checkpoint.hf import HFSource
from megatron_dcp.checkpoint.hf_write import write_hf
from models import FAMILIES, LLAMA3, MOE_FAMILIES, YARN, hf_model, hf_tensors, tiny_model

FORMATS = ("torch_dist", "legacy", "hf")
ITERATION = "iter_0000001"


def assert_same_model(one: Path, other: Path) -> None:
    """Two Hugging Face directories hold the same tensors, bit by bit."""
    a, b = hf_tensors(one), hf_tensors(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    ("family", "tied"), [(f, tied) for f in FAMILIES for tied in (False, True)] + [(f, False) for f in MOE_FAMILIES]
)
def test_every_direction_is_bit_identical(family: str, tied: bool, tmp_path: Path) -> None:
    original = tiny_model(family, tied=tied)
    start = {"hf": original}
    for to in ("torch_dist", "legacy"):
        start[to] = convert(original, tmp_path / to, to=to)
    for src in FORMATS:
        for to in FORMATS:
            dst = convert(start[src], tmp_path / f"{src}-{to}", to=to)
            assert detect_format(dst) == to
            assert read_config(dst) == read_config(original)
            back = dst if to == "hf" else convert(dst, tmp_path / f"{src}-{to}-hf", to="hf")
            assert_same_model(back, original)
            assert json.loads((back / "config.json").read_text()) == json.loads((original / "config.json").read_text())


# DeepSeek's routers and their biases stay fp32.
@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", "bfloat16"), ("qwen3", "float16"), ("deepseek_v3", "bfloat16")]
)
def test_keeps_the_dtype(family: str, dtype: str, tmp_path: Path) -> None:
    original = tiny_model(family, dtype=dtype)
    for to in ("torch_dist", "legacy"):
        back = convert(convert(original, tmp_path / to, to=to), tmp_path / f"{to}-hf", to="hf")
        assert_same_model(back, original)
        assert json.loads((back / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen2", {"rope_scaling": LLAMA3, "rope_theta": 50000.0}),
        ("mixtral", {}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("deepseek_v2", {"rope_scaling": YARN}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": None}),
        ("deepseek_v3", {"rope_theta": 50000.0}),
    ],
)
def test_transformers_reads_what_was_written_without_the_original_config(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    original = tiny_model(family, **keys)
    legacy = convert(original, tmp_path / "legacy", to="legacy")
    file = legacy / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["args"].hf_config = None  # as in a checkpoint that was trained by Megatron
    torch.save(state, file)
    written = convert(legacy, tmp_path / "hf", to="hf")
    assert json.loads((written / "config.json").read_text())["model_type"] == family
    ids = torch.arange(90)[None]
    with torch.no_grad():
        assert torch.equal(hf_model(written)(ids).logits, hf_model(original)(ids).logits)
    assert read_config(written) == read_config(original)


def test_sharded_files_in_and_out(tmp_path: Path) -> None:
    original = tiny_model("llama", max_shard_size="20KB")
    assert len(list(original.glob("*.safetensors"))) > 1
    dist = convert(original, tmp_path / "dist", to="torch_dist")
    (tmp_path / "hf").mkdir()
    write_hf(open_source(dist), tmp_path / "hf", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in hf_tensors(original).values())
    assert index["weight_map"].keys() == hf_tensors(original).keys()
    assert_same_model(tmp_path / "hf", original)
    assert torch.equal(hf_model(tmp_path / "hf").lm_head.weight, hf_model(original).lm_head.weight)


def test_vocabulary_is_padded_with_zeros_and_comes_back_unpadded(tmp_path: Path) -> None:
    original = tiny_model("llama", vocab_size=100)
    for to in ("torch_dist", "legacy"):
        source = open_source(convert(original, tmp_path / to, to=to))
        assert (source.config.vocab_size, source.config.padded_vocab_size) == (100, 128)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensor = source.read(name)
            assert tensor.shape[0] == 128 and tensor[:100].any(dim=1).all() and not tensor[100:].any()
        back = convert(tmp_path / to, tmp_path / f"{to}-hf", to="hf")
        assert hf_tensors(back)["model.embed_tokens.weight"].shape[0] == 100


def test_garbage_in_padding_rows_does_not_get_out(tmp_path: Path) -> None:
    legacy = convert(tiny_model("llama"), tmp_path / "legacy", to="legacy")
    file = legacy / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["model"]["output_layer.weight"][100:] = float("nan")
    torch.save(state, file)
    assert not open_source(legacy).read("output_layer.weight")[100:].any()
    assert_same_model(convert(legacy, tmp_path / "hf", to="hf"), tiny_model("llama"))


def test_tokenizer_and_end_tokens_go_along(tmp_path: Path) -> None:
    original = tiny_model("qwen3", tokenizer=True)
    text = "naïve 漢字\n"
    ids = load_tokenizer(original)(text)["input_ids"]
    assert ids and load_tokenizer(tiny_model("qwen3")) is None
    last = original
    for to in ("torch_dist", "legacy", "hf"):
        last = convert(last, tmp_path / to, to=to)
        tokenizer = load_tokenizer(last)
        assert tokenizer(text)["input_ids"] == ids and tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id == 256
        assert read_config(last).eos_token_ids == (256,)
        assert (last / "generation_config.json").read_bytes() == (original / "generation_config.json").read_bytes()


def test_megatron_layout_on_disk(tmp_path: Path) -> None:
    original = tiny_model("llama")
    dist = convert(original, tmp_path / "dist", to="torch_dist")
    legacy = convert(original, tmp_path / "legacy", to="legacy")
    for root in (dist, legacy):
        assert (root / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
        assert read_config(root / ITERATION) == read_config(root)
    assert {"metadata.json", ".metadata", "common.pt"} < {p.name for p in (dist / ITERATION).iterdir()}
    assert [p.name for p in (legacy / ITERATION).iterdir()] == ["mp_rank_00"]
    # Where it was written to is nobody's business: the directory had another name then.
    assert str(tmp_path).encode() not in (dist / ITERATION / ".metadata").read_bytes()


def test_iteration_is_kept_and_an_iteration_directory_can_be_named(tmp_path: Path) -> None:
    dist = convert(tiny_model("llama", tokenizer=True), tmp_path / "dist", to="torch_dist")
    (dist / ITERATION).rename(dist / "iter_0001200")
    (dist / "latest_checkpointed_iteration.txt").write_text("1200")
    legacy = convert(dist / "iter_0001200", tmp_path / "legacy", to="legacy")
    assert (legacy / "iter_0001200").is_dir()
    assert (legacy / "tokenizer.json").is_file()
    (dist / "iter_0001200").rename(dist / "release")
    (dist / "latest_checkpointed_iteration.txt").write_text("release")
    assert read_config(dist) == read_config(legacy) == read_config(dist / "release")


def test_existing_destination_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "precious").write_text("data")
    with pytest.raises(ValueError, match="exists already.*another name"):
        convert(tiny_model("llama"), tmp_path / "dst", to="torch_dist")
    assert (tmp_path / "dst" / "precious").read_text() == "data"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="exists already"):
        convert(tiny_model("llama"), tmp_path / "link", to="hf")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), ValueError("bad")])
@pytest.mark.parametrize("to", FORMATS)
def test_interrupted_conversion_leaves_nothing(to: str, error: BaseException, tmp_path: Path, monkeypatch) -> None:
    read, calls = HFSource._read, []

    def failing(self: HFSource, name: str) -> torch.Tensor:
        calls.append(name)
        if len(calls) == 9:
            raise error
        return read(self, name)

    monkeypatch.setattr(HFSource, "_read", failing)
    expected: Any = error if isinstance(error, type) else ValueError
    with pytest.raises(expected, match="bad|the disk of .* was full before .*dst' was complete: it takes|^$"):
        convert(tiny_model("qwen2"), tmp_path / "dst", to=to)
    assert len(calls) == 9
    assert list(tmp_path.iterdir()) == []


def test_unknown_format_and_missing_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="to='gguf' is not known; use one of torch_dist, legacy, hf"):
        convert(tiny_model("llama"), tmp_path / "dst", to="gguf")
    with pytest.raises(ValueError, match="does not exist"):
        convert(tmp_path / "no", tmp_path / "dst")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no checkpoint that is known.*holds nothing"):
        convert(tmp_path / "empty", tmp_path / "dst")
    with pytest.raises(ValueError, match="is a file"):
        convert(tiny_model("llama") / "model.safetensors", tmp_path / "dst")
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize(
    ("tracker", "message"),
    [("17", "names 'iter_0000017', which is not there; there are iter_0000001"), ("latest", "neither an iteration")],
)
def test_wrong_tracker(tracker: str, message: str, tmp_path: Path) -> None:
    dist = convert(tiny_model("llama"), tmp_path / "dist", to="torch_dist")
    (dist / "latest_checkpointed_iteration.txt").write_text(tracker)
    with pytest.raises(ValueError, match=message):
        open_source(dist)
    (dist / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(ValueError, match="has no latest_checkpointed_iteration.txt.*iter_0000001"):
        open_source(dist)


def test_progress_counts_bytes_of_every_tensor(tmp_path: Path) -> None:
    source = open_source(tiny_model("qwen3"))
    sizes = [source.read(name).nbytes for name in source.specs]
    for to in FORMATS:
        seen: list[tuple[int, int]] = []
        convert(tiny_model("qwen3"), tmp_path / to, to=to, progress=lambda *counts, seen=seen: seen.append(counts))
        assert [total for _, total in seen] == [sum(sizes)] * len(sizes)
        assert sorted(b - a for (a, _), (b, _) in zip([(0, 0), *seen], seen, strict=False)) == sorted(sizes)


def test_source_is_only_read(tmp_path: Path) -> None:
    src = shutil.copytree(tiny_model("llama", tokenizer=True), tmp_path / "src")
    before = {p.name: p.read_bytes() for p in src.iterdir()}
    convert(src, tmp_path / "dst", to="legacy")
    assert {p.name: p.read_bytes() for p in src.iterdir()} == before


def test_the_new_checkpoint_lies_outside_of_the_old_one(tmp_path: Path) -> None:
    source = convert(tiny_model("llama"), tmp_path / "source", to="torch_dist")
    before = sorted(source.rglob("*"))
    for inside in (source / "sub", source / ITERATION / "sub"):
        with pytest.raises(ValueError, match="lies in the checkpoint .*choose a name outside"):
            convert(source, inside, to="hf")
    assert sorted(source.rglob("*")) == before


def test_a_disk_without_room_is_found_out_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model("llama")
    needed = sum(tensor.numel() * tensor.element_size() for tensor in hf_tensors(source).values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed // 2))
    with pytest.raises(ValueError, match=f"takes [0-9]+ bytes, but the disk of .* has {needed // 2} left; free some"):
        convert(source, tmp_path / "new" / "deep", to="legacy")
    assert not list(tmp_path.iterdir())
