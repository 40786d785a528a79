#!/bin/bash
# All tables of benchmark/results/reliability/, in about 20 minutes on one core.
#
#     bash benchmark/reliability.sh [--out DIR]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
RESULTS=$RESULTS/reliability
export OMP_NUM_THREADS=1

"$PYTHON" benchmark/reliability/kill.py --times 40 --out $RESULTS/tables.md#kill
"$PYTHON" benchmark/reliability/soak.py --total-timesteps 2000000 --out $RESULTS/tables.md#soak
"$PYTHON" benchmark/reliability/soak.py --total-timesteps 1000000 --num-workers 1 --out $RESULTS/tables.md#soak_workers
"$PYTHON" tests/tries.py --out $RESULTS
