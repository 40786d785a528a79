#!/bin/bash
# ppo_graph_async.py beside ppo_graph.py: benchmark/results/speed/tables.md, in about 20 minutes on 2 cores; leave the
# machine alone meanwhile.
#
#     bash benchmark/async.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
"${PYTHON:-python}" benchmark/speed/async.py --out benchmark/results/speed/tables.md#async "$@"
