#!/bin/bash
# --double-buffer and --compile: benchmark/results/speed/{double_buffer,compile}.md, in about 5 minutes on 2 cores; leave
# the machine alone meanwhile. (torchrun: benchmark/speed.sh, acting while learning: benchmark/async.sh.)
#
#     bash benchmark/processes.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
"${PYTHON:-python}" benchmark/speed/double_buffer.py --out benchmark/results/speed/double_buffer.md
"${PYTHON:-python}" benchmark/speed/compile.py --out benchmark/results/speed/compile.md
