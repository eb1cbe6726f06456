#!/usr/bin/env bash
# Lint, types and all tests; then, on a machine that has a Python for the newer line of Megatron-Core too, the tests that
# cover every layer with that line. Arguments go to pytest:
#
#     bash tests/run.sh [-k NAME …]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

say() { printf '\n== %s\n' "$*"; }

# Prints a Python >= 3.12 that can make virtual environments, if there is one.
newer_python() {
    local candidate minor
    for minor in 12 13 14; do
        for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python; do
            if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
                echo "$candidate"
                return
            fi
        done
    done
}

bash tools/setup_venv.sh .venv
say "ruff"
sources=(setup.py megatron_dcp tests tools examples)
.venv/bin/ruff format --check "${sources[@]}"
.venv/bin/ruff check "${sources[@]}"
say "mypy"
.venv/bin/python -m mypy
say "pytest: Python $(.venv/bin/python -c 'import platform, importlib.metadata as m
print(platform.python_version(), "with Megatron-Core", m.version("megatron-core"))')"
.venv/bin/python -m pytest "$@"

if .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    say "skipped: the older line of Megatron-Core, which is for Python 3.11; .venv has $(.venv/bin/python --version)"
    exit 0
fi
newer=$(newer_python)
if [ -z "$newer" ]; then
    say "skipped: the newer line of Megatron-Core needs Python 3.12 or newer, and this machine has none"
    exit 0
fi
bash tools/setup_venv.sh .venv-3.12 "$newer"
say "pytest: $(.venv-3.12/bin/python --version), the tests that cover every layer"
status=0
.venv-3.12/bin/python -m pytest "$@" -m mcore_line || status=$?
if [ "$status" = 5 ] && [ "$#" -gt 0 ]; then
    say "none of the chosen tests is for every line of Megatron-Core"
    exit 0
fi
exit "$status"
