#!/bin/bash
# EnvPool's own CartPole, MiniGrid and Jumanji's 2048 (a seed each, five minutes of a core), without code of ours: its function makes
# the VectorEnv. Needs `pip install -r benchmark/requirements-envpool.txt` beside requirements.txt.
#
#     bash benchmark/envpool.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=envpool
export OMP_NUM_THREADS=1

commands=()
for task in cartpole:CartPole-v1:100000 minigrid:MiniGrid-Empty-Random-6x6-v0:80000 game2048:Game2048-v1:80000; do
    IFS=: read -r name id steps <<< "$task"
    commands+=("$name=cleanrl_graph/ppo_graph.py --env-id envpool:make_gymnasium --env-kwargs '{\"task_id\": \"$id\", \"seed\": 1}'
        --vectorization-mode vector_entry_point --num-envs 16 --num-steps 64 --learning-rate 1e-3 --total-timesteps $steps")
done
"$PYTHON" benchmark/run.py --table $TABLE --seeds 1 "$@" --commands "${commands[@]}"
"$PYTHON" benchmark/report.py --table $TABLE --systems "CartPole-v1|ppo_graph.py=cartpole_*" \
    "MiniGrid-Empty-Random-6x6-v0|ppo_graph.py=minigrid_*" "Game2048-v1 of Jumanji|ppo_graph.py=game2048_*" --note "One seed: these
show that such environments train, not how well."
