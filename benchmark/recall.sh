#!/bin/bash
# Recall: a cue at the first step, a corridor of 10, 50 or 200 steps, a choice. Right choices per script and length, in
# about two hours on one core.
#
#     bash benchmark/recall.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=recall

commands=()
for length in ${LENGTHS:-50 200}; do
    flags="--env-kwargs '{\"length\": $length}' --eval-episodes 200 --total-timesteps $((length < 100 ? 150000 : 600000))"
    commands+=(
        "frames_$length=cleanrl_graph/ppo_framestack.py $flags"
        "lstm_$length=cleanrl_graph/ppo_lstm_sparse.py $flags"
        "gtrxl_$length=cleanrl_graph/ppo_gtrxl.py $flags --memory-length $((length + 2))"
    )
done
"$PYTHON" benchmark/run.py --table $TABLE --env-ids envs:Recall-v0 --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"
mini="cleanrl_graph/ppo_gtrxl_mini.py --total-timesteps 150000"
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands \
    "mini_10=$mini --env-id cleanrl_graph.envs:Recall-v0" "mini_50=$mini --env-id cleanrl_graph.envs:Recall50-v0"

systems=("corridor of 10 steps|ppo_gtrxl_mini.py=mini_10_*" "corridor of 50 steps|ppo_gtrxl_mini.py=mini_50_*")
for length in ${LENGTHS:-50 200}; do
    systems+=("corridor of $length steps|ppo_framestack.py, 16 frames=frames_${length}_*"
        "corridor of $length steps|ppo_lstm_sparse.py=lstm_${length}_*" "corridor of $length steps|ppo_gtrxl.py=gtrxl_${length}_*")
done
"$PYTHON" benchmark/report.py --table $TABLE --scale 0.5 --offset 0.5 --target 0.95 --ylabel "share of right choices" \
    --systems "${systems[@]}" --note "Return: the share of right choices; guessing gives 0.5. Default
flags, but for the length of the transformer's memory."
