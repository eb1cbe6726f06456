import json
import os

import pytest

from megatron_dcp.cli.jsonl import OutputFile, read_prompts, to_line
from megatron_dcp.engine.request import RequestOutput

OUTPUT = RequestOutput(
    index=0, prompt_token_ids=[1], token_ids=[2, 3], text="\u20ac", finish_reason="stop", logprobs=[-0.5, -1.0]
)


def write(tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_prompts_in_order_with_blank_lines_and_any_line_end(tmp_path):
    content = '\ufeff{"prompt": "a\u20ac"}\r\n\n  {"token_ids": [1, 2]}  \n{"prompt": ""}\n{"token_ids": []}'
    assert read_prompts(write(tmp_path, content)) == ["a\u20ac", [1, 2], "", []]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON .* at column 2"),
        ("[1, 2]", "a JSON list, not an object"),
        ('"text"', "a JSON str, not an object"),
        ("{}", "exactly one of 'prompt' and 'token_ids'"),
        ('{"prompt": "a", "token_ids": [1]}', "exactly one of"),
        ('{"prompt": "a", "max_tokens": 5}', "unknown key 'max_tokens'"),
        ('{"prompt": 5}', "'prompt' is 5, not a text"),
        ('{"token_ids": 5}', "'token_ids' is not a list of whole numbers"),
        ('{"token_ids": [1, 2.5]}', "'token_ids' is not a list of whole numbers"),
        ('{"token_ids": [true]}', "'token_ids' is not a list of whole numbers"),
        (b'{"prompt": "\xff"}', "can't decode"),
        ('{"prompt": "a\\ud800"}', "'prompt' has the lone surrogate .* at place 1"),
        pytest.param("[" * 100_000, "nested too deeply", id="nested"),
        pytest.param('{"token_ids": [' + "1" * 5000 + "]}", "a number with too many digits", id="digits"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, message):
    good = b'{"prompt": "a"}\n\n'
    path = write(tmp_path, good + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good)
    with pytest.raises(ValueError, match=rf"prompts\.jsonl:3: .*{message}.*a line is {{"):
        read_prompts(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_prompts(tmp_path, content):
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(tmp_path, content))


def test_lines_have_the_contracts_keys_in_order():
    assert list(json.loads(to_line(OUTPUT))) == [
        "index", "prompt_token_ids", "token_ids", "text", "finish_reason", "logprobs"
    ]  # fmt: skip
    assert "\u20ac" in to_line(OUTPUT) and to_line(OUTPUT).count("\n") == 1
    assert to_line(OUTPUT, ascii_only=True).isascii()
    assert json.loads(to_line(OUTPUT, ascii_only=True)) == json.loads(to_line(OUTPUT))


def test_the_output_appears_only_when_it_is_complete(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    with OutputFile(str(path)) as file:
        assert path.read_text() == "old"
        file.finish([OUTPUT, OUTPUT])
    assert path.read_text(encoding="utf-8") == to_line(OUTPUT) * 2
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old")

    def broken():
        yield OUTPUT
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), OutputFile(str(path)) as file:
        file.finish(broken())
    with pytest.raises(KeyError), OutputFile(str(path)):
        raise KeyError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "out.jsonl"
    target.write_text("old")
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    with OutputFile(str(link)) as file:
        file.finish([OUTPUT])
    assert link.is_symlink() and target.read_text(encoding="utf-8") == to_line(OUTPUT)


def test_a_device_is_written_directly():
    with OutputFile("/dev/null") as file:
        file.finish([OUTPUT])
    assert not os.path.isfile("/dev/null")


@pytest.mark.parametrize("name", [".", "missing/out.jsonl"])
def test_a_name_that_cannot_be_written(tmp_path, name):
    with pytest.raises(ValueError, match="--output"):
        OutputFile(str(tmp_path / name))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_full_disk_names_the_file():
    with pytest.raises(ValueError, match="--output /dev/full cannot be written: No space left.*free some space"):
        with OutputFile("/dev/full") as file:
            file.finish([OUTPUT])
