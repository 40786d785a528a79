#!/bin/bash
# Results of ppo_framestack.py in benchmark/results/ppo_framestack/: a task that needs the last three graphs, with and
# without views, and the bytes and time of views. About 5 minutes on one core.
#
#     bash benchmark/ppo_framestack.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RESULTS=benchmark/results/ppo_framestack
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p $RESULTS

flags=(--env-id envs:LastGraphs-v0 --num-envs 16 --learning-rate 1e-3 --gnn-layers 1 --gamma 0.5 --ent-coef 0
    --total-timesteps 60000 --eval-episodes 100 --action-shifts "" --reward-shifts "")
{ printf '    python cleanrl_graph/ppo_framestack.py'; printf ' %q' "${flags[@]}"; } > $RESULTS/last_graphs.md
printf '\n\n16 answers per episode. One row per number of graphs that the policy sees (`--obs-shifts`) and seed:\n\n' \
    >> $RESULTS/last_graphs.md
printf '| graphs seen | seed | greedy, mean of 100 episodes | optimum | best without memory |\n| --- | --- | --- | --- | --- |\n' \
    >> $RESULTS/last_graphs.md
folders=() labels=()
for views in 3 2 1; do
    for seed in 1 2 3; do
        name=last_graphs_$views
        "$PYTHON" cleanrl_graph/ppo_framestack.py "${flags[@]}" --obs-shifts=-$((views - 1)):0 --seed $seed --exp-name $name
        folder=$(ls -dt runs/LastGraphs-v0__"${name}__${seed}"__* | head -n 1)
        folders+=("$folder") labels+=("$views graph(s)")
        printf '| %s | %s | %s | 16 | 9.19 |\n' $views $seed "$(tail -n 1 "$folder/eval.md" | cut -d'|' -f4 | tr -d '* ')" \
            >> $RESULTS/last_graphs.md
    done
done
"$PYTHON" benchmark/curves.py --out $RESULTS/last_graphs --reference 16 --labels "${labels[@]}" -- "${folders[@]}"
"$PYTHON" benchmark/speed/views.py --out $RESULTS/views.md
