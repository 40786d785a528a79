#!/bin/bash
# A choice among rows that is scored additively (commit 08f42c3) against that score with a dot product beside it, with
# the same flags; then BestOfSet for a quarter of the steps of benchmark/ppo_graph.sh. An hour on one core.
#
#     git worktree add runs/08f42c3 08f42c3
#     bash benchmark/choice_head.sh [FLAGS OF run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=choice_head
OLD=runs/08f42c3/cleanrl_graph
NEW=cleanrl_graph

match="ppo_graph.py --env-id envs:MatchGoal-v0 --total-timesteps 100000 --eval-episodes 100 --num-envs 32"
flags="ppo_graph.py --num-envs 16 --learning-rate 1e-3 --gnn-layers 2"
explore="--num-envs 16 --learning-rate 1e-3 --gnn-layers 1 --ent-coef 0.005 --no-clip-vloss --lstm-dim 64"
shop="--num-envs 16 --num-steps 64 --learning-rate 1e-3 --gamma 1 --gae-lambda 0.98 --env-kwargs '{\"jobs\": [3, 6],
    \"machines\": [3, 6]}'"
two_hops="$flags --env-id envs:PoissonGraph-v0 --env-kwargs '{\"hops\": 2}'"
tasks=(
    "match_32=$match --learning-rate 1e-3"
    "best_of_set=$flags --env-id envs:BestOfSet-v0 --total-timesteps 60000 --eval-episodes 1000"
    "poisson_1_hop=$flags --env-id envs:PoissonGraph-v0 --total-timesteps 40000 --eval-episodes 200"
    "poisson_2_hops=$two_hops --total-timesteps 60000 --eval-episodes 200"
    "pair_nodes=$flags --env-id envs:PairNodes-v0 --total-timesteps 60000 --autoregressive --eval-episodes 0"
    "job_shop=ppo_graph.py $shop --env-id envs:JobShop-v0 --total-timesteps 25000 --eval-episodes 100"
    "explore=ppo_lstm_sparse.py $explore --env-id envs:GraphExplore-v0 --total-timesteps 30000 --eval-episodes 50"
)
commands=()
for task in "${tasks[@]}"; do
    commands+=("old_${task%%=*}=$OLD/${task#*=}" "new_${task%%=*}=$NEW/${task#*=}")
done
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"
"$PYTHON" benchmark/run.py --table $TABLE --seeds 1 "$@" --commands \
    "long_best_of_set=$NEW/$flags --env-id envs:BestOfSet-v0 --total-timesteps 200000 --eval-episodes 2000"

systems=()
for task in "MatchGoal=match_32" "BestOfSet=best_of_set" "PoissonGraph, 1 hop=poisson_1_hop" \
    "PoissonGraph, 2 hops=poisson_2_hops" "PairNodes=pair_nodes" "JobShop=job_shop" "GraphExplore=explore"; do
    systems+=("${task%=*}|additive=old_${task#*=}_*" "${task%=*}|with dot product=new_${task#*=}_*")
done
"$PYTHON" benchmark/report.py --table $TABLE --no-plot --columns steps final greedy --beside optimum.csv \
    --systems "${systems[@]}" "BestOfSet|with dot product, long=long_best_of_set_*" \
    --note "additive: w . tanh(k + q), commit 08f42c3. With dot product: k . q / sqrt(d) more, and U small at first.
PairNodes is trained with --autoregressive, GraphExplore by ppo_lstm_sparse.py. The trainings are short: most do not end
at the optimum."
