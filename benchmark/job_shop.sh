#!/bin/bash
# Job-shop scheduling: runs of 5 minutes that are tested on la01-40 (quick), and one of an hour that is tested on ta01-10
# (Taillard 15x15) with the best of 128 samples (long).
#
#     bash benchmark/job_shop.sh [FLAGS OF run.py]     # PARTS="quick long" is the default
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}

flags="cleanrl_graph/ppo_graph.py --num-envs 64 --num-steps 64 --num-minibatches 8 --update-epochs 3
    --learning-rate 1e-3 --gamma 1 --gae-lambda 0.98 --save-model"
run() {  # TABLE FLAGS...
    "$PYTHON" benchmark/run.py --env-ids envs:JobShop-v0 --table "$@"
    "$PYTHON" benchmark/report.py --table "$1" --columns steps SPS final --ylabel "(bound - makespan) / bound" \
        --note "The return is (lower bound - makespan) / lower bound, on random instances of the sizes of the training."
}

for part in ${PARTS:-quick long}; do
    case $part in
        quick) run job_shop --seeds ${SEEDS:-1 2 3} "$@" --commands "quick=$flags --total-timesteps 400000 --eval-suite la
            --env-kwargs '{\"jobs\": [3, 10], \"machines\": [3, 10]}' --capture-video" ;;
        long) run job_shop_long --seeds ${SEEDS:-1} "$@" --commands "long=$flags --total-timesteps 1500000
            --eval-suite ta15x15 --eval-samples 128 --env-kwargs '{\"jobs\": [5, 15], \"machines\": [5, 15]}'" ;;
    esac
done
