#!/bin/bash
# The tables of benchmark/results/speed/ anew, in 14 to 20 minutes on 2 idle cores, and their ratios at the end; leave the
# machine alone meanwhile. Systems that are compared run in turns A B C A B C ..., figures are medians.
#
#     bash benchmark/speed.sh [--out DIR]
#
# PYTHON runs this repository, PEER_PYTHON and TRXL_PYTHON the peers (made in .venv-peers and .venv-trxl if missing, not
# counted in these minutes). CLEANRL is a folder with CleanRL's ppo.py, ppo_trxl.py and pom_env.py (downloaded at a fixed
# commit if not given).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
RESULTS=$RESULTS/speed
export OMP_NUM_THREADS=1

PEER_PYTHON=${PEER_PYTHON:-$(environment .venv-peers benchmark/peers/requirements-sb3.txt)}
TRXL_PYTHON=${TRXL_PYTHON:-$(environment .venv-trxl benchmark/peers/requirements-trxl.txt)}
if [ -z "${CLEANRL:-}" ]; then
    CLEANRL=$(mktemp -d)
    for file in ppo.py ppo_trxl/ppo_trxl.py ppo_trxl/pom_env.py; do
        curl -fsSL -o "$CLEANRL/$(basename $file)" \
            https://raw.githubusercontent.com/vwxyzjn/cleanrl/fe8d8a03c41a7ef5b523e2e354bd01c363e786bb/cleanrl/$file
    done
fi

SECONDS=0
measure() {
    echo "== $((SECONDS / 60)) min: $1" >&2
    "$PYTHON" benchmark/speed/"$@"
}
measure layout.py --repeats 7 --out $RESULTS/tables.md#layout
measure layout.py --tenfold --repeats 5 --out $RESULTS/tables.md#layout_tenfold
measure sps.py --rounds 3 --total-timesteps 16384 --peer-python "$PEER_PYTHON" --out $RESULTS/tables.md#sps
measure lstm_kernels.py --repeats 3 --out $RESULTS/tables.md#lstm_kernels
measure attention.py --parts memory --out $RESULTS/tables.md#attention
measure attention.py --parts sps --rounds 1 --total-timesteps 8192 --peer-python "$TRXL_PYTHON" \
    --peer-script "$CLEANRL/ppo_trxl.py" --out $RESULTS/tables.md#trxl
measure vector_envs.py --rounds 3 --decisions 65536 --training-decisions 4096 --out $RESULTS/tables.md#vector_envs
measure cartpole_vs_cleanrl.py --rounds 5 --total-timesteps 50000 --cleanrl "$CLEANRL/ppo.py" --out $RESULTS/tables.md#cartpole
measure time_to_475.py --rounds 2 --cleanrl "$CLEANRL/ppo.py" --out $RESULTS/tables.md#time_to_475

echo
echo "All tables after $((SECONDS / 60)) min $((SECONDS % 60)) s, in $RESULTS/tables.md:"
grep '^[|#]' $RESULTS/tables.md
