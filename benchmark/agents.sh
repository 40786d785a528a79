#!/bin/bash
# Each row an agent: ppo_graph_agents.py, which learns from a reward per row, beside ppo_graph.py, whose reward, value and
# probability ratio are of all rows together, with the same flags. Crowd-v0, and MPE2's simple_spread by PettingZoo-v0
# (pip install -r benchmark/requirements-multi-agent.txt; without it these runs are left out). About an hour of one core.
#
#     bash benchmark/agents.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=agents
export OMP_NUM_THREADS=1

crowd="--env-id envs:Crowd-v0 --total-timesteps 102400 --learning-rate 1e-3 --eval-episodes 100"
spread='--env-id envs:PettingZoo-v0 --env-kwargs {\"env\":\"mpe2.simple_spread_v3\",\"max_cycles\":25,\"graph\":\"complete\"}'
spread="$spread --num-envs 16 --learning-rate 1e-3 --gnn-layers 2 --gamma 0.95 --total-timesteps 204800 --eval-episodes 200"
commands=(
    "crowd_agents=cleanrl_graph/ppo_graph_agents.py $crowd"
    "crowd_joint=cleanrl_graph/ppo_graph.py $crowd"
)
systems=("Crowd|ppo_graph_agents.py=crowd_agents_*" "Crowd|ppo_graph.py=crowd_joint_*")
if "$PYTHON" -c "import mpe2" 2> /dev/null; then
    commands+=(
        "spread_agents=cleanrl_graph/ppo_graph_agents.py $spread"
        "spread_joint=cleanrl_graph/ppo_graph.py $spread"
    )
    systems+=("simple_spread|ppo_graph_agents.py=spread_agents_*" "simple_spread|ppo_graph.py=spread_joint_*")
fi
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"
"$PYTHON" benchmark/report.py --table $TABLE --systems "${systems[@]}" \
    --note "The return is the sum over the steps of an episode of the agents' mean reward. Crowd: walking straight to the
exit has a return of -1.5, random moves -9.4. simple_spread: random actions earn -28.0."
