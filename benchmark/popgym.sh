#!/bin/bash
# POPGym (Morad et al., ICLR 2023): eight tasks, four scripts, one seed, 196,608 steps (3 of the paper's iterations; LSTM on
# CartPole 8), beside the published figures of 15 million steps. About 40 minutes on one core. Needs `pip install popgym`
# beside requirements.txt.
#
#     bash benchmark/popgym.sh [FLAGS OF run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=popgym
SEEDS=${SEEDS:-1}

flags="--num-envs 32 --update-epochs 8 --learning-rate 5e-4 --ent-coef 0 --eval-episodes 100 --total-timesteps"
lstm="cleanrl_graph/ppo_lstm_sparse.py --eval-episodes 100 --total-timesteps"  # as they come
gtrxl="cleanrl_graph/ppo_gtrxl.py --eval-episodes 100 --total-timesteps"
cartpoles=(popgym:popgym-PositionOnlyCartPole{Easy,Medium,Hard}-v0)
others=(popgym:popgym-{RepeatPreviousEasy,MineSweeperEasy,MultiarmedBanditEasy,CountRecallEasy}-v0)
first=popgym:popgym-RepeatFirstEasy-v0
run() { "$PYTHON" benchmark/run.py --table $TABLE --seeds $SEEDS "${options[@]}" --env-ids "$@"; }

options=("$@")
run "${others[@]}" $first "${cartpoles[@]}" --commands "framestack=cleanrl_graph/ppo_framestack.py $flags 196608" \
    "gtrxl=$gtrxl 196608" "memoryless=cleanrl_graph/ppo_graph.py $flags 196608"
run "${others[@]}" $first --commands "lstm=$lstm 196608"
run "${cartpoles[@]}" --commands "lstm=$lstm 524288"
# the reward depends on the present action alone: with a discount of 0 it is free of the noise of the others
immediate="cleanrl_graph/ppo_gtrxl.py --num-envs 32 --num-layers 1 --memory-length 64 --learning-rate 1e-3 --gate none
    --update-epochs 4 --no-prev-action --gamma 0 --gae-lambda 0 --ent-coef 0 --no-clip-vloss --hidden-dims 64 --eval-episodes 100"
run popgym:popgym-RepeatPreviousEasy-v0 --commands "recurrent=$lstm 300000 --gamma 0 --gae-lambda 0"
run popgym:popgym-RepeatPreviousMedium-v0 --commands "immediate=$immediate --total-timesteps 300000"
run popgym:popgym-RepeatPreviousHard-v0 --commands "immediate=$immediate --num-steps 192 --total-timesteps 400000"

"$PYTHON" benchmark/report.py --table $TABLE --columns steps SPS MMER final greedy --beside published.csv \
    --bounds bounds.csv --systems "ppo_framestack.py, 16 frames=framestack_*" "ppo_lstm_sparse.py=lstm_*" \
    "ppo_gtrxl.py, 1 layer=gtrxl_*" "ppo_graph.py (no memory)=memoryless_*" \
    "ppo_gtrxl.py, 1 layer, no gates, discount 0=immediate_*" "ppo_lstm_sparse.py, discount 0=recurrent_*" \
    --note "MMER is the figure of the POPGym paper. Published: Morad et al., POPGym: Benchmarking Partially Observable
Reinforcement Learning (ICLR 2023), appendix, three trials of 15 million steps each, which is 29 to 76 times the training
of ours; read second-hand. They stand beside the nearest of our memories, and no claim of a difference follows from them." \
    "The normalised mean maps the bounds of a task's return to 0 and 1 (CartPole 0 and 1, the others -1 and 1)."
