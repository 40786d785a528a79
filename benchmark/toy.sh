#!/bin/bash
# Tasks with a known optimum: does each head reach it? Writes benchmark/results/toy/, in about 6 minutes on 2 cores.
#
#     bash benchmark/toy.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RESULTS=benchmark/results/toy
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p $RESULTS
echo "# Tasks with a known optimum (bash benchmark/toy.sh)" > $RESULTS/toy.md

run() {
    local name=$1 optimum=$2
    shift 2
    local command=(cleanrl_graph/ppo_graph.py --exp-name "$name" --num-envs 16 --learning-rate 1e-3 --gnn-layers 2
        --eval-episodes 200 "$@")
    "$PYTHON" "${command[@]}" --run-dir runs
    local folder
    folder=$(ls -dt runs/*__"$name"__* | head -n 1)
    { printf '\n## %s\n\n    python' "$name"; printf ' %q' "${command[@]}"; printf '\n\n'
      "$PYTHON" benchmark/curves.py --out "$RESULTS/$name" --reference "$optimum" --labels "$name" -- "$folder"
      printf 'Mean of 200 greedy episodes: %s. ' "$(tail -n 1 "$folder/eval.md" | cut -d'|' -f4 | tr -d '* ')"
      printf 'Optimum: %s.\n' "$optimum"; } >> "$RESULTS/toy.md"
}

run poisson_1_hop 16 --env-id envs:PoissonGraph-v0 --total-timesteps 200000
run poisson_2_hops 16 --env-id envs:PoissonGraph-v0 --env-kwargs '{"hops": 2}' --total-timesteps 300000
run best_of_set 1 --env-id envs:BestOfSet-v0 --total-timesteps 400000
# the optimum of the next two is that of sampled actions: what a policy without memory can reach at all, and what one with
# independent heads can (see PairNodesEnv)
run pair_nodes_autoregressive 13.5 --env-id envs:PairNodes-v0 --total-timesteps 200000 --autoregressive
run pair_nodes_independent 4.27 --env-id envs:PairNodes-v0 --total-timesteps 200000
