#!/bin/bash
# Memory in pixels: MiniGrid's memory environment (see pixel_memory.py), with a transformer, an LSTM and no memory, in 16 to
# 40 minutes on one core. Needs `pip install -r benchmark/requirements-minigrid.txt` beside requirements.txt.
#
#     bash benchmark/ppo_gtrxl.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=ppo_gtrxl
export PYTHONPATH=benchmark${PYTHONPATH:+:$PYTHONPATH}

flags="--total-timesteps 250000 --eval-episodes 200 --capture-video"
alike="--num-envs 16 --update-epochs 8 --learning-rate 1e-3 --ent-coef 0 --no-clip-vloss"  # as the memories' defaults
run() { "$PYTHON" benchmark/run.py --table $TABLE --env-ids pixel_memory:PixelMemory-v0 "${options[@]}" "$@"; }

options=("$@")
run --seeds ${SEEDS:-1 2 3} --commands "transformer=cleanrl_graph/ppo_gtrxl.py $flags"
run --seeds 1 --commands "lstm=cleanrl_graph/ppo_lstm_sparse.py $flags" "no_memory=cleanrl_graph/ppo_graph.py $flags $alike"
"$PYTHON" benchmark/report.py --table $TABLE --reference 0.5 "best without memory" --ylabel "return (success: 0.97)" \
    --systems "ppo_gtrxl.py=transformer_*" "ppo_lstm_sparse.py=lstm_*" "ppo_graph.py (no memory)=no_memory_*" \
    --note "A view of 3 x 3 tiles in 12 x 12 pixels, three actions, a room and a junction two steps from it (size 7); at
most 0.5 of the episodes end well without memory. Default flags."
