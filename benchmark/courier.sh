#!/bin/bash
# Courier: houses two streets away, by streets that are out of sight: ppo_lstm_sparse.py with and without --remember-edges.
# About 10 minutes on one core.
#
#     bash benchmark/courier.sh [FLAGS OF run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=courier

flags="--total-timesteps 40000 --eval-episodes 200"
"$PYTHON" benchmark/run.py --table $TABLE --env-ids envs:Courier-v0 --seeds ${SEEDS:-1 2 3} "$@" --commands \
    "edges=cleanrl_graph/ppo_lstm_sparse.py $flags --remember-edges" \
    "nodes=cleanrl_graph/ppo_lstm_sparse.py $flags"
"$PYTHON" benchmark/report.py --table $TABLE --episodes 200 --ylabel "share of the parcels that can be delivered" \
    --reference 0.41 "nothing remembered" \
    --systems "nodes and edges (--remember-edges)=edges_*" "nodes=nodes_*" \
    --note "Return: deliveries by those that are possible. Reference: a policy without memory, courier.reference_scores(1000).
The machine was busy with other work, so SPS compares with that of no other table."
