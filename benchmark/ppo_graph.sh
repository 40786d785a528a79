#!/bin/bash
# Tasks with a known optimum: does each head of ppo_graph.py reach it? About 12 minutes on one core for one seed.
#
#     bash benchmark/ppo_graph.sh [FLAGS OF run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=ppo_graph

flags="cleanrl_graph/ppo_graph.py --num-envs 16 --learning-rate 1e-3 --gnn-layers 2 --eval-episodes 200"
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1} "$@" --commands \
    "poisson_1_hop=$flags --env-id envs:PoissonGraph-v0 --total-timesteps 200000" \
    "poisson_2_hops=$flags --env-id envs:PoissonGraph-v0 --env-kwargs '{\"hops\": 2}' --total-timesteps 800000" \
    "best_of_set=$flags --env-id envs:BestOfSet-v0 --total-timesteps 800000" \
    "autoregressive=$flags --env-id envs:PairNodes-v0 --total-timesteps 200000 --autoregressive" \
    "independent=$flags --env-id envs:PairNodes-v0 --total-timesteps 200000"
