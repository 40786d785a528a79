#!/bin/bash
# The passive T-maze with corridors of 10, 100 and 1,000 steps: where does each memory break? Gradients go through whole
# episodes, the transformer's memory holds one, a view the last 16 steps. About 40 minutes of one core for a seed.
#
#     bash benchmark/memory_lengths.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=memory_lengths
export OMP_NUM_THREADS=1

declare -A STEPS=([10]=100000 [100]=400000 [1000]=500000)
commands=() systems=()
for length in ${LENGTHS:-10 100 1000}; do
    flags="--env-id envs:TMaze-v0 --env-kwargs '{\"length\": $length}' --total-timesteps ${STEPS[$length]} --eval-episodes 100
        --num-steps $((length < 127 ? 128 : length + 1))"
    lstm="cleanrl_graph/ppo_lstm_sparse.py $flags"
    commands+=("lstm_$length=$lstm" "gru_$length=$lstm --cell gru" "mingru_$length=$lstm --cell mingru"
        "gtrxl_$length=cleanrl_graph/ppo_gtrxl.py $flags --memory-length $((length + 1))"
        "views_$length=cleanrl_graph/ppo_framestack.py $flags")
    for system in "LSTM=lstm" "GRU=gru" "minGRU=mingru" "GTrXL=gtrxl" "views on 16 steps=views"; do
        systems+=("corridor of $length steps|$system""_${length}_*")
    done
done
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1} "$@" --commands "${commands[@]}"
"$PYTHON" benchmark/report.py --table $TABLE --target 0.95 --systems "${systems[@]}" --note "The best return is 1; who does not
remember the goal has at most 0.5. Other flags are the defaults."
