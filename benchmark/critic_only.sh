#!/bin/bash
# What a critic that sees more is worth where the policy needs memory: CartPole without velocities, which the critic of half of
# the runs sees, and GraphExplore, where it sees the whole graph. Default flags of two memory scripts, three seeds.
#
#     bash benchmark/critic_only.sh [--out DIR] [FLAGS OF run.py]     # PARTS="frames lstm explore table" is the default
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=critic_only

cartpole="--env-id envs:StatelessCartPole-v1 --eval-episodes 100"
velocities="--env-kwargs '{\"velocities\": true}' --critic-only velocities"
graph='"num_nodes": [30, 60], "episode_length": 32'
run() {  # NAME COMMAND COMMAND_WITH_MORE [FLAGS OF run.py]
    local name=$1 command=$2 sees=$3
    shift 3
    "$PYTHON" benchmark/run.py --table $TABLE --workers 1 --seeds ${SEEDS:-1 2 3} "$@" --commands \
        "$name=$command" "${name}_critic=$sees"
}
both() {  # NAME SCRIPT [FLAGS OF run.py]: CartPole
    run "$1" "$2 $cartpole" "$2 $cartpole $velocities" "${@:3}"
}

for part in ${PARTS:-frames lstm explore table}; do
    case $part in
        frames) both frames "cleanrl_graph/ppo_framestack.py --total-timesteps 120000" "$@" ;;
        lstm) both lstm "cleanrl_graph/ppo_lstm_sparse.py --total-timesteps 200000" "$@" ;;
        explore)
            explore="cleanrl_graph/ppo_lstm_sparse.py --env-id envs:GraphExplore-v0 --total-timesteps 150000 --eval-episodes 500"
            run explore "$explore --env-kwargs '{$graph}'" \
                "$explore --env-kwargs '{$graph, \"show_map\": true}' --critic-only map" "$@"
            ;;
        table)
            panel="CartPole without velocities"
            systems=(
                "$panel|ppo_framestack.py=frames_S*" "$panel|ppo_framestack.py, the critic sees velocities=frames_critic_*"
                "$panel|ppo_lstm_sparse.py=lstm_S*" "$panel|ppo_lstm_sparse.py, the critic sees velocities=lstm_critic_*"
                "GraphExplore, 30 to 60 nodes|ppo_lstm_sparse.py=explore_G*"
                "GraphExplore, 30 to 60 nodes|ppo_lstm_sparse.py, the critic sees the graph=explore_critic_*"
            )
            "$PYTHON" benchmark/report.py --table $TABLE --target 475 --target-panel "$panel" --columns steps final greedy --systems "${systems[@]}" \
                --note "The policy never sees velocities, nor more of a graph than its neighbours and what it remembers.
With 16 frames velocities are differences of what both see."
            ;;
    esac
done
