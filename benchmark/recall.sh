#!/bin/bash
# Recall: a cue at the first step, a corridor of 10, 50 or 200 steps, a choice. Success rate per script and length. Writes
# benchmark/results/recall/, in about 15 minutes on one core; finished runs are not repeated.
#
#     bash benchmark/recall.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RESULTS=benchmark/results/recall
SEEDS=${SEEDS:-1 2 3}
export OMP_NUM_THREADS=1
mkdir -p $RESULTS runs

flags=(--env-id envs:Recall-v0 --num-envs 16 --learning-rate 1e-3 --no-clip-vloss --eval-episodes 200)
: > $RESULTS/rows.md
folders=() labels=()
run() {  # NAME SCRIPT LENGTH STEPS FLAGS...
    local name=$1_$3 script=$2 length=$3 steps=$4 seed folder results=()
    shift 4
    local command=("${flags[@]}" --env-kwargs "{\"length\": $length}" --num-steps $((length < 100 ? 128 : 256))
        --total-timesteps "$steps" "$@")
    for seed in $SEEDS; do
        compgen -G "runs/Recall-v0__${name}__${seed}__*/eval.csv" > /dev/null ||
            "$PYTHON" cleanrl_graph/"$script".py "${command[@]}" --exp-name "$name" --seed "$seed"
        folder=$(ls -dt runs/Recall-v0__"${name}__${seed}"__* | head -n 1)
        results+=("$(tail -n 1 "$folder/eval.md" | cut -d'|' -f4 | tr -d '* ' | awk '{printf "%.2f", (1 + $1) / 2}')")
        [ "$seed" != 1 ] || { folders+=("$folder"); labels+=("$script, $length steps"); }
    done
    printf '| %s | `%s.py%s` | %s | %s |\n' "$length" "$script" "$(printf ' %q' "$@")" "$steps" \
        "$(printf '%s / ' "${results[@]}" | sed 's, / $,,')" >> $RESULTS/rows.md
}

for length in 10 50 200; do
    steps=$((length < 100 ? 150000 : 400000))
    run frames_16 ppo_framestack $length 150000 --action-shifts "" --reward-shifts ""
    run lstm ppo_lstm_sparse $length $steps --hidden-dims 64 --forget-bias 5
    run gtrxl ppo_gtrxl $length $steps --hidden-dims 64 --num-layers 1 --memory-length $((length + 2))
done
{ printf '    python SCRIPT'; printf ' %q' "${flags[@]}"
  printf ' --env-kwargs {"length": LENGTH} --num-steps 128 (256 for 200)\n\nShare of right choices in 200 greedy episodes, per seed (%s); guessing gives 0.5.\n\n' "$SEEDS"
  printf '| corridor | script | steps | success |\n| --- | --- | --- | --- |\n'
  cat $RESULTS/rows.md; } > $RESULTS/table.md
rm $RESULTS/rows.md
"$PYTHON" benchmark/curves.py --out $RESULTS/curves --reference 1 --labels "${labels[@]}" -- "${folders[@]}"
