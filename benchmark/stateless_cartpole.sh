#!/bin/bash
# CartPole without velocities: steps and seconds until the mean return of 100 episodes is 475, for each memory and for the
# peers. Writes benchmark/results/stateless_cartpole/. A run that is there already (in runs/, or the csv of a peer) is not
# repeated. Ours take a few minutes on one core, the peers about an hour; leave the machine alone meanwhile.
#
#     bash benchmark/stateless_cartpole.sh ours     # the scripts of this repository, seeds 1 2 3
#     bash benchmark/stateless_cartpole.sh peers    # RLlib and Stable-Baselines3, each in an environment of its own
#     bash benchmark/stateless_cartpole.sh table    # from what is there
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RESULTS=benchmark/results/stateless_cartpole
SEEDS=${SEEDS:-1 2 3}
MAX_SECONDS=${MAX_SECONDS:-600}
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
mkdir -p $RESULTS/peers runs

common=(--env-id envs:StatelessCartPole-v1 --eval-episodes 100)
ppo=(--learning-rate 1e-3 --ent-coef 0 --no-clip-vloss --norm-obs)

ours() {  # NAME SCRIPT FLAGS...
    local name=$1 script=$2 seed
    shift 2
    for seed in $SEEDS; do
        compgen -G "runs/StatelessCartPole-v1__${name}__${seed}__*/eval.csv" > /dev/null && continue
        "$PYTHON" cleanrl_graph/"$script".py "${common[@]}" "$@" --exp-name "$name" --seed "$seed"
    done
    printf '    python cleanrl_graph/%s.py' "$script" >> $RESULTS/commands.md
    printf ' %q' "${common[@]}" "$@" >> $RESULTS/commands.md
    printf '\n' >> $RESULTS/commands.md
}

peer() {  # PYTHON SCRIPT NAME FLAGS...
    local python=$1 script=$2 name=$3 seed
    shift 3
    for seed in $SEEDS; do
        [ -f "$RESULTS/peers/${name}_$seed.csv" ] && continue
        "$python" benchmark/peers/"$script".py "$@" --seed "$seed" --max-seconds "$MAX_SECONDS" \
            --out "$RESULTS/peers/unfinished.csv"
        mv "$RESULTS/peers/unfinished.csv" "$RESULTS/peers/${name}_$seed.csv"
    done
}

environment() {  # FOLDER REQUIREMENTS -> path of its python, made if missing
    [ -x "$1/bin/python" ] || { "$PYTHON" -m venv "$1" && "$1/bin/python" -m pip install -q -r "$2"; } >&2
    echo "$PWD/$1/bin/python"
}

for part in ${@:-ours peers table}; do
    case $part in
        ours)
            : > $RESULTS/commands.md
            ours frames_16 ppo_framestack "${ppo[@]}" --num-envs 8 --update-epochs 6 --total-timesteps 120000
            ours frames_1 ppo_framestack "${ppo[@]}" --num-envs 8 --update-epochs 6 --total-timesteps 120000 --obs-shifts 0 \
                --action-shifts "" --reward-shifts ""
            # actor and critic share the memory: a small --vf-coef keeps returns of 100 from ruling it
            ours lstm ppo_lstm_sparse "${ppo[@]}" --num-envs 16 --num-steps 32 --lstm-dim 64 --forget-bias 0 --prev-action \
                --vf-coef 0.002 --total-timesteps 130000
            ours gtrxl ppo_gtrxl "${ppo[@]}" --num-envs 16 --num-steps 64 --num-minibatches 8 --memory-length 50 \
                --num-layers 1 --vf-coef 0.002 --total-timesteps 150000
            ;;
        peers)
            rllib=${RLLIB_PYTHON:-$(environment .venv-rllib benchmark/peers/requirements-rllib.txt)}
            sb3=${PEER_PYTHON:-$(environment .venv-peers benchmark/requirements.txt)}
            peer "$sb3" sb3_recurrent_ppo sb3_lstm
            for model in framestack lstm attention; do
                peer "$rllib" rllib_stateless_cartpole rllib_$model --model $model --num-env-runners 0
            done
            ;;
        table)
            "$PYTHON" benchmark/time_to_target.py --target 475 --log-seconds --out $RESULTS/table \
                "ppo_framestack.py, 16 frames=runs/StatelessCartPole-v1__frames_16__*" \
                "ppo_framestack.py, 1 frame (control)=runs/StatelessCartPole-v1__frames_1__*" \
                "ppo_lstm_sparse.py=runs/StatelessCartPole-v1__lstm__*" \
                "ppo_gtrxl.py, memory 50=runs/StatelessCartPole-v1__gtrxl__*" \
                "RLlib, 16 frames=$RESULTS/peers/rllib_framestack_*.csv" \
                "Stable-Baselines3, RecurrentPPO=$RESULTS/peers/sb3_lstm_*.csv" \
                "RLlib, LSTM=$RESULTS/peers/rllib_lstm_*.csv" \
                "RLlib, attention, memory 50=$RESULTS/peers/rllib_attention_*.csv"
            ;;
    esac
done
