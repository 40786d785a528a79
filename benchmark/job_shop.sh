#!/bin/bash
# The job-shop results of benchmark/results/job_shop/: a run of a few minutes that is tested on la01-40, and one of at
# most an hour that is tested on ta01-10 (Taillard 15x15) with the best of 128 samples. Both within 70 minutes on 2 cores.
#
#     bash benchmark/job_shop.sh [quick] [long]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RESULTS=benchmark/results/job_shop
mkdir -p $RESULTS

run() {
    local name=$1
    shift
    local command=(cleanrl_graph/ppo_graph.py --exp-name "$name" --env-id envs:JobShop-v0 --num-envs 64 --num-steps 64
        --num-minibatches 8 --update-epochs 3 --learning-rate 1e-3 --gamma 1 --gae-lambda 0.98 --save-model "$@")
    "$PYTHON" "${command[@]}" --run-dir runs
    local folder
    folder=$(ls -dt runs/JobShop-v0__"$name"__* | head -n 1)
    { printf '    python'; printf ' %q' "${command[@]}"; printf '\n\n'; cat "$folder/eval.md"; } > "$RESULTS/$name.md"
    cp "$folder/eval.csv" "$RESULTS/$name.csv"
    "$PYTHON" benchmark/curves.py --out "$RESULTS/${name}_curve" --ylabel "(LB - makespan) / LB" --labels "$name" -- "$folder"
    if [ -f "$folder/episode.gif" ]; then cp "$folder/episode.gif" "$RESULTS/$name.gif"; fi
}

for name in ${@:-quick long}; do
    case $name in
        quick) run quick --env-kwargs '{"jobs": [3, 10], "machines": [3, 10]}' --total-timesteps 400000 \
            --eval-suite la --capture-video ;;
        long) run long --env-kwargs '{"jobs": [5, 15], "machines": [5, 15]}' --total-timesteps 1500000 \
            --eval-suite ta15x15 --eval-samples 128 ;;
    esac
done
