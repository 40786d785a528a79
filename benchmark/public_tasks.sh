#!/bin/bash
# Two environments from PyPI, as they are and with default flags: the densest subgraph of graph-envs, whose mask is
# info["mask"], and MiniGrid's GoToDoor with its mission and without. Three seeds, 60 minutes of one core. Goes on where it
# was stopped. Needs `pip install -r benchmark/requirements-minigrid.txt` beside requirements.txt.
#
#     bash benchmark/public_tasks.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=public_tasks

graph="cleanrl_graph/ppo_graph.py --env-id graph_envs:DensestSubgraph-v0 --total-timesteps 200000 --eval-episodes 200"
door="cleanrl_graph/ppo_graph.py --env-id minigrid:MiniGrid-GoToDoor-5x5-v0 --total-timesteps 500000 --eval-episodes 200"
"$PYTHON" benchmark/run.py --table $TABLE --workers 1 --seeds ${SEEDS:-1 2 3} "$@" --commands \
    "mission=$door" \
    "hidden=$door --wrap hide:mission" \
    "densest=$graph --env-kwargs '{\"n_nodes\": 10, \"n_edges\": 15, \"n_choices\": 5, \"parenting\": 0}'"
"$PYTHON" benchmark/public_tasks.py --out $RESULTS/$TABLE/rules.csv
"$PYTHON" benchmark/report.py --table $TABLE --beside rules.csv --systems "DensestSubgraph|ppo_graph.py=densest_*" \
    "GoToDoor-5x5|ppo_graph.py=mission_*" "GoToDoor-5x5|--wrap hide:mission=hidden_*" \
    --note "DensestSubgraph-v0: at most 5 of 9 nodes with 15 edges are taken, one a step, or the episode is ended by
a tenth; the return is the edges among them by their number. The observation is a vector. GoToDoor: the room has four doors of
different colours; the mission names one, and the action 'done' ends the episode, with a reward beside that door." \
        "Without the mission one door of four is right: at most 0.25. Rules and random actions (column return): 500
episodes with seeds of their own. The steps do not suffice to solve GoToDoor."
