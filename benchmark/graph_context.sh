#!/bin/bash
# Nodes that see mean, maximum and number of their graph's nodes (--graph-context) beside nodes that do not: the same
# commands, with and without. The runs without are those of other tables (flexible_job_shop.sh, dag_schedule.sh,
# ppo_lstm_sparse.sh, traffic.sh), which are not repeated, but for JobShop. FlexibleJobShop and JobShop are tested on larger
# instances than those of the training, one policy of traffic lights on a map with more lights (unseen). About an hour and
# a half of one core per seed; traffic needs benchmark/traffic/requirements.txt.
#
#     bash benchmark/graph_context.sh [--out DIR] [FLAGS OF run.py]
#     PARTS="explore flexible" SEEDS=1 bash benchmark/graph_context.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=graph_context
export OMP_NUM_THREADS=1

run() { "$PYTHON" benchmark/run.py --table $TABLE "${flags[@]}" "$@"; }
trains() { # NAME COMMAND: with --graph-context
    run --seeds ${SEEDS:-1 2 3} --commands "$1=$2 --graph-context"
}
suites() { # NAME SEED SUITE...: the model of a training on larger instances
    local model=("$RUNS/$TABLE/$1"_*_s"$2"_*/*/model.pt) name=$1 seed=$2 commands=() suite
    [ -f "${model[0]}" ] || return 0
    mkdir -p $RUNS/graph_context_models
    cp "${model[0]}" $RUNS/graph_context_models/"$name"_s"$seed".pt
    for suite in "${@:3}"; do
        commands+=("$name-$suite=cleanrl_graph/ppo_graph.py --load-model $RUNS/graph_context_models/${name}_s$seed.pt
            --total-timesteps 0 --eval-suite $suite --eval-samples 0")
    done
    run --seeds "$seed" --commands "${commands[@]}"
}
flexible='[{"jobs": [5, 15], "machines": [4, 8]}, {"jobs": [5, 15], "machines": [4, 8], "operations": [4, 8],
    "durations": [1, 99], "deviation": [0, 0.8], "flexibility": [0.1, 0.8]}]'
job_shop='[{"jobs": [3, 15], "machines": [3, 10], "lookahead": 2, "machine_sets": [1, 2]}, {"jobs": [10, 30], "machines": [4, 10], "lookahead": 2}]'
declare -A dag=([batch]='{"num_jobs": 20, "shaped": true}' [continuous]='{"num_jobs": 50, "load": 0.75, "shaped": true}')
lights="cleanrl_graph/ppo_graph_agents.py --env-id envs:TrafficLights-v0 --num-steps 90 --gamma 0.95 --gnn-layers 2
    --norm-vloss 1 --no-clip-vloss --eval-samples 0 --save-model"
hours() { # MAP...: an environment for each map and each demand of the training
    local entries=() name demand
    for name in "$@"; do
        for demand in 0.7 1.0 1.15 1.3; do
            entries+=("{\\\"map\\\":\\\"$name\\\",\\\"demand\\\":$demand,\\\"shift\\\":[0,3600]}")
        done
    done
    local IFS=,
    echo "--env-kwargs [${entries[*]}] --num-envs ${#entries[@]}"
}

flags=("$@")
for part in ${PARTS:-explore flexible batch continuous grid4x4 unseen job_shop table}; do
    case $part in
        explore)
            trains explore "cleanrl_graph/ppo_lstm_sparse.py --env-id envs:GraphExplore-v0 --total-timesteps 250000
                --eval-episodes 200"
            ;;
        flexible)
            trains flexible "cleanrl_graph/ppo_graph.py --env-id envs:FlexibleJobShop-v0 --action-head edges
                --env-kwargs '$flexible' --total-timesteps 500000 --num-envs 64 --num-steps 64 --num-minibatches 8
                --update-epochs 3 --learning-rate 1e-3 --gamma 1 --gae-lambda 0.98 --save-model"
            for seed in ${SEEDS:-1 2 3}; do
                suites flexible "$seed" sd15x10 mk sd30x10 sd40x10 edata rdata vdata
            done
            ;;
        batch | continuous)
            file=$RUNS/dag_schedule_files/$part.npz
            mkdir -p $RUNS/dag_schedule_files
            [ -f $file ] || "$PYTHON" cleanrl_graph/ppo_graph_aux.py --env-id envs:DagSchedule-v0 \
                --env-kwargs "${dag[$part]}" --record envs.dag_schedule:limited_sjf --record-episodes 60 --demos $file
            trains $part "cleanrl_graph/ppo_graph_aux.py --env-id envs:DagSchedule-v0 --env-kwargs '${dag[$part]}'
                --autoregressive --num-envs 16 --num-steps 128 --num-minibatches 8 --update-epochs 3 --learning-rate 5e-4
                --ent-coef 0.001 --gnn-dim 32 --gnn-layers 2 --total-timesteps 300000 --demos $file --bc-updates 400
                --bc-coef 0.2 --bc-anneal 0.3 --bc-minibatch-size 256 --eval-suite $part --eval-samples 0 --save-model"
            ;;
        grid4x4) trains grid4x4 "$lights $(hours grid4x4) --eval-suite grid4x4 --total-timesteps 43200" ;;
        unseen)
            trains unseen "$lights $(hours grid4x4 cologne3 cologne8 ingolstadt7) --eval-suite all
                --total-timesteps 115200"
            ;;
        job_shop)  # both, as the table of job_shop.sh is of a training that is six times as long
            both="cleanrl_graph/ppo_graph.py --env-id envs:JobShop-v0 --num-envs 64 --num-steps 64 --num-minibatches 8
                --update-epochs 3 --learning-rate 1e-3 --gamma 1 --total-timesteps 200000 --eval-suite la --eval-samples 0
                --save-model --env-kwargs '$job_shop'"
            trains jobs "$both"
            run --seeds ${SEEDS:-1 2 3} --commands "jobs_without=$both"
            for seed in ${SEEDS:-1 2 3}; do
                for name in jobs jobs_without; do
                    suites $name "$seed" ta15x15 ta20x20 ta30x20 ta50x20 swv
                done
            done
            ;;
        table) "$PYTHON" benchmark/graph_context.py ;;
    esac
done
