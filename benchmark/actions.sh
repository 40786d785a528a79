#!/bin/bash
# Edges as actions, one action per node, mixed actions, masks that depend on earlier parts, masks of bits, a choice for each
# row, a part for all beside one for each row: tasks with a known optimum, and MPE2's simple_spread with an action for all
# agents at once (pip install -r benchmark/requirements-multi-agent.txt; without it that run is left out). 45 runs, 75 minutes
# of a core that other jobs share.
#
#     bash benchmark/actions.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=actions
export OMP_NUM_THREADS=1 PYTHONPATH=benchmark/multi_agent${PYTHONPATH:+:$PYTHONPATH}

flags="--num-envs 16 --num-steps 64 --learning-rate 2.5e-3 --gnn-layers 2 --gamma 0 --ent-coef 0 --eval-episodes 200"
graph="cleanrl_graph/ppo_graph.py $flags"
commands=(
    "best_edge=$graph --env-id envs:BestEdge-v0 --total-timesteps 102400"
    "colouring=$graph --env-id envs:Colouring-v0 --total-timesteps 40960"
    "neighbour_mean=$graph --env-id envs:NeighbourMean-v0 --total-timesteps 102400"
    "chain=$graph --env-id envs:NodeAmount-v0 --autoregressive --total-timesteps 102400"
    "independent=$graph --env-id envs:NodeAmount-v0 --total-timesteps 102400"
)
systems=("BestEdge|ppo_graph.py=best_edge_*" "Colouring|ppo_graph.py=colouring_*"
    "NeighbourMean|ppo_graph.py=neighbour_mean_*" "NodeAmount|--autoregressive=chain_*"
    "NodeAmount|independent heads=independent_*")
if "$PYTHON" -c "import mpe2" 2> /dev/null; then
    commands+=("spread=cleanrl_graph/ppo_graph.py --env-id simple_spread:SimpleSpread-v0 --num-envs 16 --num-steps 128 --learning-rate 1e-3 --gnn-layers 2 --gamma 0.95 --total-timesteps 204800 --eval-episodes 200")
    systems+=("simple_spread|ppo_graph.py=spread_*")
fi
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1} "$@" --commands "${commands[@]}"

commands=()
add() {  # PANEL NAME SCRIPT FLAGS
    commands+=("$2_$3=cleanrl_graph/$3.py $flags $4")
    systems+=("$1|$3.py=$2_$3_[A-Z]*")
}
for script in ppo_graph ppo_framestack; do
    verb="--env-id envs:VerbObject-v0 --autoregressive --total-timesteps 40960"
    add "VerbObject" verb $script "$verb"
    add "VerbObject, rows" verb_rows $script "$verb --env-kwargs '{\"as_rows\": true}'"
    bits="--env-id envs:Switches-v0 --total-timesteps 40960"
    add "Switches" bits $script "$bits"
    add "Switches, rows" bits_rows $script "$bits --env-kwargs '{\"in_rows\": true}'"
    add "Assign" assign $script "--env-id envs:Assign-v0 --total-timesteps 40960"
    add "Convoy" convoy $script "--env-id envs:Convoy-v0 --autoregressive --total-timesteps 102400"
done
add "Assign" assign ppo_graph_agents "--env-id envs:Assign-v0 --total-timesteps 40960"
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"
"$PYTHON" benchmark/report.py --table $TABLE --beside ../beside.csv --systems "${systems[@]}" \
    --note "The optimum of NodeAmount is the best return of sampled actions without memory (independent heads: the best of
theirs); greedy ones repeat the choice. simple_spread: uniformly random actions earn -28.0 (60 episodes). Colouring is at 8
after 10,000 steps, but falls to 4 and comes back several times; another run of the same command ended at 8.000."
