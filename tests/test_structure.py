"""Who may import whom, and that importing does nothing else: the rules of docs/design.md, read off the source."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import megatron_dcp

PACKAGE = Path(__file__).resolve().parent.parent / "megatron_dcp"

# Left to right: a module imports what stands left of it, and its own part; parts of one level are strangers.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("config", "metrics", "merge", "shard", "traffic", "attention_shape", "figures"),
    ("capture",),
    ("rank_groups", "distributed", "model_config", "core_attention", "gemma"),
    ("rope", "router", "model_tensors"),
    ("_cpu", "_mcore"),
    ("parallel_state",),
    ("kernels",),
    ("cache", "attention", "comm"),
    ("layers", "planner"),
    ("checkpoint",),
    ("engine",),
    ("server",),
    ("verification", "training", "profiling", "calibration"),
    ("cli",),
    ("__init__", "__main__"),
)
# _mcore builds a model under the shim of _cpu.
SAME_LEVEL = {("_mcore", "_cpu")}
MAY_IMPORT_MEGATRON = (
    "parallel_state.py",
    "_mcore.py",
    "router.py",
    "core_attention.py",
    "gemma.py",
    "layers/",
    "checkpoint/",
)
OPTIONAL = (
    "transformer_engine",
    "flash_attn",
    "flash_attn_interface",
    "flashinfer",
    "flash_mla",
    "cudnn",
    "prometheus_client",
    "matplotlib",
)
WITHOUT_TORCH = (
    "config.py",
    "model_config.py",
    "metrics.py",
    "rank_groups.py",
    "attention_shape.py",
    "figures.py",
    "model_tensors.py",
    "traffic.py",
    "cache/layout.py",
    "cache/blocks.py",
    "cache/prefix.py",
    "cache/sizes.py",
    "engine/batch.py",
    "engine/draft.py",
    "engine/params.py",
    "engine/stops.py",
    "engine/prometheus.py",
    "engine/request.py",
    "engine/scheduler.py",
    "engine/stats.py",
    "engine/wire.py",
    "planner/__init__.py",
    "planner/plot.py",
    "planner/prefill.py",
    "planner/render.py",
    "profiling/advice.py",
    "profiling/clock.py",
    "profiling/report.py",
    "profiling/page.py",
)


@dataclass(frozen=True)
class Import:
    """One import: ``name`` is the module, or for ``from a import b`` both ``a`` and ``a.b`` are listed."""

    name: str
    line: int
    inside_function: bool
    for_types_only: bool

    @property
    def root(self) -> str:
        return self.name.split(".")[0]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walk(node: ast.AST, inside: bool, types: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, inside, types) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
        assert node.module is not None
        yield Import(node.module, node.lineno, inside, types)
        yield from (Import(f"{node.module}.{alias.name}", node.lineno, inside, types) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        if node.args and isinstance(node.args[0], ast.Constant):
            yield Import(str(node.args[0].value), node.lineno, inside, types)
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    body_is_for_types = is_type_checking(node)
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child, inside, types or (body_is_for_types and field == "body"))


@cache
def imports(path: Path) -> tuple[Import, ...]:
    return tuple(walk(ast.parse(path.read_text()), inside=False, types=False))


def sources() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert found
    return found


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def level_of(part: str) -> int:
    for level, parts in enumerate(LEVELS):
        if part in parts:
            return level
    raise AssertionError(f"megatron_dcp.{part} has no place among the import levels; give it one in LEVELS")


def part_of(path: Path) -> str:
    return relative(path).split("/")[0].removesuffix(".py")


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_imports_go_left_only(path: Path) -> None:
    part = part_of(path)
    own = level_of(part)
    for one in imports(path):
        names = one.name.split(".")
        # `from megatron_dcp import x` is listed as megatron_dcp and as megatron_dcp.x; the first says nothing.
        if names[0] != "megatron_dcp" or len(names) == 1:
            continue
        if not (PACKAGE / names[1]).is_dir() and not (PACKAGE / f"{names[1]}.py").is_file():
            assert part in ("cli", "__main__"), f"line {one.line}: {one.name} goes by the package's front door"
            continue
        allowed = names[1] == part or level_of(names[1]) < own or (part, names[1]) in SAME_LEVEL
        assert allowed, f"line {one.line}: megatron_dcp.{part} may not import {one.name}"


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_megatron_is_imported_in_few_places(path: Path) -> None:
    if not relative(path).startswith(MAY_IMPORT_MEGATRON):
        lines = [one.line for one in imports(path) if one.root == "megatron"]
        assert not lines, f"lines {lines}: Megatron belongs in {', '.join(MAY_IMPORT_MEGATRON)}"


@pytest.mark.parametrize("library", OPTIONAL)
def test_optional_library_is_imported_in_one_file_inside_functions(library: str) -> None:
    users = {relative(path): one for path in sources() for one in imports(path) if one.root == library}
    assert len(users) <= 1, f"{library} is imported in {sorted(users)}"
    outside = [
        f"{relative(path)}:{one.line}"
        for path in sources()
        for one in imports(path)
        if one.root == library and not one.inside_function and not one.for_types_only
    ]
    assert not outside, f"{library} may be missing; import it inside a function: {outside}"


# They never import triton themselves: they say whether the others can be imported.
KERNELS_WITHOUT_TRITON = ("kernels/__init__.py", "kernels/choice.py", "kernels/twins.py")


def test_triton_is_imported_in_kernels_only_and_these_inside_functions() -> None:
    needs = {
        f"megatron_dcp.{relative(path)[:-3].replace('/', '.')}"
        for path in sources()
        if any(one.root == "triton" for one in imports(path))
    }
    assert needs, "no module imports triton: the rule below holds nothing"
    allowed = {f"megatron_dcp.{name[:-3].replace('/', '.')}" for name in KERNELS_WITHOUT_TRITON}
    assert all(name.startswith("megatron_dcp.kernels.") for name in needs - allowed) and not needs & allowed, needs
    at_top = [
        f"{relative(path)}:{one.line}: {one.name}"
        for path in sources()
        for one in imports(path)
        if f"megatron_dcp.{relative(path)[:-3].replace('/', '.')}" not in needs
        and any(one.name == name or one.name.startswith(f"{name}.") for name in needs)
        and not one.inside_function
        and not one.for_types_only
    ]
    assert not at_top, f"triton may be missing; import these inside a function: {at_top}"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_needs_no_torch_runs_without_it() -> None:
    modules = [f"megatron_dcp.{name.removesuffix('.py').replace('/', '.')}" for name in WITHOUT_TORCH]
    run_python(
        f"""
import importlib, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "megatron", "transformers"):
            raise ImportError(f"{{name}} is not here")
sys.meta_path.insert(0, Missing())
for name in {modules!r}:
    importlib.import_module(name)
"""
    )


def test_package_itself_is_light() -> None:
    out = run_python(
        "import sys, megatron_dcp; print(*(m for m in ('torch', 'megatron', 'numpy') if m in sys.modules))"
    )
    assert out.split() == []


def test_every_public_name_is_there() -> None:
    """And nothing that can be had is left out of ``__all__``, which is what ``import *`` brings."""
    for name in megatron_dcp.__all__:
        assert getattr(megatron_dcp, name).__name__ == name
    assert set(megatron_dcp.__all__) == set(megatron_dcp._HOME)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        megatron_dcp.nothing  # noqa: B018


def test_import_has_no_side_effects() -> None:
    """What foreign libraries do at their import is theirs: they are imported before the state is taken."""
    has_triton = importlib.util.find_spec("triton") is not None
    modules = [
        f"megatron_dcp.{relative(p)[:-3].replace('/', '.')}"
        for p in sources()
        if has_triton or all(one.root != "triton" for one in imports(p))
    ]
    modules = [name.removesuffix(".__init__") for name in modules if not name.endswith("__main__")]
    foreign = sorted(
        {
            one.name
            for path in sources()
            for one in imports(path)
            if one.root not in ("megatron_dcp", *OPTIONAL) and not one.inside_function and not one.for_types_only
        }
    )
    run_python(
        f"""
import importlib, logging, os, random, signal, sys, threading, warnings
import numpy, torch
def state():
    return {{
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "signals": [signal.getsignal(s) for s in signal.valid_signals()],
        "threads": threading.active_count(),
        "warnings": list(warnings.filters),
        "logging": (logging.root.level, list(logging.root.handlers)),
        "random": (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
        "distributed": torch.distributed.is_initialized(),
        "cuda": (torch.cuda.is_initialized(), torch.cuda.current_device, torch.cuda.is_available),
        "hooks": (sys.excepthook, threading.excepthook, sys.stdout, sys.stderr),
    }}
for name in {foreign!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:  # `from a import b` where b is no module
        pass
before = state()
for name in {modules!r}:
    importlib.import_module(name)
after = state()
changed = [name for name in before if before[name] != after[name]]
assert not changed, changed
"""
    )
