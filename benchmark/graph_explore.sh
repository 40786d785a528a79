#!/bin/bash
# GraphExplore: an LSTM state per node that was seen (sparse, growing) against one LSTM state per environment and against
# no memory. Writes benchmark/results/graph_explore/, in about 25 minutes on one core; finished runs are not repeated.
#
#     bash benchmark/graph_explore.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RESULTS=benchmark/results/graph_explore
SEEDS=${SEEDS:-1 2 3}
export OMP_NUM_THREADS=1
mkdir -p $RESULTS runs

flags=(--env-id envs:GraphExplore-v0 --num-envs 16 --learning-rate 1e-3 --gnn-layers 1 --total-timesteps 250000
    --ent-coef 0.005 --no-clip-vloss --eval-episodes 200)
folders=() labels=()
: > $RESULTS/rows.md
run() {  # NAME SCRIPT FLAGS...
    local name=$1 script=$2 seed folder
    shift 2
    for seed in $SEEDS; do
        compgen -G "runs/GraphExplore-v0__${name}__${seed}__*/eval.csv" > /dev/null ||
            "$PYTHON" cleanrl_graph/"$script".py "${flags[@]}" "$@" --exp-name "$name" --seed "$seed"
        folder=$(ls -dt runs/GraphExplore-v0__"${name}__${seed}"__* | head -n 1)
        folders+=("$folder") labels+=("${name//_/ }")
        printf '| `%s.py %s` | %s | %.3f | %.3f |\n' "$script" "$*" "$seed" "$("$PYTHON" benchmark/last_return.py "$folder")" \
            "$(tail -n 1 "$folder/eval.md" | cut -d'|' -f4 | tr -d '* ')" >> $RESULTS/rows.md
    done
}
run per_node ppo_lstm_sparse --lstm-dim 64
run per_env ppo_lstm_sparse --lstm-dim 64 --no-state-per-node --prev-action
run no_memory ppo_graph
{ printf '    python SCRIPT'; printf ' %q' "${flags[@]}"
  printf '\n\nShare of the 64 steps that reach a node for the first time; "sampled": the last 500 episodes of the training,\n'
  printf '"greedy": 200 episodes. The first rows are the reference policies of the environment (1,000 episodes).\n\n'
  printf '| policy | seed | sampled | greedy |\n| --- | --- | --- | --- |\n'
  printf '| random walk | | 0.225 | |\n| random walk that does not turn back | | 0.387 | |\n'
  printf '| depth first, perfect memory | | | 0.686 |\n| nearest frontier on the whole remembered map | | | 0.728 |\n'
  cat $RESULTS/rows.md; } > $RESULTS/table.md
rm $RESULTS/rows.md
"$PYTHON" benchmark/curves.py --steps-only --out $RESULTS/curves --reference 0.686 --reference-label "depth first, perfect memory" \
    --labels "${labels[@]}" -- "${folders[@]}"
