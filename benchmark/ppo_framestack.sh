#!/bin/bash
# ppo_framestack.py on a task that needs the last three graphs, with and without views (about 5 minutes on one core), and
# the bytes and time of views.
#
#     bash benchmark/ppo_framestack.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=ppo_framestack
export OMP_NUM_THREADS=1

flags="--num-envs 16 --learning-rate 1e-3 --gnn-layers 1 --gamma 0.5 --ent-coef 0 --total-timesteps 60000
    --eval-episodes 100 --action-shifts '' --reward-shifts ''"
commands=()
for views in 3 2 1; do
    commands+=("graphs_$views=cleanrl_graph/ppo_framestack.py $flags --obs-shifts=-$((views - 1)):0")
done
"$PYTHON" benchmark/run.py --table $TABLE --env-ids envs:LastGraphs-v0 --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"
"$PYTHON" benchmark/report.py --table $TABLE --reference 16 optimum --ylabel "right answers of 16" \
    --systems "last 3 graphs=graphs_3_*" "last 2 graphs=graphs_2_*" "1 graph=graphs_1_*" \
    --note "LastGraphs-v0, 16 answers per episode: the optimum is 16, the best without memory 9.19. One row per number of
graphs that the policy sees (--obs-shifts). Bytes and time of views: [table](../speed/tables.md#views)."
[ -n "${SKIP_VIEWS:-}" ] || "$PYTHON" benchmark/speed/views.py --out $RESULTS/speed/tables.md#views
