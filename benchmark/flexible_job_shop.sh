#!/bin/bash
# Flexible job-shop scheduling, (operation, machine) as actions on edges: one run of 10 to 11 minutes per seed on small
# random instances, half as Song et al. draw them and half of other times and other numbers of machines per operation
# (train); its models on the test sets of Song et al. and on the instances of Brandimarte and Hurink, greedily (greedy,
# about 5 minutes per seed), and the best of 100 samples of one seed (samples, 1 1/2 hours); OR-Tools' CP-SAT for 1 and
# 10 seconds (solver, 24 minutes, on a core that nothing else uses; needs benchmark/requirements.txt); the table (table).
# One seed that has only instances of 10 to 30 jobs and 8 to 10 machines, and 2 million decisions, 84 minutes of a shared core
# (largest). One training per seed whose choices are conflict sets, a third of the environments with 10 to 30 jobs and 8 to 10
# machines, and its suites: half an hour of a shared core per seed (conflict). The same models with all active pairs as choices
# (active). They go on for a million decisions, half of the environments with 10 to 40 jobs and 5 to 10 machines, and play with
# all active pairs: half an hour more (longer). Both need the models of conflict.
#
#     bash benchmark/flexible_job_shop.sh [--out DIR] [FLAGS OF run.py]     # all PARTS: train greedy samples largest conflict active longer solver table
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
list='{"jobs": [5, 15], "machines": [4, 8]}, {"jobs": [5, 15], "machines": [4, 8], "operations": [4, 8],
    "durations": [1, 99], "deviation": [0, 0.8], "flexibility": [0.1, 0.8]}'
flags_of() { # ENTRIES STEPS [LEARNING_RATE]
    echo "cleanrl_graph/ppo_graph.py --env-id envs:FlexibleJobShop-v0 --action-head edges --env-kwargs '[$1]'
    --total-timesteps $2 --num-envs 64 --num-steps 64 --num-minibatches 8 --update-epochs 3 --learning-rate ${3:-1e-3}
    --gamma 1 --gae-lambda 0.98 --save-model"
}
train="train=$(flags_of "$list" 500000)"
largest="largest=$(flags_of '{"jobs": [10, 30], "machines": [8, 10]}' 2000000) --resume auto"
conflict_sets() { echo "${1//\{/'{"dispatch": "conflict", '}"; }
sizes=$(conflict_sets "$list, {\"jobs\": [10, 30], \"machines\": [8, 10]}")
conflict="conflict=$(flags_of "$sizes" 800000) --resume auto"
many_jobs='{"jobs": [10, 40], "machines": [5, 10]}'
longer="longer=$(flags_of "$(conflict_sets "$list, $many_jobs, $many_jobs")" 1000000 5e-4) --resume auto"
small=(sd10x5 sd20x5 sd15x10 mk edata rdata vdata sd20x10)
large=(sd30x10 sd40x10)  # greedily only
run() { "$PYTHON" benchmark/run.py --table "$@"; }
suites() { # SEED SAMPLES NAME SUITES...
    local seed=$1 samples=$2 name=$3 commands=() suite model=seed$1 more=
    case $name in
        largest | conflict | longer) model=$name$seed ;;
        active) model=conflict$seed ;;
    esac
    case $name in active | longer) more="--env-kwargs '{\"dispatch\": \"active\"}'" ;; esac
    for suite in "${@:4}"; do
        commands+=("$name-$suite=cleanrl_graph/ppo_graph.py --env-id envs:FlexibleJobShop-v0 --action-head edges
            --load-model $RUNS/flexible_job_shop_models/$model.pt $more --total-timesteps 0
            --eval-suite $suite --eval-samples $samples")
    done
    run flexible_job_shop_suites --seeds "$seed" "${flags[@]}" --commands "${commands[@]}"
}

flags=("$@")
for part in ${PARTS:-train greedy samples largest conflict active longer solver table}; do
    case $part in
        train)
            run flexible_job_shop --seeds ${SEEDS:-1 2 3} "$@" --commands "$train"
            "$PYTHON" benchmark/report.py --table flexible_job_shop --systems "train=train_*" --columns steps SPS final \
                --ylabel "(bound - makespan) / bound" \
                --note "The return is (lower bound - makespan) / lower bound, on random instances of the sizes of the training."
            mkdir -p $RUNS/flexible_job_shop_models
            for seed in ${SEEDS:-1 2 3}; do
                model=($RUNS/flexible_job_shop/train_*_s"${seed}"_*/*/model.pt)
                [ ! -f "${model[0]}" ] || cp "${model[0]}" $RUNS/flexible_job_shop_models/seed$seed.pt
            done
            ;;
        greedy)
            for seed in ${SEEDS:-1 2 3}; do
                suites $seed 0 greedy "${small[@]}" "${large[@]}"
            done
            ;;
        largest | conflict | longer)
            mkdir -p $RUNS/flexible_job_shop_models
            seeds=${SEEDS:-1 2 3}
            [ $part != largest ] || seeds=1
            [ $part = longer ] || run flexible_job_shop --seeds $seeds "$@" --commands "${!part}"
            for seed in $seeds; do
                [ $part != longer ] || run flexible_job_shop --seeds $seed "$@" \
                    --commands "$longer --load-model $RUNS/flexible_job_shop_models/conflict$seed.pt"
                model=($RUNS/flexible_job_shop/"$part"_*_s"${seed}"_*/*/model.pt)
                [ ! -f "${model[0]}" ] || cp "${model[0]}" $RUNS/flexible_job_shop_models/"$part$seed".pt
                suites $seed 0 "$part" "${small[@]}" "${large[@]}"
            done
            ;;
        active)
            for seed in ${SEEDS:-1 2 3}; do
                suites $seed 0 active "${small[@]}" "${large[@]}"
            done
            ;;
        samples) suites ${SAMPLES_SEED:-1} 100 samples "${small[@]}" ;;
        solver)
            "$PYTHON" benchmark/cp_sat.py --env FlexibleJobShop-v0 --suites mk edata rdata vdata --seconds 1 10 --workers 1
            ;;
        table) "$PYTHON" benchmark/flexible_job_shop.py ;;
    esac
done
