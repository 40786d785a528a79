#!/bin/bash
# VertexCover-v0, the task of "Using GNNs in RL: a practical guide" (ICLR 2026 blog track): trained for 100,000 steps on
# graphs of 5, 10 and 15 nodes, tested on its 100 graphs of 20 nodes, and with the same model on 60 and 200 nodes, greedily
# and, but for 200 nodes, as the best of 16 samples (models); beside the greedy rule, an exact solver (solver; needs
# benchmark/requirements.txt) and the guide's figures (table). About 10 minutes of one core. cover.gif is the first episode,
# at 320 pixels, of: ppo_graph.py --load-model runs/vertex_cover_models/seed1.pt --total-timesteps 0 --eval-episodes 1
# --env-kwargs '{"nodes": [30]}' --capture-video --seed 3
#
#     bash benchmark/vertex_cover.sh [--out DIR] [FLAGS OF run.py]     # PARTS="models solver table" is the default
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=vertex_cover
export OMP_NUM_THREADS=1

script="cleanrl_graph/ppo_graph.py --env-id envs:VertexCover-v0"
train="--gamma 1 --total-timesteps 100000 --num-envs 16 --learning-rate 1e-3"
for part in ${PARTS:-models solver table}; do
    case $part in
        models)
            "$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands \
                "train=$script $train --eval-suite nodes20 --eval-samples 0 --save-model"
            mkdir -p $RUNS/vertex_cover_models
            for seed in ${SEEDS:-1 2 3}; do
                model=($RUNS/$TABLE/train_*_s"$seed"_*/*/model.pt)
                [ ! -f "${model[0]}" ] || cp "${model[0]}" $RUNS/vertex_cover_models/seed$seed.pt
                commands=()
                for suite in nodes20 nodes60 nodes200; do
                    samples=16
                    [ $suite != nodes200 ] || samples=0  # a quarter of an hour
                    commands+=("$suite=$script --load-model $RUNS/vertex_cover_models/seed$seed.pt --total-timesteps 0
                        --eval-suite $suite --eval-samples $samples")
                done
                "$PYTHON" benchmark/run.py --table $TABLE --seeds "$seed" "$@" --commands "${commands[@]}"
            done
            ;;
        solver) "$PYTHON" benchmark/vertex_cover.py --solve ;;
        table) "$PYTHON" benchmark/vertex_cover.py ;;
    esac
done
