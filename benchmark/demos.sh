#!/bin/bash
# Demonstrations and auxiliary losses on small job shops: PPO alone, with cloned demonstrations of a dispatching rule
# (FDD/MWKR, the best one) and of the pilot method, cloning alone, and with --aux reconstruct and predict.
#
#     bash benchmark/demos.sh [FLAGS OF run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=demos FILES=runs/demos_files RESULTS=benchmark/results/demos

sizes='{"jobs": [3, 8], "machines": [3, 8]}'
mkdir -p $FILES $RESULTS
for policy in fdd_mwkr pilot; do
    [ -f $FILES/$policy.npz ] || OMP_NUM_THREADS=1 "$PYTHON" cleanrl_graph/envs/record.py --env-kwargs "$sizes" \
        --policy envs.job_shop:$policy --episodes 300 --out $FILES/$policy.npz
done

flags="cleanrl_graph/ppo_graph_aux.py --env-id envs:JobShop-v0 --env-kwargs '$sizes' --total-timesteps 122880
    --num-envs 32 --num-steps 64 --num-minibatches 8 --update-epochs 3 --learning-rate 1e-3 --gamma 1 --gae-lambda 0.98
    --eval-episodes 100"
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands \
    "ppo=$flags" \
    "pilot=$flags --demos $FILES/pilot.npz" \
    "fdd_mwkr=$flags --demos $FILES/fdd_mwkr.npz" \
    "cloning=$flags --demos $FILES/pilot.npz --bc-anneal 0 --pg-coef 0 --vf-coef 0 --ent-coef 0" \
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
    for label, policy in (("PPO + pilot", "pilot"), ("PPO + FDD/MWKR", "fdd_mwkr"), ("pilot cloned, no PPO", "pilot")):
        writer.writerow(["demonstrations", label, mean_return(policy)])
END
"$PYTHON" benchmark/report.py --table $TABLE --beside demonstrators.csv --target ${TARGET:--0.13} \
    --columns steps SPS minutes final greedy --ylabel "(bound - makespan) / bound" --systems \
    "demonstrations|PPO alone=ppo_*" "demonstrations|PPO + pilot=pilot_*" "demonstrations|PPO + FDD/MWKR=fdd_mwkr_*" \
    "demonstrations|pilot cloned, no PPO=cloning_*" "auxiliary losses|PPO alone=ppo_*" \
    "auxiliary losses|reconstruct=reconstruct_*" "auxiliary losses|predict=predict_*" \
    --note "The return is (lower bound - makespan) / lower bound, on random instances of 3 to 8 jobs and machines;
demonstrator: the mean return of the 300 demonstrated episodes."
