#!/bin/bash
# TSPInsert-v0 and CVRPSavings-v0: the travelling salesman and a vehicle's routes, trained on random instances of 20 places,
# tested greedily on the 10,000 of the attention model's test, and with the same models on the first 1,000 of 50 and of 100,
# beside rules (rules) and published figures (table). About 40 minutes of one core for a seed.
#
#     bash benchmark/routes.sh [--out DIR] [FLAGS OF run.py]     # PARTS="mini tours vehicle rules table" is the default
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=routes
export OMP_NUM_THREADS=1

tours="cleanrl_graph/ppo_graph.py --env-id envs:TSPInsert-v0"
vehicle="cleanrl_graph/ppo_graph.py --env-id envs:CVRPSavings-v0 --action-head edges"
more="--num-envs 32 --num-steps 64 --num-minibatches 8
    --learning-rate 2e-3 --ent-coef 0.003 --no-clip-vloss"
mini="cleanrl_graph/ppo_graph_mini.py --env-id cleanrl_graph.envs:TSPInsert-v0 --gamma 1 --total-timesteps 60000
    --num-envs 32 --num-steps 64 --ent-coef 0.003 --no-clip-vloss"

# Trains, then plays 50 and 100 places with the model:
#     play_sizes NAME_OF_RUNS NAME_OF_MODELS cities|customers SCRIPT STEPS [FLAGS OF run.py]
play_sizes() {
    local name=$1 saved=$2 each=$3 script=$4 steps=$5 seed model commands size
    shift 5
    for seed in ${SEEDS:-1 2 3}; do
        "$PYTHON" benchmark/run.py --table $TABLE --seeds "$seed" "$@" --commands \
            "$name=$script --gamma 1 --gae-lambda 0.5 --total-timesteps $steps $more --eval-suite ${each}20 --eval-samples 0 --save-model"
        mkdir -p $RUNS/routes_models
        model=($RUNS/$TABLE/"$name"_*_s"$seed"_*/*/model.pt)
        [ ! -f "${model[0]}" ] || cp "${model[0]}" $RUNS/routes_models/"$saved"$seed.pt
        commands=()
        for size in 50 100; do
            commands+=("$each$size=$script --load-model $RUNS/routes_models/$saved$seed.pt --total-timesteps 0
                --eval-suite $each$size --eval-samples 0")
        done
        "$PYTHON" benchmark/run.py --table $TABLE --seeds "$seed" "$@" --commands "${commands[@]}"
    done
}

for part in ${PARTS:-mini tours vehicle rules table}; do
    case $part in
        mini) "$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands "mini=$mini" ;;
        tours) play_sizes train seed cities "$tours" 150000 "$@" ;;
        vehicle) play_sizes vehicle vehicle customers "$vehicle" 300000 "$@" ;;
        rules) "$PYTHON" benchmark/routes.py --rules ;;
        table) "$PYTHON" benchmark/routes.py ;;
    esac
done
