#!/bin/bash
# MiniGrid-MemoryS11-v0, one million steps with default flags: transformer and LSTM three seeds, no memory one; 110 minutes of
# one core. Goes on where it was stopped; PARTS, SEEDS and --max-minutes take less at a time. Needs
# `pip install -r benchmark/requirements-minigrid.txt` beside requirements.txt.
#
#     bash benchmark/minigrid_memory.sh [--out DIR] [FLAGS OF run.py]     # PARTS="gtrxl lstm none table" is the default
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=minigrid_memory

# MiniGrid's observation is a grid of numbers of kinds, of which ball and key are 6 and 5. Its wrapper makes them one-hot
wrappers="minigrid.wrappers:OneHotPartialObsWrapper minigrid.wrappers:ImgObsWrapper gymnasium.wrappers:FlattenObservation"
flags="--wrap $wrappers --total-timesteps 1000000 --eval-episodes 200"
# the memoryless script learns as the others do (its own defaults are CleanRL's)
alike="--num-envs 16 --update-epochs 8 --learning-rate 1e-3 --ent-coef 0 --no-clip-vloss --norm-obs"
options=("$@")
run() {
    "$PYTHON" benchmark/run.py --table $TABLE --env-ids minigrid:MiniGrid-MemoryS11-v0 "${options[@]}" --seeds "$@"
}

for part in ${PARTS:-gtrxl lstm none table}; do
    case $part in
        gtrxl) run ${SEEDS:-1 2 3} --commands "transformer=cleanrl_graph/ppo_gtrxl.py $flags" ;;
        lstm) run ${SEEDS:-1 2 3} --commands "lstm=cleanrl_graph/ppo_lstm_sparse.py $flags" ;;
        none) run ${SEEDS:-1} --commands "no_memory=cleanrl_graph/ppo_graph.py $flags $alike" ;;
        table)
            "$PYTHON" benchmark/report.py --table $TABLE --columns steps SPS final greedy --target 0.9 \
                --reference 0.5 "best without memory" --ylabel "return" \
                --systems "ppo_gtrxl.py=transformer_*" "ppo_lstm_sparse.py=lstm_*" "ppo_graph.py (no memory)=no_memory_*" \
                --note "A room, a corridor and a junction, eleven tiles wide; the first object is behind the agent in seven
of eight episodes. Kinds of objects are one-hot. Default flags." ;;
    esac
done
