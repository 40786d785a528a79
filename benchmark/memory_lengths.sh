#!/bin/bash
# MemoryLength and T-maze with 10 and 100 steps between the cue and the choice: which memories learn both? A
# rollout is longer than an episode, and a training ends where the greedy return reaches 95% of the best. Otherwise flags are the
# defaults, but two memories also try the T-maze of 100 steps with a larger bonus for entropy. About 20 minutes of one core
# for a seed, and 45 for the T-maze of 100 steps, whose table has seed 1 of most.
#
#     bash benchmark/memory_lengths.sh [--out DIR] [FLAGS OF run.py]     # LENGTHS="10 100" and all MEMORIES is the default
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=memory_lengths
export OMP_NUM_THREADS=1

declare -A steps=([MemoryLength_10]=100000 [TMaze_10]=100000 [MemoryLength_100]=300000 [TMaze_100]=1000000)
systems=()
memories=(${MEMORIES:-lstm gru mingru gtrxl frames all_frames})
for task in MemoryLength TMaze; do
    for length in ${LENGTHS:-10 100}; do
        flags="--env-kwargs '{\"length\": $length}' --total-timesteps ${steps[${task}_$length]} --num-steps 128
            --eval-every 4 --eval-episodes 100 --stop-at 0.95"
        commands=()
        for memory in "${memories[@]}"; do
            case $memory in
                gtrxl) script="ppo_gtrxl.py --memory-length $((length + 2))" ;;
                frames) script="ppo_framestack.py" ;;
                all_frames) script="ppo_framestack.py --obs-shifts $((-length - 1)):0" ;;
                *) script="ppo_lstm_sparse.py --cell $memory" ;;
            esac
            commands+=("${memory}_$length=cleanrl_graph/$script $flags")
        done
        [ ${task}_$length != TMaze_100 ] || commands+=(
            "gru_entropy_$length=cleanrl_graph/ppo_lstm_sparse.py --cell gru --ent-coef 0.05 $flags"
            "gtrxl_entropy_$length=cleanrl_graph/ppo_gtrxl.py --memory-length 102 --ent-coef 0.05 $flags")
        "$PYTHON" benchmark/run.py --table $TABLE --env-ids envs:$task-v0 --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"
    done
done

declare -A names=([lstm]="LSTM" [gru]="GRU" [mingru]="minGRU" [gtrxl]="GTrXL" [frames]="16 frames" [all_frames]="all frames")
for task in MemoryLength TMaze; do
    for length in ${LENGTHS:-10 100}; do
        for memory in "${memories[@]}"; do
            systems+=("$task, $length steps|${names[$memory]}=${memory}_${length}_$task-v0_*")
        done
    done
done
systems+=("TMaze, 100 steps|GRU, --ent-coef 0.05=gru_entropy_100_TMaze-v0_*")
systems+=("TMaze, 100 steps|GTrXL, --ent-coef 0.05=gtrxl_entropy_100_TMaze-v0_*")
"$PYTHON" benchmark/report.py --table $TABLE --skip --columns steps final greedy --systems "${systems[@]}" \
    --note "Greedy: the evaluation at the end, after the first evaluation of at least 0.95, or after all steps. Without memory
MemoryLength has 0 and TMaze at most 0.5. Frames see the last 16 observations and actions, all frames those of the whole episode
and 16 actions." "The transformer's memory is as long as an episode."
