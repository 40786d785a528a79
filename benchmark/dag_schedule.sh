#!/bin/bash
# Scheduling of data-processing jobs, batched and continuous arrivals: PPO that begins with demonstrations of the best
# rule, "limited SJF", tested on the 100 fixed sets of jobs of each suite, beside the rules: six runs of about 8 minutes
# and five minutes for the rules on an idle core. Finished runs are not repeated.
#
#     bash benchmark/dag_schedule.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=dag_schedule FILES=$RUNS/dag_schedule_files

declare -A kwargs=([batch]='{"num_jobs": 20, "shaped": true}' [continuous]='{"num_jobs": 50, "load": 0.75, "shaped": true}')
mkdir -p $FILES
commands=()
for suite in batch continuous; do
    [ -f $FILES/$suite.npz ] || OMP_NUM_THREADS=1 "$PYTHON" cleanrl_graph/ppo_graph_aux.py \
        --env-id envs:DagSchedule-v0 --env-kwargs "${kwargs[$suite]}" --record envs.dag_schedule:limited_sjf \
        --record-episodes 60 --demos $FILES/$suite.npz
    commands+=("$suite=cleanrl_graph/ppo_graph_aux.py --env-id envs:DagSchedule-v0 --env-kwargs '${kwargs[$suite]}'
        --autoregressive --num-envs 16 --num-steps 128 --num-minibatches 8 --update-epochs 3 --learning-rate 5e-4
        --ent-coef 0.001 --gnn-dim 32 --gnn-layers 2 --total-timesteps 300000
        --demos $FILES/$suite.npz --bc-updates 400 --bc-coef 0.2 --bc-anneal 0.3 --bc-minibatch-size 256
        --eval-suite $suite --eval-samples 0 --save-model")
done
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"
"$PYTHON" benchmark/dag_schedule.py
