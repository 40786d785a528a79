#!/bin/bash
# Job-shop scheduling: runs of 5 minutes, the README's first command, that are tested on la01-40 (quick); their models on
# Taillard's 80 instances and on la01-40, greedily, in about 7 minutes per seed (taillard); and a run of an hour that is
# tested on ta01-10 with the best of 128 samples (long).
#
# The models that these parts have left, instance by instance and with the seconds of each: greedily on la, ta, orb, swv, abz
# and yn (greedy), on the test sets of L2D (l2d), and the best of 128 samples, hours (samples): all seeds up to 20x20, one seed
# and three instances of each group beyond. CP-SAT of OR-Tools for 1, 10 and 60 seconds, hours, on a core that nothing else
# uses, with benchmark/requirements.txt (solver); tables and plot (table). They were tried on a few instances only so far.
#
#     bash benchmark/job_shop.sh [FLAGS OF run.py]     # PARTS="quick taillard long" is the default
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}

flags="cleanrl_graph/ppo_graph.py --num-envs 64 --num-steps 64 --num-minibatches 8 --update-epochs 3
    --learning-rate 1e-3 --gamma 1 --gae-lambda 0.98 --save-model"
quick="quick=$flags --total-timesteps 400000 --eval-suite la --env-kwargs '{\"jobs\": [3, 10], \"machines\": [3, 10]}'
    --capture-video"
run() { "$PYTHON" benchmark/run.py --env-ids envs:JobShop-v0 --table "$@"; }
small=(la ta15x15 ta20x15 ta20x20 orb abz yn)
large=(ta30x15 ta30x20 ta50x15 ta50x20 ta100x20 swv)
play() { # FLAGS OF schedules.py: the models that there are, with those flags
    local name seed model
    for name in quick long; do
        for seed in ${SEEDS:-1 2 3}; do
            model=(runs/job_shop*/${name}_*_s"${seed}"_*/*/model.pt)
            [ ! -f "${model[0]}" ] ||
                "$PYTHON" benchmark/schedules.py --model "${model[0]}" --name $name --seed $seed "$@"
        done
    done
}
table() {
    "$PYTHON" benchmark/report.py --table "$1" --columns steps SPS final --ylabel "(bound - makespan) / bound" \
        --note "The return is (lower bound - makespan) / lower bound, on random instances of the sizes of the training."
}

for part in ${PARTS:-quick taillard long}; do
    case $part in
        quick)
            run job_shop --seeds ${SEEDS:-1 2 3} "$@" --commands "$quick"
            table job_shop
            ;;
        taillard)
            suites=(la ta15x15 ta20x15 ta20x20 ta30x15 ta30x20 ta50x15 ta50x20 ta100x20)
            for seed in ${SEEDS:-1 2 3}; do
                played=(benchmark/results/taillard/runs/*_s"${seed}"_*.csv)
                [ ${#played[@]} -lt ${#suites[@]} ] || continue
                model=runs/job_shop_models/seed$seed.pt
                if [ ! -f $model ]; then  # a training that was finished without leaving its model here is repeated
                    trained=(runs/job_shop/quick_*_s"${seed}"_*/*/model.pt)
                    [ -f "${trained[0]}" ] || rm -f benchmark/results/job_shop/runs/quick_*_s"${seed}"_*
                    run job_shop --seeds $seed "$@" --commands "$quick"
                    mkdir -p runs/job_shop_models
                    cp runs/job_shop/quick_*_s"${seed}"_*/*/model.pt $model
                fi
                commands=()
                for suite in "${suites[@]}"; do
                    commands+=("$suite=cleanrl_graph/ppo_graph.py --load-model $model --total-timesteps 0
                        --eval-suite $suite --eval-samples 0")
                done
                run taillard --seeds $seed "$@" --commands "${commands[@]}"
            done
            "$PYTHON" benchmark/taillard.py
            ;;
        long)
            run job_shop_long --seeds ${SEEDS:-1} "$@" --commands "long=$flags --total-timesteps 1500000
                --eval-suite ta15x15 --eval-samples 128 --env-kwargs '{\"jobs\": [5, 15], \"machines\": [5, 15]}'"
            table job_shop_long
            ;;
        greedy) play --suites "${small[@]}" "${large[@]}" --samples 0 ;;
        l2d) play --suites l2d6x6 l2d10x10 l2d15x15 l2d20x20 l2d30x20 --samples 0 ;;
        samples)
            play --suites "${small[@]}" --samples 128
            SEEDS=1 play --suites "${large[@]}" --max-instances 3 --samples 128
            SEEDS=1 play --suites ta15x15 --samples 512
            ;;
        solver)
            "$PYTHON" benchmark/cp_sat.py --env JobShop-v0 --suites "${small[@]}" "${large[@]}" --seconds 1 10
            "$PYTHON" benchmark/cp_sat.py --env JobShop-v0 --seconds 60 \
                --suites ta15x15 ta20x15 ta20x20 ta30x15 ta30x20 ta50x15 ta50x20 ta100x20
            ;;
        table) "$PYTHON" benchmark/job_shop.py ;;
    esac
done
