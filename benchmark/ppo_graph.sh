#!/bin/bash
# Tasks with a known optimum: does each head of ppo_graph.py reach it? Three seeds, less than an hour of one core. In
# PoissonGraph choices change nothing later, so its discount is 0; BestOfSet has one step.
#
#     bash benchmark/ppo_graph.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=ppo_graph

flags="cleanrl_graph/ppo_graph.py --num-envs 16 --learning-rate 1e-3 --gnn-layers 2 --eval-episodes 200"
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands \
    "mini=cleanrl_graph/ppo_graph_mini.py --env-id cleanrl_graph.envs:PoissonGraph-v0" \
    "poisson_1_hop=$flags --env-id envs:PoissonGraph-v0 --gamma 0 --total-timesteps 200000" \
    "autoregressive=$flags --env-id envs:PairNodes-v0 --total-timesteps 200000 --autoregressive" \
    "independent=$flags --env-id envs:PairNodes-v0 --total-timesteps 200000" \
    "poisson_2_hops=$flags --env-id envs:PoissonGraph-v0 --env-kwargs '{\"hops\": 2}' --gamma 0 --total-timesteps 800000" \
    "best_of_set=$flags --env-id envs:BestOfSet-v0 --total-timesteps 800000"
# the optimum of PairNodes is that of sampled actions: what a policy without memory can reach at all, and what one with
# independent heads can (see PairNodesEnv)
"$PYTHON" benchmark/report.py --table $TABLE --beside ../beside.csv --systems "PoissonGraph, 1 hop|ppo_graph_mini.py=mini_*" \
    "PoissonGraph, 1 hop|ppo_graph.py=poisson_1_hop_*" \
    "PoissonGraph, 2 hops|ppo_graph.py=poisson_2_hops_*" "BestOfSet|ppo_graph.py=best_of_set_*" \
    "PairNodes|--autoregressive=autoregressive_*" "PairNodes|independent heads=independent_*" \
    --note "The optimum of PairNodes is the best return of sampled actions without memory (independent heads: the best of
theirs); a greedy policy without memory repeats its choice, so its greedy return says nothing."
