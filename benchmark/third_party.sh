#!/bin/bash
# Environments that nobody of this project wrote: job-shop-lib, graph-jsp-env, MiniGrid, NASim, an Atari game and all of
# POPGym, from PyPI into a virtual environment of their own (not into requirements.txt), through the scripts and --env-id.
# Finished runs are not repeated. It took 12 minutes of one core that other jobs shared.
#
#     bash benchmark/third_party.sh [--out DIR] [FLAGS OF run.py]     # THIRD_PARTY_PYTHON: an interpreter that has the packages
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=third_party
FILES=benchmark/third_party
if [ -z "${THIRD_PARTY_PYTHON:-}" ]; then
    THIRD_PARTY_PYTHON=.venv-third-party/bin/python
    if [ ! -f .venv-third-party/installed ]; then
        "$PYTHON" -m venv .venv-third-party
        $THIRD_PARTY_PYTHON -m pip install -q -r <(grep -v "^matplotlib" requirements.txt) -r $FILES/requirements.txt
        touch .venv-third-party/installed
    fi
fi
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONPATH=$FILES${PYTHONPATH:+:$PYTHONPATH}
run() { "$THIRD_PARTY_PYTHON" benchmark/run.py --table $TABLE --seeds 1 "${options[@]}" "$@"; }

options=("$@")
small="--num-envs 16 --num-steps 64 --learning-rate 1e-3"
commands=(
    "atari=cleanrl_graph/ppo_framestack.py --env-id envs:Atari-v0 --env-kwargs '{\"game\": \"Breakout\"}' --obs-shifts -3:0 --action-shifts '' --reward-shifts '' --hidden-dims --num-envs 8 --num-steps 64 --update-epochs 3 --clip-coef 0.1 --learning-rate 5e-4 --total-timesteps 80000"
    "jobshoplib=cleanrl_graph/ppo_graph.py --env-id job_shop_lib_graphs:JobShopLib-v0 $small --gamma 1 --gae-lambda 0.98 --update-epochs 3 --norm-obs --total-timesteps 40960 --eval-suite la01-10 --eval-samples 0"
    "graphjsp=cleanrl_graph/ppo_graph.py --env-id graph_jsp:GraphJsp-v0 $small --gamma 1 --gae-lambda 0.98 --total-timesteps 102400"
    "minigrid=cleanrl_graph/ppo_lstm_sparse.py --env-id minigrid_wrapped:MiniGridImage-v0 $small --total-timesteps 20480"
    "minigrid=cleanrl_graph/ppo_lstm_sparse.py --env-id minigrid_wrapped:MiniGridDict-v0 $small --total-timesteps 20480"
    "minigrid=cleanrl_graph/ppo_graph.py --env-id minigrid_wrapped:MiniGridFlat-v0 $small --total-timesteps 20480"
    "nasim=cleanrl_graph/ppo_graph.py --env-id nasim:Tiny-v0 --wrap cleanrl_graph.envs.wrappers:PythonInts $small --total-timesteps 40960 --eval-max-steps 2000"
)
run --commands "${commands[@]}"
# all that POPGym registers, one update each
ids=$("$THIRD_PARTY_PYTHON" -c "
import gymnasium, popgym
print(*sorted(f'popgym:{name}' for name in gymnasium.registry if name.startswith('popgym-')))")
run --env-ids $ids --commands \
    "popgym=cleanrl_graph/ppo_lstm_sparse.py --prev-action --num-envs 4 --num-steps 128 --total-timesteps 512 --eval-episodes 0"
"$THIRD_PARTY_PYTHON" benchmark/third_party.py
