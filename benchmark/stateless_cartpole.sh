#!/bin/bash
# CartPole without velocities: steps and seconds until the mean return of 100 episodes is 475, for each memory and for the
# peers. Ours with their default flags, five seeds, about half an hour of one core, the peers about an hour. Finished runs are
# not repeated; leave the machine alone meanwhile.
#
#     bash benchmark/stateless_cartpole.sh [--out DIR] [FLAGS OF run.py]     # PARTS="ours peers table" is the default
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=stateless_cartpole
PEERS=$RESULTS/$TABLE/runs
NOTE=$RESULTS/$TABLE/peers.md  # where the peers were measured
SEEDS=${SEEDS:-1 2 3 4 5}
PEER_SEEDS=${PEER_SEEDS:-1 2 3}
MAX_SECONDS=${MAX_SECONDS:-600}
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

flags="--total-timesteps 500000 --eval-episodes 100"  # all others as they come
commands=(
    "frames_16=cleanrl_graph/ppo_framestack.py $flags"
    "lstm=cleanrl_graph/ppo_lstm_sparse.py $flags"
    "gtrxl=cleanrl_graph/ppo_gtrxl.py $flags"
)

minis=(  # 200,000 steps, as they come
    "frames_mini=cleanrl_graph/ppo_framestack_mini.py"
    "gtrxl_mini=cleanrl_graph/ppo_gtrxl_mini.py"
)

peer() {  # PYTHON SCRIPT NAME FLAGS...
    local python=$1 script=$2 name=$3 seed
    shift 3
    for seed in $PEER_SEEDS; do
        "$PYTHON" benchmark/tables.py $TABLE "${name}_$seed" > /dev/null && continue
        mkdir -p $PEERS
        "$python" benchmark/peers/"$script".py "$@" --seed "$seed" --max-seconds "$MAX_SECONDS" --out "$PEERS/${name}_$seed.csv"
        echo "{\"name\": \"$name\", \"seed\": $seed, \"exit_code\": 0}" > "$PEERS/${name}_$seed.json"
        rm -f $NOTE
    done
}

for part in ${PARTS:-ours peers table}; do
    case $part in
        ours)
            "$PYTHON" benchmark/run.py --table $TABLE --env-ids envs:StatelessCartPole-v1 --seeds $SEEDS "$@" \
                --commands "${commands[@]}"
            "$PYTHON" benchmark/run.py --table $TABLE --env-ids cleanrl_graph.envs:StatelessCartPole-v1 \
                --seeds ${MINI_SEEDS:-1 2 3} "$@" --commands "${minis[@]}"
            ;;
        peers)
            rllib=${RLLIB_PYTHON:-$(environment .venv-rllib benchmark/peers/requirements-rllib.txt)}
            sb3=${PEER_PYTHON:-$(environment .venv-peers benchmark/peers/requirements-sb3.txt)}
            peer "$sb3" sb3_recurrent_ppo sb3_lstm
            for model in framestack lstm attention; do
                peer "$rllib" rllib_stateless_cartpole rllib_$model --model $model
            done
            "$PYTHON" benchmark/run.py --pack --table $TABLE
            ;;
        table)
            "$PYTHON" benchmark/report.py --table $TABLE --target 475 --log-seconds --systems \
                "ppo_framestack.py=frames_16_*" "ppo_lstm_sparse.py=lstm_*" "ppo_gtrxl.py=gtrxl_S*" \
                "ppo_framestack_mini.py=frames_mini_*" "ppo_gtrxl_mini.py=gtrxl_mini_*" \
                "RLlib, 16 frames=rllib_framestack_*" "RLlib, LSTM=rllib_lstm_*" \
                "RLlib, attention, memory 50=rllib_attention_*" \
                "Stable-Baselines3, RecurrentPPO=sb3_lstm_*" \
                --note "$(cat $NOTE 2> /dev/null || echo "All systems ran on this machine.")"
            ;;
    esac
done
