#!/bin/bash
# Environments that nobody of this project wrote: job-shop-lib, MiniGrid, an Atari game and all of POPGym, from PyPI into a
# virtual environment of their own (not into requirements.txt), through the scripts and --env-id. Finished runs are not
# repeated.
#
#     bash benchmark/third_party.sh [FLAGS OF run.py]     # THIRD_PARTY_PYTHON: an interpreter that has the packages
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=third_party
FILES=benchmark/third_party
VENV=.venv-third-party
if [ -z "${THIRD_PARTY_PYTHON:-}" ] && [ ! -f $VENV/installed ]; then
    "$PYTHON" -m venv $VENV
    $VENV/bin/python -m pip install -q -r requirements.txt -r benchmark/requirements.txt -r $FILES/requirements.txt
    $VENV/bin/python -m pip install -q --no-deps -r $FILES/requirements-no-deps.txt  # they ask for an old gymnasium
    touch $VENV/installed
fi
python=${THIRD_PARTY_PYTHON:-$VENV/bin/python}
export PYTHONPATH=$FILES${PYTHONPATH:+:$PYTHONPATH}

commands=(
    "atari=cleanrl_graph/ppo_framestack.py --env-id envs:Atari-v0"
)
popgym=(popgym:popgym-{Autoencode,Battleship}{Easy,Medium,Hard}-v0)
"$python" benchmark/run.py --table $TABLE --seeds 1 "$@" --commands "${commands[@]}"
"$python" benchmark/third_party.py
