#!/bin/bash
# The score of a choice among rows without its dot product (commit 08f42c3) and with it, on the same tasks with the same
# flags; seeds 1 to 3. About 100 minutes on one core.
#
#     git worktree add runs/08f42c3 08f42c3
#     bash benchmark/choice_head.sh [FLAGS OF run.py]     # PARTS="short long" is the default; SEEDS
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=choice_head
OLD=runs/08f42c3/cleanrl_graph
NEW=cleanrl_graph

match="ppo_graph.py --env-id envs:MatchGoal-v0 --total-timesteps 100000 --eval-episodes 100"
flags="ppo_graph.py --num-envs 16 --learning-rate 1e-3 --gnn-layers 2 --eval-episodes 200"
explore="--num-envs 16 --learning-rate 1e-3 --gnn-layers 1 --ent-coef 0.005 --no-clip-vloss --lstm-dim 64"
shop="--num-envs 16 --num-steps 64 --learning-rate 1e-3 --gamma 1 --gae-lambda 0.98 --env-kwargs '{\"jobs\": [3, 6],
    \"machines\": [3, 6]}'"
two_hops="$flags --env-id envs:PoissonGraph-v0 --env-kwargs '{\"hops\": 2}'"
tasks=(
    "match_32=$match --num-envs 32 --learning-rate 1e-3"
    "match_8=$match --num-envs 8"
    "best_of_set=$flags --env-id envs:BestOfSet-v0 --total-timesteps 100000"
    "poisson_1_hop=$flags --env-id envs:PoissonGraph-v0 --total-timesteps 50000"
    "poisson_2_hops=$two_hops --total-timesteps 100000"
    "pair_nodes=$flags --env-id envs:PairNodes-v0 --total-timesteps 100000 --autoregressive"
    "job_shop=ppo_graph.py $shop --env-id envs:JobShop-v0 --total-timesteps 50000 --eval-episodes 200"
    "explore=ppo_lstm_sparse.py $explore --env-id envs:GraphExplore-v0 --total-timesteps 50000 --eval-episodes 100"
)
commands=()
for part in ${PARTS:-short long}; do
    if [ $part = short ]; then
        for task in "${tasks[@]}"; do
            commands+=("old_${task%%=*}=$OLD/${task#*=}" "new_${task%%=*}=$NEW/${task#*=}")
        done
    else  # the steps of benchmark/ppo_graph.sh, whose table has the old head
        commands+=("long_best_of_set=$NEW/$flags --env-id envs:BestOfSet-v0 --total-timesteps 800000"
            "long_poisson_2_hops=$NEW/$two_hops --total-timesteps 800000")
    fi
done
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"
