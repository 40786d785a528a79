#!/bin/bash
# Job-shop scheduling, the whole table. A training by two ranks on two cores (quick). What its models find,
# instance by instance and with the seconds of each: greedily, forwards and as the better of both directions, on la, ta, orb,
# swv, abz and yn (greedy), on the test sets of L2D (l2d), on other durations and routes (families), and the best of 128
# samples (samples): all seeds up to 20x20, beyond one seed, three instances of each group at temperature 1, and all up to
# 50x20 at 0.5. CP-SAT of OR-Tools for 1, 10 and 60 seconds, on a core that nothing else uses, with
# benchmark/requirements.txt (solver). Tables and plot (table). Goes on where it was stopped. A training that has its table is
# not repeated: where its model is gone, the one in benchmark/results/job_shop is played, if there is one.
#
#     bash benchmark/job_shop.sh [--out DIR] [FLAGS OF run.py]     # all PARTS: quick greedy l2d families samples solver table
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
train="-m torch.distributed.run --standalone --nproc-per-node 2 cleanrl_graph/ppo_graph.py --num-envs 32
    --num-minibatches 8 --update-epochs 3 --gamma 1 --save-model --num-steps 64 --learning-rate 1e-3"
sizes='[{"jobs": [3, 15], "machines": [3, 10], "lookahead": 2, "machine_sets": [1, 2]}, {"jobs": [10, 30], "machines": [4, 10], "lookahead": 2}]'
small=(la ta15x15 ta20x15 ta20x20 orb abz yn)
large=(ta30x15 ta30x20 ta50x15 ta50x20 ta100x20 swv)
play() { # FLAGS OF schedules.py: the models that there are, with those flags
    local seed model
    for seed in ${SEEDS:-1 2 3}; do
        model=($RUNS/job_shop_quick/quick_*_s"${seed}"_*/*/model.pt)
        [ -f "${model[0]}" ] || model=($RESULTS/job_shop/quick_s"$seed".pt)
        [ ! -f "${model[0]}" ] ||
            "$PYTHON" benchmark/schedules.py --model "${model[0]}" --name quick --seed $seed "$@"
    done
}

for part in ${PARTS:-quick greedy l2d families samples solver table}; do
    case $part in
        quick)
            "$PYTHON" benchmark/run.py --env-ids envs:JobShop-v0 --workers 1 --table job_shop_quick --seeds ${SEEDS:-1 2 3} \
                "$@" --commands "quick=$train --total-timesteps 1200000 --eval-suite la --env-kwargs '$sizes' --capture-video"
            "$PYTHON" benchmark/report.py --table job_shop_quick --columns steps SPS final \
                --ylabel "(bound - makespan) / bound" \
                --note "The return is (lower bound - makespan) / lower bound, on random instances of the sizes of the training."
            ;;
        greedy) play --suites "${small[@]}" "${large[@]}" --samples 0 -1 ;;
        l2d)
            play --suites l2d6x6 l2d10x10 l2d15x15 l2d20x20 l2d30x20 --samples 0
            SEEDS=1 play --suites l2d10x10 --samples 16
            ;;
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
