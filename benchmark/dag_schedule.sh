#!/bin/bash
# Scheduling of data-processing jobs: the policy of ppo_graph.py on batched and on continuous arrivals, tested on the 100
# fixed sets of jobs of each suite, beside the rules: six runs of about 20 minutes and ten minutes for the rules.
# Finished runs are not repeated.
#
#     bash benchmark/dag_schedule.sh [FLAGS OF run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}

flags="cleanrl_graph/ppo_graph.py --env-id envs:DagSchedule-v0 --autoregressive --num-envs 16 --num-steps 128
    --num-minibatches 8 --update-epochs 3 --learning-rate 1e-3 --gamma 1 --gae-lambda 0.95 --gnn-dim 32 --gnn-layers 2
    --total-timesteps 250000 --save-model --eval-samples 0"
"$PYTHON" benchmark/run.py --table dag_schedule --seeds ${SEEDS:-1 2 3} "$@" --commands \
    "batch=$flags --eval-suite batch" \
    "continuous=$flags --eval-suite continuous --env-kwargs '{\"num_jobs\": 50, \"load\": 0.75}'"
"$PYTHON" benchmark/dag_schedule.py
