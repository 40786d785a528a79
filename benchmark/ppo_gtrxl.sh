#!/bin/bash
# Memory in pixels: MiniGrid's memory environment (see pixel_memory.py), with a transformer, an LSTM and no memory. Writes
# benchmark/results/pixel_memory/, in about 30 minutes on one core; finished runs are not repeated. Needs
# `pip install -r benchmark/requirements-pixel-memory.txt` beside requirements.txt.
#
#     bash benchmark/ppo_gtrxl.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RESULTS=benchmark/results/pixel_memory
export OMP_NUM_THREADS=1 PYTHONPATH=benchmark${PYTHONPATH:+:$PYTHONPATH}
mkdir -p $RESULTS runs

flags=(--env-id pixel_memory:PixelMemory-v0 --num-envs 32 --num-steps 64 --num-minibatches 8 --learning-rate 1e-3
    --activation relu --gae-lambda 1 --ent-coef 0.05 --vf-coef 1 --no-clip-vloss --eval-episodes 200
    --capture-video)
folders=() labels=() rows=()
run() {  # NAME SEEDS STEPS SCRIPT FLAGS...
    local name=$1 seeds=$2 steps=$3 script=$4 seed
    shift 4
    for seed in $seeds; do
        compgen -G "runs/PixelMemory-v0__${name}__${seed}__*/eval.csv" > /dev/null ||
            "$PYTHON" cleanrl_graph/"$script".py "${flags[@]}" --total-timesteps "$steps" "$@" --exp-name "$name" \
                --seed "$seed"
        folders+=("$(ls -dt runs/PixelMemory-v0__"${name}__${seed}"__* | head -n 1)")
        labels+=("${name//_/ }") rows+=("| \`$script.py${*:+ $*}\` | $seed |")
    done
}

transformer=(ppo_gtrxl --num-layers 1 --memory-length 32)
run transformer "1 2 3" 250000 "${transformer[@]}" --gate none
run transformer_400k 3 400000 "${transformer[@]}" --gate none
run gated_transformer_400k 1 400000 "${transformer[@]}"
run lstm 1 250000 ppo_lstm_sparse
run no_memory 1 250000 ppo_graph

"$PYTHON" benchmark/curves.py --out $RESULTS/curves --reference 0.5 --reference-label "best without memory" \
    --ylabel "return (success: 0.97)" --labels "${labels[@]}" -- "${folders[@]}"
{ printf '    PYTHONPATH=benchmark python cleanrl_graph/SCRIPT'; printf ' %q' "${flags[@]}"
  printf '\n\nA view of 3 x 3 tiles in 12 x 12 pixels, three actions, a room and a junction two steps from it (size 7); at\n'
  printf 'most 0.5 of the episodes end well without memory. One of 2 cores of an Intel Xeon, shared by two runs and\nother jobs.\n'
  printf 'Sampled: the last 10 updates of the training; greedy: 200 episodes.\n\n'
  printf '| script | seed | steps | minutes | return, sampled | return, greedy | success, greedy |\n'
  printf '| --- | --- | --- | --- | --- | --- | --- |\n'
  for k in "${!folders[@]}"; do
      printf '%s %s %s |\n' "${rows[k]}" \
          "$(grep -a "$(basename "${folders[k]}")" $RESULTS/curves.csv | tail -n 10 |
             awk -F, '{s = $3; w = $4; r += $5; n++} END {printf "%d | %.1f | %.3f |", s, w / 60, r / n}')" \
          "$(awk -F, 'NR > 1 {r += $3; s += $3 > 0; n++} END {printf "%.3f | %.3f", r / n, s / n}' "${folders[k]}/eval.csv")"
  done; } > $RESULTS/table.md
cp "${folders[0]}/episode.gif" $RESULTS/episode.gif
cat $RESULTS/table.md
