#!/bin/bash
# Demonstrations and auxiliary losses on small job shops: PPO alone, with cloned demonstrations of a dispatching rule
# (FDD/MWKR, the best one) and of the pilot method, cloning alone, and with --aux reconstruct and predict.
#
#     bash benchmark/demos.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=demos FILES=$RUNS/demos_files RESULTS=$RESULTS/demos

sizes='{"jobs": [5, 8], "machines": [5, 8]}'
mkdir -p $FILES $RESULTS
for policy in fdd_mwkr pilot; do
    [ -f $FILES/$policy.npz ] || OMP_NUM_THREADS=1 "$PYTHON" cleanrl_graph/ppo_graph_aux.py --env-id envs:JobShop-v0 \
        --env-kwargs "$sizes" --record envs.job_shop:$policy --record-episodes 200 --demos $FILES/$policy.npz
done

flags="cleanrl_graph/ppo_graph_aux.py --env-id envs:JobShop-v0 --env-kwargs '$sizes' --total-timesteps 16384
    --num-envs 32 --num-steps 16 --num-minibatches 4 --update-epochs 4 --learning-rate 1e-3 --gamma 1 --gae-lambda 0.98
    --gnn-dim 32 --gnn-layers 2 --hidden-dims 128 128 --eval-episodes 50"
clone="--bc-updates 300 --demos $FILES"
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands \
    "ppo=$flags" \
    "pilot=$flags $clone/pilot.npz" \
    "fast_pilot=$flags $clone/pilot.npz --bc-anneal 0.2" \
    "fdd_mwkr=$flags $clone/fdd_mwkr.npz" \
    "cloning=$flags $clone/pilot.npz --bc-anneal 0 --pg-coef 0 --vf-coef 0 --ent-coef 0" \
    "reconstruct=$flags --aux reconstruct" \
    "predict=$flags --aux predict"

"$PYTHON" - $FILES $RESULTS/demonstrators.csv <<'END'
"""What the demonstrators reach, for the table."""
import csv
import sys
import numpy as np

def mean_return(policy):
    with np.load(f"{sys.argv[1]}/{policy}.npz") as file:
        return f"{file['rewards'].sum(dtype=float) / (file['terminated'] | file['truncated']).sum():.4f}"

with open(sys.argv[2], "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["panel", "label", "demonstrator"])
    for label in ("PPO + pilot", "PPO + pilot, --bc-anneal 0.2", "PPO + FDD/MWKR", "pilot cloned, no PPO"):
        writer.writerow(["", label, mean_return("pilot" if "pilot" in label else "fdd_mwkr")])
END
"$PYTHON" benchmark/report.py --table $TABLE --beside demonstrators.csv --target ${TARGET:--0.25} \
    --columns steps SPS minutes final greedy --ylabel "(bound - makespan) / bound" --systems \
    "PPO alone=ppo_*" "PPO + pilot=pilot_*" "PPO + pilot, --bc-anneal 0.2=fast_pilot_*" \
    "PPO + FDD/MWKR=fdd_mwkr_*" "pilot cloned, no PPO=cloning_*" \
    "PPO + reconstruct=reconstruct_*" "PPO + predict=predict_*" \
    --note "The return is (lower bound - makespan) / lower bound, on random instances of 5 to 8 jobs and machines;
demonstrator: the mean return of the 200 demonstrated episodes, whose steps (3,700 to 3,900) are not counted as steps of
the training. The clones begin with 300 gradient steps of cloning, whose weight then falls to
0 in the first half (--bc-anneal 0.5), or a fifth, of the training."
