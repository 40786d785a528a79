#!/bin/bash
# POPGym (Morad et al., ICLR 2023): returns beside the published ones. Writes benchmark/results/popgym/, in about 40 minutes
# on one core; finished runs are not repeated. Needs `pip install popgym` beside requirements.txt.
#
#     bash benchmark/popgym.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
export OMP_NUM_THREADS=1
mkdir -p benchmark/results/popgym runs

run() {  # NAME SCRIPT TASK STEPS FLAGS...
    local name=$1 script=$2 task=$3 steps=$4
    shift 4
    compgen -G "runs/popgym-$task-v0__${name}__1__*/eval.csv" > /dev/null && return
    "$PYTHON" cleanrl_graph/"$script".py --env-id "popgym:popgym-$task-v0" --num-envs 32 --update-epochs 8 \
        --learning-rate 5e-4 --ent-coef 0 --total-timesteps "$steps" --eval-episodes 100 --exp-name "$name" "$@"
}

run lstm ppo_lstm_sparse RepeatPreviousEasy 500000 --prev-action
run lstm ppo_lstm_sparse RepeatFirstEasy 300000 --prev-action --forget-bias 3
run no_memory ppo_graph RepeatPreviousEasy 300000
run no_memory ppo_graph RepeatFirstEasy 300000
run gtrxl ppo_gtrxl RepeatPreviousEasy 300000 --num-layers 1
for level in Easy Medium Hard; do
    run no_memory ppo_graph PositionOnlyCartPole$level 300000
    run lstm ppo_lstm_sparse PositionOnlyCartPole$level 1000000 --prev-action
done
"$PYTHON" benchmark/popgym_table.py --out benchmark/results/popgym/table
