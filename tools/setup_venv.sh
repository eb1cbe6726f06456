#!/usr/bin/env bash
# Sets up a virtual environment with this project and what its tests need:
#
#     bash tools/setup_venv.sh [VENV [PYTHON]]
#
# VENV is .venv unless given; PYTHON is the first Python >= 3.11 found. Does nothing where VENV is up to date, and may
# run twice at the same time: the second call waits for the first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv}
log() { printf 'setup_venv: %s\n' "$*" >&2; }

# Prints why a Python does not do; nothing where it does.
why_not() {
    local version
    # Runs it: a version manager puts commands on the PATH that only say that they are not active.
    version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || { echo "does not run"; return; }
    case $version in
        2.* | 3.[0-9] | 3.10) echo "is Python $version" ;;
        *) "$1" -c 'import ensurepip, venv' 2>/dev/null || echo "has no venv module (on Debian: apt install python3-venv)" ;;
    esac
}

find_python() {
    local candidate reason seen=""
    for candidate in "$@"; do
        [ "$#" = 1 ] || command -v "$candidate" >/dev/null || continue
        reason=$(why_not "$candidate")
        [ -z "$reason" ] && { echo "$candidate"; return; }
        seen+="; $candidate $reason"
    done
    log "Python 3.11 or newer is needed, and none was found${seen:-; no python3 on the PATH}." \
        "Install one, or name it: bash tools/setup_venv.sh $venv /path/to/python3.11"
    return 1
}

minor_of() { "$1" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null || true; }

# One installation at a time. Locks this folder, so no lock file stays behind; goes with the process, however it ends.
if command -v flock >/dev/null; then
    exec 9<tools
    flock 9
fi

wanted=$(printf '%s\n' "$PWD" | cat - setup.py tools/constraints.txt | cksum)
if [ "$(cat "$venv/.installed" 2>/dev/null || true)" = "$wanted" ]; then
    if [ -z "${2:-}" ] || [ "$(minor_of "$venv/bin/python")" = "$(minor_of "$2")" ]; then
        exit 0
    fi
fi

if [ -n "${2:-}" ]; then
    python=$(find_python "$2")
elif [ -z "$(why_not "$venv/bin/python")" ]; then
    python=$venv/bin/python
else
    python=$(find_python python3.11 python3 python3.12 python3.13 python3.14 python)
fi
if [ "$(minor_of "$venv/bin/python")" != "$(minor_of "$python")" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    log "making $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
fi
rm -f "$venv/.installed"
log "installing into $venv; the first time this takes some minutes and up to several GB (PyTorch)"
quiet=-qq # errors only
[ -t 2 ] && quiet=--no-color # somebody is watching: let pip show how far it is
"$venv/bin/python" -m pip install "$quiet" --disable-pip-version-check -c tools/constraints.txt -e '.[test]'
printf '%s\n' "$wanted" >"$venv/.installed"
log "$venv is ready"
