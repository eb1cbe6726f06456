#!/usr/bin/env bash
# What only a GPU can show, in nine minutes at most: the tests of tests/gpu, then the kernel benchmark. Writes
# one report; nothing is built, and only what is missing for the tests is installed (PYTHON names an environment to use):
#
#     bash tools/gpu_check.sh [REPORT.json]
set -euo pipefail
report=${1:-gpu_report.json}
case $report in /*) ;; *) report=$PWD/$report ;; esac
case ${PYTHON:-} in */*) PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/${PYTHON##*/} ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${PYTHON:-}" ]; then
    bash tools/setup_venv.sh .venv
    PYTHON=.venv/bin/python
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

echo "== environment"
"$PYTHON" -m megatron_dcp env --json >"$folder/env.json"
"$PYTHON" -m megatron_dcp env
"$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || {
    echo "gpu_check: torch sees no GPU here; run this on a machine that has one" >&2
    exit 1
}
echo "== tests"
tests=0
timeout -s INT 300 "$PYTHON" -m pytest -q --maxfail 20 --junitxml "$folder/tests.xml" tests/gpu || tests=$?
echo "== kernels"
kernels=0
timeout 240 "$PYTHON" tools/bench.py kernels --seconds 180 | tee "$folder/kernels.txt" || kernels=$?
"$PYTHON" tools/gpu_report.py "$folder" "$report" --tests-status "$tests" --kernels-status "$kernels"
