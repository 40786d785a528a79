#!/bin/bash
# Tasks with a known optimum: does each head reach it? Writes benchmark/results/toy/, in about 12 minutes on one core.
#
#     bash benchmark/toy.sh [NAME ...]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RESULTS=benchmark/results/toy
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p $RESULTS
only=" $* "

run() {
    local name=$1 optimum=$2
    shift 2
    [[ $only == "  " || $only == *" $name "* ]] || return 0
    local command=(cleanrl_graph/ppo_graph.py --exp-name "$name" --num-envs 16 --learning-rate 1e-3 --gnn-layers 2
        --eval-episodes 200 "$@")
    "$PYTHON" "${command[@]}" --run-dir runs
    local folder
    folder=$(ls -dt runs/*__"$name"__* | head -n 1)
    { printf '## %s\n\n    python' "$name"; printf ' %q' "${command[@]}"; printf '\n\n'
      "$PYTHON" benchmark/curves.py --out "$RESULTS/$name" --reference "$optimum" --labels "$name" -- "$folder"
      printf 'Mean of 200 greedy episodes: %s. ' "$(tail -n 1 "$folder/eval.md" | cut -d'|' -f4 | tr -d '* ')"
      printf 'Optimum: %s.\n' "$optimum"; } > "$RESULTS/$name.md"
}

run poisson_1_hop 16 --env-id envs:PoissonGraph-v0 --total-timesteps 200000
run poisson_2_hops 16 --env-id envs:PoissonGraph-v0 --env-kwargs '{"hops": 2}' --total-timesteps 800000
run best_of_set 1 --env-id envs:BestOfSet-v0 --total-timesteps 800000
# the optimum of the next two is that of sampled actions: what a policy without memory can reach at all, and what one with
# independent heads can (see PairNodesEnv)
run pair_nodes_autoregressive 13.5 --env-id envs:PairNodes-v0 --total-timesteps 200000 --autoregressive
run pair_nodes_independent 4.27 --env-id envs:PairNodes-v0 --total-timesteps 200000

{ echo "# Tasks with a known optimum (bash benchmark/toy.sh)"
  for name in poisson_1_hop poisson_2_hops best_of_set pair_nodes_autoregressive pair_nodes_independent; do
      echo; cat "$RESULTS/$name.md"
  done; } > $RESULTS/toy.md
