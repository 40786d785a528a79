#!/bin/bash
# Environments that step together: CartPole by gymnasium's CartPoleVectorEnv, without velocities for the memories, in as many
# steps as single environments need? Three seeds, about 20 minutes of one core.
#
#     bash benchmark/vectors.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=vectors
export OMP_NUM_THREADS=1

cartpole="cleanrl_graph/ppo_graph.py --env-id CartPole-v1 --num-envs 16 --learning-rate 1e-3 --total-timesteps 200000"
vector="--vectorization-mode vector_entry_point"
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands \
    "single=$cartpole" "vector=$cartpole $vector" \
    "lstm=cleanrl_graph/ppo_lstm_sparse.py --env-id envs:StatelessCartPole-v1 --total-timesteps 300000 $vector" \
    "gtrxl=cleanrl_graph/ppo_gtrxl.py --env-id envs:StatelessCartPole-v1 --total-timesteps 300000 $vector"
"$PYTHON" benchmark/report.py --table $TABLE --target 475 --systems \
    "CartPole|ppo_graph.py, single environments=single_*" "CartPole|ppo_graph.py, CartPoleVectorEnv=vector_*" \
    "CartPole without velocities|ppo_lstm_sparse.py, VectorEnv=lstm_*" \
    "CartPole without velocities|ppo_gtrxl.py, VectorEnv=gtrxl_*" \
    --note "gymnasium's CartPoleVectorEnv resets an environment in the step after an episode's end; \`steps\` has no such rows. Steps of
single environments without velocities: [stateless_cartpole](../stateless_cartpole/table.md)."
