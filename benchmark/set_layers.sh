#!/bin/bash
# Elements of a set that see each other (--set-layers 2) beside elements that are embedded one by one, with the same flags,
# on the tasks of sets whose optimum is known. About 40 minutes of one core.
#
#     bash benchmark/set_layers.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=set_layers
export OMP_NUM_THREADS=1

script="cleanrl_graph/ppo_graph.py --learning-rate 1e-3"
tasks=(
    "nearest=$script --env-id envs:NearestToMarked-v0 --num-envs 16 --gamma 0 --total-timesteps 60000 --eval-episodes 200"
    "best_of_set=$script --env-id envs:BestOfSet-v0 --num-envs 16 --total-timesteps 60000 --eval-episodes 1000"
    "match=$script --env-id envs:MatchGoal-v0 --num-envs 32 --total-timesteps 100000 --eval-episodes 100"
)
commands=()
for task in "${tasks[@]}"; do
    for layers in 0 2; do
        commands+=("${task%%=*}_$layers=${task#*=} --set-layers $layers")
    done
done
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"

systems=()
for task in NearestToMarked=nearest BestOfSet=best_of_set MatchGoal=match; do
    systems+=("${task%=*}|--set-layers 0=${task#*=}_0_*" "${task%=*}|--set-layers 2=${task#*=}_2_*")
done
"$PYTHON" benchmark/report.py --table $TABLE --columns steps final greedy --beside ../beside.csv \
    --systems "${systems[@]}" \
    --note "The trainings are short. In NearestToMarked an element says nothing of how near it is to the marked one; in
BestOfSet and MatchGoal the query is a vector that actor and critic see."
