#!/bin/bash
# TSPInsert-v0: the travelling salesman, trained on random instances of 20 cities, tested greedily on the 10,000 of the
# attention model's test, and with the same model on the first 1,000 of 50 and of 100 cities (models); beside rules (rules) and
# published figures (table). About 20 minutes of one core for a seed.
#
#     bash benchmark/routes.sh [--out DIR] [FLAGS OF run.py]     # PARTS="models rules table" is the default
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=routes
export OMP_NUM_THREADS=1

script="cleanrl_graph/ppo_graph.py --env-id envs:TSPInsert-v0"
train="--gamma 1 --gae-lambda 0.5 --total-timesteps 150000 --num-envs 32 --num-steps 64 --num-minibatches 8
    --learning-rate 2e-3 --ent-coef 0.003 --no-clip-vloss"
mini="cleanrl_graph/ppo_graph_mini.py --env-id cleanrl_graph.envs:TSPInsert-v0 --gamma 1 --total-timesteps 60000
    --num-envs 32 --num-steps 64 --ent-coef 0.003 --no-clip-vloss"
for part in ${PARTS:-models rules table}; do
    case $part in
        models)
            "$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands \
                "train=$script $train --eval-suite cities20 --eval-samples 0 --save-model" "mini=$mini"
            mkdir -p $RUNS/routes_models
            for seed in ${SEEDS:-1 2 3}; do
                model=($RUNS/$TABLE/train_*_s"$seed"_*/*/model.pt)
                [ ! -f "${model[0]}" ] || cp "${model[0]}" $RUNS/routes_models/seed$seed.pt
                commands=()
                for suite in cities50 cities100; do
                    commands+=("$suite=$script --load-model $RUNS/routes_models/seed$seed.pt --total-timesteps 0
                        --eval-suite $suite --eval-samples 0")
                done
                "$PYTHON" benchmark/run.py --table $TABLE --seeds "$seed" "$@" --commands "${commands[@]}"
            done
            ;;
        rules) "$PYTHON" benchmark/routes.py --rules ;;
        table) "$PYTHON" benchmark/routes.py ;;
    esac
done
