#!/usr/bin/env bash
# Sets up .venv, then asks a small Megatron model for facts hidden in a long text, on 4 ranks (tp 2 x dcp 2).
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup_venv.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} # every rank would list the optional packages that Megatron-Core misses
echo "starting 4 ranks; importing Megatron-Core takes them 10 to 30 seconds …"
exec .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 4 examples/quickstart/quickstart.py "$@"
