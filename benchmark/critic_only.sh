#!/bin/bash
# What a critic that sees more is worth where the policy needs memory: CartPole without velocities, which the critic of half of
# the runs sees. Default flags of two memory scripts, three seeds.
#
#     bash benchmark/critic_only.sh [FLAGS OF run.py]     # PARTS="frames lstm table" is the default
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=critic_only

flags="--env-id envs:StatelessCartPole-v1 --total-timesteps 120000 --eval-episodes 100"
sees="--env-kwargs '{\"velocities\": true}' --critic-only velocities"
for part in ${PARTS:-frames lstm table}; do
    case $part in
        frames) script=cleanrl_graph/ppo_framestack.py ;;
        lstm) script=cleanrl_graph/ppo_lstm_sparse.py ;;
        table)
            "$PYTHON" benchmark/report.py --table $TABLE --target 475 --columns steps final greedy --systems \
                "ppo_framestack.py=frames_[!c]*" "ppo_framestack.py --critic-only velocities=frames_critic_*" \
                "ppo_lstm_sparse.py=lstm_[!c]*" "ppo_lstm_sparse.py --critic-only velocities=lstm_critic_*" \
                --note "StatelessCartPole-v1 with and without velocities for the critic; the policy never sees them."
            continue
            ;;
    esac
    "$PYTHON" benchmark/run.py --table $TABLE --workers 1 --seeds ${SEEDS:-1 2 3} "$@" --commands \
        "$part=$script $flags" "${part}_critic=$script $flags $sees"
done
