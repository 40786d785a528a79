#!/bin/bash
# Traffic lights of RESCO's maps, each light an agent: pip install -r benchmark/traffic/requirements.txt. One policy for each
# map; on grid4x4 also without the roads between the lights and with one reward of all lights (ppo_graph.py); one policy for
# several maps; the same without ingolstadt21, which it has never seen; sumo-rl's lights with Stable-Baselines3's PPO, if that
# is installed (pip install stable-baselines3==2.9.2). An hour of grid4x4 takes 2 to 3 s of a core, one of ingolstadt21 10 to
# 20, everything 5 1/2 hours. Trained with demands of 0.7, 1, 1.15 and 1.3; delays in seconds are means over five hours of a
# map, demands of 0.8 to 1.2, whose seeds are never trained on.
#
#     bash benchmark/traffic.sh [--out DIR] [FLAGS OF run.py]
#     PARTS="grid4x4 all" SEEDS=1 bash benchmark/traffic.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=traffic
maps="grid4x4 cologne1 cologne3 cologne8 ingolstadt1 ingolstadt7 arterial4x4 ingolstadt21"
PARTS=${PARTS:-$maps ablations all unseen peer}
export OMP_NUM_THREADS=1 PYTHONPATH=benchmark/traffic${PYTHONPATH:+:$PYTHONPATH}

flags="--env-id envs:TrafficLights-v0 --num-steps 90 --gamma 0.95 --gnn-layers 2 --norm-vloss 1 --no-clip-vloss --eval-samples 0"
flags="$flags --save-model"
agents="cleanrl_graph/ppo_graph_agents.py $flags"
hours() {  # MAP...: an environment for each map and each demand of the training
    local entries=() name demand
    for name in "$@"; do
        for demand in 0.7 1.0 1.15 1.3; do
            entries+=("{\\\"map\\\":\\\"$name\\\",\\\"demand\\\":$demand,\\\"shift\\\":[0,3600]}")
        done
    done
    local IFS=,
    echo "--env-kwargs [${entries[*]}] --num-envs ${#entries[@]}"
}
map() {  # NAME STEPS: one map, tested on its suite
    echo "$(hours "$1") --eval-suite $1 --total-timesteps $2"
}
small="grid4x4 cologne3 cologne8 ingolstadt7"
commands=()
for part in $PARTS; do
    case $part in
        ablations)
            commands+=("grid4x4_no_roads=$agents $(map grid4x4 43200) --wrap no_roads:no_roads")
            commands+=("grid4x4_joint=cleanrl_graph/ppo_graph.py --learning-rate 1e-3 $flags $(map grid4x4 43200)") ;;
        all) commands+=("all=$agents $(hours $small ingolstadt21) --eval-suite all --total-timesteps 144000") ;;
        unseen) commands+=("unseen=$agents $(hours $small) --eval-suite all --total-timesteps 115200") ;;
        peer) ;;
        grid4x4 | arterial4x4 | ingolstadt21) commands+=("$part=$agents $(map "$part" 43200)") ;;
        *) commands+=("$part=$agents $(map "$part" 129600)") ;;  # 1 to 8 lights, above 16 to 21
    esac
done
"$PYTHON" benchmark/traffic/rules.py
if [ ${#commands[@]} != 0 ]; then
    "$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands "${commands[@]}"
fi
peer=$RESULTS/$TABLE/sumo_rl_sb3.csv
if [[ " $PARTS " == *" peer "* ]] && "$PYTHON" -c "import stable_baselines3" 2> /dev/null; then
    for seed in ${SEEDS:-1 2 3}; do
        grep -qs "^$seed," $peer || "$PYTHON" benchmark/peers/sumo_rl_sb3.py --seed $seed --out $peer
    done
fi
"$PYTHON" benchmark/traffic/delays.py
systems=("grid4x4|without roads=grid4x4_no_roads_*" "grid4x4|one reward for all lights=grid4x4_joint_*")
for name in $maps; do
    systems+=("$name|each light an agent=${name}_TrafficLights*")
done
"$PYTHON" benchmark/report.py --table $TABLE --skip --ylabel "return of an hour" --systems "${systems[@]}" \
    --note "The return is the sum over an hour of the lights' mean reward, with sampled decisions and the demands of the training.
Delays of greedy decisions: delays.md."
