#!/bin/bash
# ppo_graph_async.py beside ppo_graph.py: benchmark/results/speed/tables.md, in about 20 minutes on 2 cores; leave the
# machine alone meanwhile.
#
#     bash benchmark/async.sh [--out DIR] [FLAGS OF async.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS=1
"$PYTHON" benchmark/speed/async.py --out $RESULTS/speed/tables.md#async "$@"
