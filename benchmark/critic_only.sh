#!/bin/bash
# What a critic that sees more is worth where the policy needs memory: CartPole without velocities, which the critic of half of
# the runs sees. Default flags of two memory scripts, three seeds.
#
#     bash benchmark/critic_only.sh [FLAGS OF run.py]     # PARTS="frames lstm table" is the default
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=critic_only

flags="--env-id envs:StatelessCartPole-v1 --eval-episodes 100"
sees="--env-kwargs '{\"velocities\": true}' --critic-only velocities"
run() {  # NAME SCRIPT [FLAGS OF run.py]
    local name=$1 script=$2
    shift 2
    "$PYTHON" benchmark/run.py --table $TABLE --workers 1 --seeds ${SEEDS:-1 2 3} "$@" --commands \
        "$name=$script $flags" "${name}_critic=$script $flags $sees"
}

for part in ${PARTS:-frames lstm table}; do
    case $part in
        frames) run frames "cleanrl_graph/ppo_framestack.py --total-timesteps 120000" "$@" ;;
        lstm) run lstm "cleanrl_graph/ppo_lstm_sparse.py --total-timesteps 200000" "$@" ;;
        table)
            systems=("ppo_framestack.py=frames_S*" "ppo_framestack.py, velocities for the critic=frames_critic_*")
            if "$PYTHON" benchmark/tables.py $TABLE "lstm_critic_*" > /dev/null; then
                systems+=("ppo_lstm_sparse.py=lstm_S*" "ppo_lstm_sparse.py, velocities for the critic=lstm_critic_*")
            fi
            "$PYTHON" benchmark/report.py --table $TABLE --target 475 --columns steps final greedy --systems "${systems[@]}" \
                --note "StatelessCartPole-v1: the policy never sees velocities. With 16 frames they are differences of
what both see, and a critic that is given them learned no faster."
            ;;
    esac
done
