#!/bin/bash
# POPGym (Morad et al., ICLR 2023): eight tasks, four scripts, one seed, 262,144 steps (4 of the paper's iterations; LSTM on
# CartPole 16), beside the published figures of 15 million steps. About an hour on one core. Needs `pip install popgym`
# beside requirements.txt.
#
#     bash benchmark/popgym.sh [FLAGS OF run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=popgym
SEEDS=${SEEDS:-1}

flags="--num-envs 32 --update-epochs 8 --learning-rate 5e-4 --ent-coef 0 --eval-episodes 100 --total-timesteps"
lstm="cleanrl_graph/ppo_lstm_sparse.py --prev-action $flags"
cartpoles=(popgym:popgym-PositionOnlyCartPole{Easy,Medium,Hard}-v0)
others=(popgym:popgym-{RepeatPreviousEasy,MineSweeperEasy,MultiarmedBanditEasy,CountRecallEasy}-v0)
first=popgym:popgym-RepeatFirstEasy-v0
run() { "$PYTHON" benchmark/run.py --table $TABLE --seeds $SEEDS "${options[@]}" --env-ids "$@"; }

options=("$@")
run "${others[@]}" $first "${cartpoles[@]}" --commands "framestack=cleanrl_graph/ppo_framestack.py $flags 262144" \
    "gtrxl=cleanrl_graph/ppo_gtrxl.py --num-layers 1 $flags 262144" "memoryless=cleanrl_graph/ppo_graph.py $flags 262144"
run "${others[@]}" --commands "lstm=$lstm 262144"
run $first --commands "lstm=$lstm 262144 --forget-bias 3"
run "${cartpoles[@]}" --commands "lstm=$lstm 1048576"
