#!/bin/bash
# One task of two numbers, Dials-v0, with five kinds of bounds: Box actions are scaled to them. 15 runs of 40 seconds on a
# core that other jobs share. results/beside.csv has what d096af4, which clipped and did not scale, had with the same flags.
#
#     bash benchmark/bounds.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=bounds
export OMP_NUM_THREADS=1

flags="cleanrl_graph/ppo_graph.py --env-id envs:Dials-v0 --learning-rate 2.5e-3 --gamma 0 --total-timesteps 40960 --eval-episodes 200"
commands=()
systems=()
for bounds in "-1 1" "0 1000" "10 12" "-0.01 0.01" "-1 3"; do
    read -r low high <<< "$bounds"
    commands+=("bounds_${low}_$high=$flags --env-kwargs '{\"low\": $low, \"high\": $high}'")
    systems+=("Dials|$low to $high=bounds_${low}_${high}_*")
done
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"
"$PYTHON" benchmark/report.py --table $TABLE --beside ../beside.csv --systems "${systems[@]}" --scale 0.125 \
    --ylabel "reward per step"
