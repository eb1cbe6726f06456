"""The stand-ins' signatures against the libraries' sources, read without importing them.

A source is looked for where the library is installed and in the folders of ``MEGATRON_DCP_LIBRARY_SOURCES`` (separated
by ``:``), for machines that have sources but no GPU to install for.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

STANDINS = Path(__file__).resolve().parent.parent / "standins"
FLASHINFER_MLA = "flashinfer/mla/_batch_mla/_wrapper.py"
SIGNATURES = [
    ("te.py", "transformer_engine/pytorch/cpp_extensions/fused_attn.py", "fused_attn_fwd"),
    ("flash_attn_interface.py", "flash_attn_interface.py", "flash_attn_with_kvcache"),
    ("flash_attn.py", "flash_attn/flash_attn_interface.py", "flash_attn_varlen_func"),
    ("flash_mla.py", "flash_mla/flash_mla_interface.py", "flash_mla_with_kvcache"),
    ("flash_mla.py", "flash_mla/flash_mla_interface.py", "get_mla_metadata"),
    *(
        ("flashinfer.py", f"flashinfer/{file}.py", f"{wrapper}.{method}")
        for file, wrapper in (
            ("decode", "BatchDecodeWithPagedKVCacheWrapper"),
            ("prefill", "BatchPrefillWithPagedKVCacheWrapper"),
            ("mla/_batch_mla/_wrapper", "BatchMLAPagedAttentionWrapper"),
        )
        for method in ("__init__", "plan", "run")
    ),
    ("flashinfer.py", "flashinfer/decode.py", "BatchDecodeWithPagedKVCacheWrapper._plan_impl"),
    ("flashinfer.py", "flashinfer/mla/_batch_mla/_contracts.py", "MLAPlanMetadata.csr"),
]


def find_source(path: str) -> Path | None:
    folders = [Path(folder) for folder in os.environ.get("MEGATRON_DCP_LIBRARY_SOURCES", "").split(":") if folder]
    spec = importlib.util.find_spec(path.partition("/")[0].removesuffix(".py"))
    if spec is not None and spec.origin is not None:
        folders.append(
            Path(spec.origin).parent if path.endswith(Path(spec.origin).name) else Path(spec.origin).parents[1]
        )
    return next((folder / path for folder in folders if (folder / path).is_file()), None)


def signature(source: Path, name: str) -> list[tuple[str, str]]:
    """Names and defaults of a function's parameters in order, with ``*`` where the ones by keyword begin."""
    body: list[ast.stmt] = ast.parse(source.read_text()).body
    *classes, function = name.split(".")
    for one in classes:
        (body,) = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == one]
    arguments = [node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == function][-1]
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [(a.arg, "" if d is None else ast.unparse(d)) for a, d in zip(positional, defaults, strict=True)]
    pairs.append((f"*{arguments.vararg.arg if arguments.vararg else ''}", ""))
    pairs += [
        (a.arg, "" if d is None else ast.unparse(d))
        for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [*pairs, (f"**{arguments.kwarg.arg}" if arguments.kwarg else "", "")]


@pytest.mark.parametrize(("standin", "path", "name"), SIGNATURES, ids=lambda x: str(x))
def test_signature(standin: str, path: str, name: str) -> None:
    source = find_source(path)
    if source is None:
        pytest.skip(f"{path} is not here: neither installed nor in MEGATRON_DCP_LIBRARY_SOURCES")
    assert signature(STANDINS / standin, name) == signature(source, name)
