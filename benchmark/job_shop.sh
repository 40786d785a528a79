#!/bin/bash
# Job-shop scheduling, the whole table. Trainings, two ranks on two cores: the README's first command (quick), and longer ones
# on larger instances (long). What their models find, instance by instance and with the seconds of each: greedily, forwards
# and as the better of both directions, on la, ta, orb, swv, abz and yn (greedy), on the test sets of L2D (l2d), on other
# durations and routes (families), and the best of 128 samples (samples): all seeds up to 20x20, beyond one seed, three
# instances of each group at temperature 1, and all up to 50x20 at 0.5. CP-SAT of OR-Tools for 1, 10 and 60 seconds, on a
# core that nothing else uses, with benchmark/requirements.txt (solver). Tables and plot (table). Goes on where it was
# stopped. A training that has its table is not repeated: where its model is gone, the one in benchmark/results/job_shop is
# played, if there is one.
#
#     bash benchmark/job_shop.sh [FLAGS OF run.py]     # all PARTS: quick long greedy l2d families samples solver table
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}

ranks="-m torch.distributed.run --standalone --nproc-per-node 2 cleanrl_graph/ppo_graph.py --num-envs 32
    --num-minibatches 8 --update-epochs 3 --gamma 1 --save-model"
train="$ranks --num-steps 64 --learning-rate 1e-3"
sizes='[{"jobs": [3, 15], "machines": [3, 10], "lookahead": 2, "machine_sets": [1, 2]}, {"jobs": [10, 30], "machines": [4, 10], "lookahead": 2}]'
larger='[{"jobs": [5, 15], "machines": [5, 15], "lookahead": 2}, {"jobs": [10, 40], "machines": [5, 15], "lookahead": 2}]'
run() { "$PYTHON" benchmark/run.py --env-ids envs:JobShop-v0 --workers 1 --table "$@"; }
small=(la ta15x15 ta20x15 ta20x20 orb abz yn)
large=(ta30x15 ta30x20 ta50x15 ta50x20 ta100x20 swv)
play() { # FLAGS OF schedules.py: the models that there are, with those flags
    local name seed model
    for seed in ${SEEDS:-1 2 3}; do
        for name in quick long; do
            model=(runs/job_shop*/${name}_*_s"${seed}"_*/*/model.pt)
            [ -f "${model[0]}" ] || model=(benchmark/results/job_shop/${name}_s"$seed".pt)
            [ ! -f "${model[0]}" ] ||
                "$PYTHON" benchmark/schedules.py --model "${model[0]}" --name $name --seed $seed "$@"
        done
    done
}
table() {
    "$PYTHON" benchmark/report.py --table "$1" --columns steps SPS final --ylabel "(bound - makespan) / bound" \
        --note "The return is (lower bound - makespan) / lower bound, on random instances of the sizes of the training.${2:-}"
}

for part in ${PARTS:-quick long greedy l2d families samples solver table}; do
    case $part in
        quick)
            run job_shop_quick --seeds ${SEEDS:-1 2 3} "$@" --commands "quick=$train --total-timesteps 1200000
                --eval-suite la --env-kwargs '$sizes' --capture-video"
            table job_shop_quick
            ;;
        long) # most of it as above; then with whole returns, which the critic does not bias
            for seed in ${SEEDS:-1 2}; do
                run job_shop_long --seeds "$seed" "$@" --commands "first=$train --total-timesteps 4000000
                    --eval-suite la --env-kwargs '$larger'"
                model=(runs/job_shop_long/first_*_s"$seed"_*/*/model.pt)
                [ ! -f "${model[0]}" ] || cp "${model[0]}" runs/job_shop_first_s"$seed".pt
                run job_shop_long --seeds "$seed" "$@" --commands "long=$ranks --total-timesteps 1500000
                    --num-steps 256 --gae-lambda 1 --learning-rate 5e-4 --eval-suite la --env-kwargs '$larger'
                    --load-model runs/job_shop_first_s$seed.pt"
            done
            table job_shop_long " long goes on with the model that first has trained."
            ;;
        greedy) play --suites "${small[@]}" "${large[@]}" --samples 0 -1 ;;
        l2d) play --suites l2d6x6 l2d10x10 l2d15x15 l2d20x20 l2d30x20 --samples 0 ;;
        families)
            play --samples 0 --suites \
                {uniform,flow,halves,narrow,wide,exponential,bimodal,perjob,permachine}{15x15,30x10} \
                halves{20x15,30x20,50x20} slowhalves{15x15,20x15,30x10,30x20,50x20}
            ;;
        samples)
            play --suites "${small[@]}" --samples 128
            SEEDS=1 play --suites "${large[@]}" --max-instances 3 --samples 128
            SEEDS=1 play --suites ta30x15 ta30x20 ta50x15 ta50x20 --samples 128 --temperature 0.5
            SEEDS=1 play --suites ta100x20 swv --max-instances 3 --samples 128 --temperature 0.5
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
