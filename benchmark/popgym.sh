#!/bin/bash
# POPGym (Morad et al., ICLR 2023): ten tasks, 500,000 steps each, all scripts with their default flags, beside a plain PPO
# with an LSTM and the published figures of 15 million steps. LSTM, transformer and the plain one three seeds, frames and no
# memory one: 8 hours of one core, a seed of all tasks and one script in 30 to 55 minutes. Goes on where it was stopped;
# PARTS, SEEDS and --max-minutes take less at a time. Needs `pip install popgym` beside requirements.txt.
#
#     bash benchmark/popgym.sh [--out DIR] [FLAGS OF run.py]     # PARTS="lstm plain gtrxl frames none table" is the default
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=popgym

tasks=(popgym:popgym-{RepeatPreviousEasy,RepeatFirstEasy,PositionOnlyCartPole{Easy,Medium,Hard},NoisyPositionOnlyCartPoleEasy}-v0
    popgym:popgym-{MineSweeperEasy,MultiarmedBanditEasy,CountRecallEasy,HigherLowerEasy}-v0)
flags="--total-timesteps 500000 --eval-episodes 100"
# the memoryless script learns as the others do (its own defaults are CleanRL's)
alike="--num-envs 16 --update-epochs 8 --learning-rate 1e-3 --ent-coef 0 --no-clip-vloss --norm-obs"
options=("$@")
run() { "$PYTHON" benchmark/run.py --table $TABLE --env-ids "${tasks[@]}" "${options[@]}" --seeds "$@"; }

for part in ${PARTS:-lstm plain gtrxl frames none table}; do
    case $part in
        lstm) run ${SEEDS:-1 2 3} --commands "lstm=cleanrl_graph/ppo_lstm_sparse.py $flags" ;;
        gtrxl) run ${SEEDS:-1 2 3} --commands "gtrxl=cleanrl_graph/ppo_gtrxl.py $flags" ;;
        plain) run ${SEEDS:-1 2 3} --commands "plain=benchmark/peers/plain_ppo_lstm.py --total-timesteps 500000" ;;
        frames) run ${SEEDS:-1} --commands "framestack=cleanrl_graph/ppo_framestack.py $flags" ;;
        none) run ${SEEDS:-1} --commands "memoryless=cleanrl_graph/ppo_graph.py $flags $alike" ;;
        table)
            "$PYTHON" benchmark/report.py --table $TABLE --columns steps SPS MMER final greedy --target 0.97 \
                --beside ../beside.csv --bounds ../task_bounds.csv --skip --systems \
                "ppo_lstm_sparse.py=lstm_*" "ppo_gtrxl.py=gtrxl_*" "plain PPO with an LSTM=plain_*" \
                "ppo_framestack.py=framestack_*" "ppo_graph.py (no memory)=memoryless_*" \
                --note "MMER is the figure of the POPGym paper: the best mean return of 65,536 steps. Published: Morad et
al., POPGym: Benchmarking Partially Observable Reinforcement Learning (ICLR 2023), appendix, three trials of 15 million steps
each, 30 times the training of ours; read second-hand, so only some tasks." "The normalised mean maps the bounds of a task's
return to 0 and 1 (CartPole 0 and 1, the others -1 and 1). Other jobs shared the cores: steps per second say nothing." ;;
    esac
done
