#!/bin/bash
# GraphExplore: an LSTM state per node that was seen (sparse, growing) against one LSTM state per environment and against
# no memory. About 25 minutes on one core.
#
#     bash benchmark/ppo_lstm_sparse.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=ppo_lstm_sparse

flags="--total-timesteps 250000 --eval-episodes 200"
alike="--num-envs 16 --learning-rate 1e-3 --ent-coef 0 --no-clip-vloss --norm-obs"  # as the LSTM's defaults
"$PYTHON" benchmark/run.py --table $TABLE --env-ids envs:GraphExplore-v0 --seeds ${SEEDS:-1 2 3} "$@" --commands \
    "mini=cleanrl_graph/ppo_lstm_sparse_mini.py" \
    "per_node=cleanrl_graph/ppo_lstm_sparse.py $flags" \
    "per_env=cleanrl_graph/ppo_lstm_sparse.py $flags --no-state-per-node" \
    "no_memory=cleanrl_graph/ppo_graph.py $flags $alike"
"$PYTHON" benchmark/report.py --table $TABLE --episodes 500 --beside ../beside.csv \
    --reference 0.686 "depth first, perfect memory" --ylabel "share of new nodes" \
    --systems "one LSTM state per node, ppo_lstm_sparse_mini.py=mini_*" "one LSTM state per node=per_node_*" "one LSTM state per environment=per_env_*" \
    "no memory (ppo_graph.py)=no_memory_*" \
    --note "Share of the 64 steps that reach a node for the first time. Reference policies: 1,000 episodes. The state per node
was trained on a machine that was busy with other work, so its SPS compares with nothing."
