#!/bin/bash
# The best model of --eval-every against the last one, VertexCover-v0: trained for 49,152 steps on graphs of 5, 10 and 15
# nodes, with a learning rate that falls and with a constant, larger one. Every second update 100 episodes choose best.pt.
# Both models are then played on graphs that chose neither: 300 others of these sizes, and the 100 test graphs of 20 nodes.
# About 20 minutes of one core that other jobs share.
#
#     bash benchmark/best_model.sh [--out DIR] [FLAGS OF run.py]     # PARTS="train play table" is the default
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=best_model
export OMP_NUM_THREADS=1

script="cleanrl_graph/ppo_graph.py --env-id envs:VertexCover-v0"
train="--gamma 1 --total-timesteps 50000 --num-envs 16 --eval-every 2 --eval-episodes 100"
for part in ${PARTS:-train play table}; do
    case $part in
        train)
            "$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands \
                "falling=$script $train --learning-rate 1e-3" \
                "constant=$script $train --learning-rate 3e-3 --no-anneal-lr"
            "$PYTHON" benchmark/best_model.py --collect
            ;;
        play)
            for seed in ${SEEDS:-1 2 3}; do
                commands=()
                for model in $RUNS/best_model_models/*_s"$seed"_*.pt; do
                    [ -f "$model" ] || continue
                    name=$(basename "$model" .pt)
                    play="$script --load-model $model --total-timesteps 0"
                    commands+=("${name}_other=$play --eval-episodes 300"
                        "${name}_nodes20=$play --eval-suite nodes20 --eval-samples 0")
                done
                [ ${#commands[@]} = 0 ] ||
                    "$PYTHON" benchmark/run.py --table $TABLE --seeds $((1000 + seed)) "$@" --commands "${commands[@]}"
            done
            ;;
        table) "$PYTHON" benchmark/best_model.py ;;
    esac
done
