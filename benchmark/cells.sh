#!/bin/bash
# The recurrent cells of ppo_lstm_sparse.py, --cell mingru and gru beside lstm, the default: POPGym's ten tasks, CartPole
# without velocities, Recall, GraphExplore, memory in pixels and in MiniGrid. The LSTM's runs are those of the tables of these
# tasks (popgym.sh, stateless_cartpole.sh and so on). Three seeds of both cells take about 12 hours of one core, without
# `popgym pixels minigrid recall_200` 90 minutes. Goes on where it was stopped; PARTS, CELLS, SEEDS and --max-minutes take
# less at a time. Needs `pip install popgym` and benchmark/requirements-minigrid.txt beside requirements.txt.
#
#     bash benchmark/cells.sh [--out DIR] [FLAGS OF run.py]     # PARTS="cartpole recall explore popgym recall_200 pixels minigrid table"
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=cells
export PYTHONPATH=benchmark${PYTHONPATH:+:$PYTHONPATH}

script=cleanrl_graph/ppo_lstm_sparse.py
popgym=({RepeatPreviousEasy,RepeatFirstEasy,PositionOnlyCartPole{Easy,Medium,Hard},NoisyPositionOnlyCartPoleEasy}
    {MineSweeperEasy,MultiarmedBanditEasy,CountRecallEasy,HigherLowerEasy})
wrappers="minigrid.wrappers:OneHotPartialObsWrapper minigrid.wrappers:ImgObsWrapper gymnasium.wrappers:FlattenObservation"
options=("$@")

run() {  # NAME ENVIRONMENTS FLAGS: all flags but --cell are those of the LSTM's tables
    local commands=() cell
    for cell in ${CELLS:-mingru gru}; do commands+=("${cell}$1=$script $3 --cell $cell"); done
    "$PYTHON" benchmark/run.py --table $TABLE --env-ids $2 --seeds ${SEEDS:-1 2 3} "${options[@]}" --commands "${commands[@]}"
}

systems=()
panel() {  # PANEL TABLE PATTERN ENVIRONMENT SUFFIX: the LSTM's runs of another table, then the cells'
    systems+=("$1|lstm=$2/$3_$4_*" "$1|mingru=mingru${5:-}_$4_*" "$1|gru=gru${5:-}_$4_*")
}

for part in ${PARTS:-cartpole recall explore popgym recall_200 pixels minigrid table}; do
    case $part in
        cartpole) run "" envs:StatelessCartPole-v1 "--total-timesteps 500000 --eval-episodes 100" ;;
        recall) run _50 envs:Recall-v0 "--env-kwargs '{\"length\": 50}' --eval-episodes 200 --total-timesteps 150000" ;;
        recall_200) run _200 envs:Recall-v0 "--env-kwargs '{\"length\": 200}' --eval-episodes 200 --total-timesteps 600000" ;;
        explore) run "" envs:GraphExplore-v0 "--total-timesteps 250000 --eval-episodes 200" ;;
        popgym) run "" "$(printf 'popgym:popgym-%s-v0 ' ${TASKS:-${popgym[@]}})" "--total-timesteps 500000 --eval-episodes 100" ;;
        pixels) run "" pixel_memory:PixelMemory-v0 "--total-timesteps 250000 --eval-episodes 200 --capture-video" ;;
        minigrid)
            run "" minigrid:MiniGrid-MemoryS11-v0 "--wrap $wrappers --total-timesteps 1000000 --eval-episodes 200"
            ;;
        table)
            panel "CartPole without velocities" stateless_cartpole lstm StatelessCartPole-v1
            panel "Recall, 50 steps" recall lstm_50 Recall-v0 _50
            panel "Recall, 200 steps" recall lstm_200 Recall-v0 _200
            panel GraphExplore ppo_lstm_sparse per_node GraphExplore-v0
            for task in "${popgym[@]}"; do panel "$task" popgym lstm "popgym-$task-v0"; done
            panel PixelMemory ppo_gtrxl lstm PixelMemory-v0
            panel MemoryS11 minigrid_memory lstm MiniGrid-MemoryS11-v0
            "$PYTHON" benchmark/report.py --table $TABLE --skip --columns steps MMER final greedy --bounds ../task_bounds.csv \
                --systems "${systems[@]}" --note "Default flags but --cell. MMER: the best mean return of 65,536 steps. The
LSTM's runs are those of the tables of these tasks. Runs shared the cores with others: seconds say nothing, see
[speed](../speed/tables.md#cells)." "GRU and minGRU were trained on
GraphExplore before actor and critic saw what is remembered of the visible nodes: the LSTM had 0.718 then." "The normalised mean maps the bounds of a task's return to 0 and 1." ;;
    esac
done
