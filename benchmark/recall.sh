#!/bin/bash
# Recall: a cue at the first step, a corridor of 10, 50 or 200 steps, a choice. Right choices per script and length, in
# about 30 minutes on one core.
#
#     bash benchmark/recall.sh [FLAGS OF run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=recall

commands=()
for length in ${LENGTHS:-10 50 200}; do
    flags="--eval-episodes 200 --env-kwargs '{\"length\": $length}' --num-steps $((length < 100 ? 128 : 256))"
    frames="$flags --num-envs 16 --learning-rate 1e-3 --no-clip-vloss"
    steps=$((length < 100 ? 150000 : 200000)) gtrxl=
    if [ "$length" -ge 100 ]; then  # only the last of 201 actions matters: a discount of 0 spares it the noise of the others
        flags="$flags --gamma 0 --gae-lambda 0" frames="$frames --gamma 0 --gae-lambda 0"
        gtrxl="--gate none --memory-length $((length + 2))"
    fi
    commands+=(
        "frames_$length=cleanrl_graph/ppo_framestack.py $frames --total-timesteps $steps --action-shifts '' --reward-shifts ''"
        "lstm_$length=cleanrl_graph/ppo_lstm_sparse.py $flags --total-timesteps $steps"
        "gtrxl_$length=cleanrl_graph/ppo_gtrxl.py $flags --total-timesteps $steps $gtrxl"
    )
done
"$PYTHON" benchmark/run.py --table $TABLE --env-ids envs:Recall-v0 --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"

systems=()
for length in ${LENGTHS:-10 50 200}; do
    systems+=("corridor of $length steps|ppo_framestack.py, 16 frames=frames_${length}_*"
        "corridor of $length steps|ppo_lstm_sparse.py=lstm_${length}_*" "corridor of $length steps|ppo_gtrxl.py=gtrxl_${length}_*")
done
"$PYTHON" benchmark/report.py --table $TABLE --scale 0.5 --offset 0.5 --target 0.95 --ylabel "share of right choices" \
    --systems "${systems[@]}" --note "Return: the share of right choices; guessing gives 0.5. At 200 steps with --gamma 0 --gae-lambda 0, the transformer
without gates."
