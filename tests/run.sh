#!/usr/bin/env bash
# Lint, types and all tests; and, on a machine that has a Python for the newer line of Megatron-Core too, beside them the
# tests that cover every layer with that line. Arguments go to pytest:
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
newer=""
older=1
if .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    older=0 # .venv itself has the newer line
else
    newer=$(newer_python)
fi

# Both lines at the same time: most tests leave a core idle. (More at once take longer: ranks that wait for each other lose
# their cores to others.)
newer_log=$(mktemp)
newer_pid=""
stop() {
    [ -z "$newer_pid" ] || kill -- "-$newer_pid" 2>/dev/null || true
    rm -f "$newer_log"
}
trap stop EXIT
if [ -n "$newer" ]; then
    setsid bash -c 'bash tools/setup_venv.sh .venv-3.12 "$1" && shift && .venv-3.12/bin/python -m pytest "$@" -m "mcore_line and not one_line"' \
        newer_line "$newer" "$@" >"$newer_log" 2>&1 &
    newer_pid=$!
fi

status=0
say "ruff"
sources=(setup.py megatron_dcp tests tools examples)
.venv/bin/ruff format --check "${sources[@]}" || status=1
.venv/bin/ruff check "${sources[@]}" || status=1
say "mypy"
.venv/bin/python -m mypy || status=1
say "pytest: Python $(.venv/bin/python -c 'import platform, importlib.metadata as m
print(platform.python_version(), "with Megatron-Core", m.version("megatron-core"))')"
.venv/bin/python -m pytest "$@" || status=$?

if [ -n "$newer" ]; then
    newer_status=0
    wait "$newer_pid" || newer_status=$?
    newer_pid=""
    say "pytest: $(.venv-3.12/bin/python --version), the tests that cover every layer, run beside the others"
    cat "$newer_log"
    say "exit codes of the two lines: $status, $newer_status"
    if [ "$newer_status" = 5 ] && [ "$#" -gt 0 ]; then
        say "none of the chosen tests is for every line of Megatron-Core"
    elif [ "$newer_status" != 0 ]; then
        status=$newer_status
    fi
elif [ "$older" = 1 ]; then
    say "skipped: the newer line of Megatron-Core needs Python 3.12 or newer, and this machine has none"
else
    say "skipped: the older line of Megatron-Core, which is for Python 3.11; .venv has $(.venv/bin/python --version)"
fi
exit "$status"
