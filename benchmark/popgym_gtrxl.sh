#!/bin/bash
# The transformer of today on four tasks of POPGym, those where the one of results/popgym was behind: 25 minutes of one core.
# Needs `pip install popgym` beside requirements.txt.
#
#     bash benchmark/popgym_gtrxl.sh [FLAGS OF run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=popgym_gtrxl

tasks=(popgym:popgym-{CountRecallEasy,MultiarmedBanditEasy,NoisyPositionOnlyCartPoleEasy,MineSweeperEasy}-v0)
"$PYTHON" benchmark/run.py --table $TABLE --env-ids "${tasks[@]}" --seeds ${SEEDS:-1 2} "$@" \
    --commands "gtrxl=cleanrl_graph/ppo_gtrxl.py --total-timesteps 500000 --eval-episodes 100"
"$PYTHON" benchmark/report.py --table $TABLE --columns steps SPS MMER final greedy --systems "ppo_gtrxl.py=gtrxl_*" \
    --note "MMER is the best mean return of 65,536 steps. results/popgym has the other systems, and the transformer of before.
Other jobs shared the cores: steps per second say nothing."
