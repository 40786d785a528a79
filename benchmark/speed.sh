#!/bin/bash
# All tables of benchmark/results/speed/, in about 25 minutes on 2 cores; leave the machine alone meanwhile.
#
#     bash benchmark/speed.sh
#
# PYTHON runs this repository, PEER_PYTHON the peers (made in .venv-peers if missing), CLEANRL is the absolute path of
# CleanRL's ppo.py (downloaded at a fixed commit if not given).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python}
RESULTS=benchmark/results/speed
export OMP_NUM_THREADS=1

if [ -z "${PEER_PYTHON:-}" ]; then
    PEER_PYTHON=.venv-peers/bin/python
    if [ ! -x "$PEER_PYTHON" ]; then
        "$PYTHON" -m venv .venv-peers
        "$PEER_PYTHON" -m pip install -r benchmark/requirements.txt
    fi
    PEER_PYTHON=$PWD/$PEER_PYTHON
fi
if [ -z "${CLEANRL:-}" ]; then
    CLEANRL=$(mktemp -d)/ppo.py
    curl -fsSL -o "$CLEANRL" \
        https://raw.githubusercontent.com/vwxyzjn/cleanrl/fe8d8a03c41a7ef5b523e2e354bd01c363e786bb/cleanrl/ppo.py
fi

"$PYTHON" benchmark/speed/layout.py --out $RESULTS/layout.md
"$PYTHON" benchmark/speed/layout.py --tenfold --repeats 7 --out $RESULTS/layout_tenfold.md
"$PYTHON" benchmark/speed/breakdown.py --out $RESULTS/breakdown.md
"$PYTHON" benchmark/speed/sps.py --total-timesteps 24576 --peer-python "$PEER_PYTHON" --out $RESULTS/sps.md
"$PYTHON" benchmark/speed/sps.py --total-timesteps 24576 --num-threads 2 --num-envs 64 --peer-python "$PEER_PYTHON" \
    --out $RESULTS/sps_2_threads.md
"$PYTHON" benchmark/speed/lstm_kernels.py --out $RESULTS/lstm_kernels.md
"$PYTHON" benchmark/speed/attention.py --parts memory --out $RESULTS/attention
"$PYTHON" benchmark/speed/cartpole_vs_cleanrl.py --cleanrl "$CLEANRL" --out $RESULTS/cartpole.md
