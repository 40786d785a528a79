#!/bin/bash
# The memory scripts with their default flags, beside a plain PPO with an LSTM. About 12 minutes a seed on one core. Needs
# `pip install popgym` beside requirements.txt. How the defaults were found: results/memory_defaults/development.md.
#
#     bash benchmark/memory_defaults.sh [FLAGS OF run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=memory_defaults

repeats=(popgym:popgym-{RepeatPreviousEasy,RepeatFirstEasy}-v0)
run() { "$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "${options[@]}" "$@"; }

options=("$@")
flags="--total-timesteps 300000 --eval-episodes 100"
run --env-ids "${repeats[@]}" --commands "lstm=cleanrl_graph/ppo_lstm_sparse.py $flags"
run --env-ids "${repeats[@]}" --commands "gtrxl=cleanrl_graph/ppo_gtrxl.py $flags"
run --env-ids "${repeats[@]}" --commands "plain=benchmark/peers/plain_ppo_lstm.py --total-timesteps 300000"
"$PYTHON" benchmark/report.py --table $TABLE --target 0.97 --systems "ppo_lstm_sparse.py=lstm_*" "ppo_gtrxl.py=gtrxl_*" \
    "plain PPO with an LSTM=plain_*" --note "All with their default flags."
