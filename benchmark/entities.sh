#!/bin/bash
# The examples of entity-gym beside what the comments of enn-trainer's configs/entity-gym/*.ron say (results/beside.csv). Three
# seeds. Tasks of one step share most flags, and those of several steps all but --set-layers (PickMatchingBalls) and
# --activation (Minefield). Minefield and MultiSnake have a third and a twentieth of the published steps. Goes on where it was
# stopped. Needs, beside requirements.txt:
# pip install --no-deps --ignore-requires-python -r benchmark/requirements-entities.txt
#
#     bash benchmark/entities.sh [--out DIR] [FLAGS OF run.py]     # PARTS="short long table" is the default
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=entities

run() { "$PYTHON" benchmark/run.py --table $TABLE --workers 1 --seeds ${SEEDS:-1 2 3} "$@"; }
gym() {  # NAME [KWARGS]: the flags of an example
    local more=${2:+, \"kwargs\": $2}
    echo "cleanrl_graph/ppo_graph.py --env-id envs:EntityGym-v0 --env-kwargs '{\"name\": \"$1\"$more}'"
}
one="--num-envs 16 --num-steps 16 --learning-rate 1e-3 --eval-episodes 500"
rps="--num-envs 16 --num-steps 16 --learning-rate 3e-3 --no-clip-vloss --eval-episodes 2000"  # 31 updates
many="--num-envs 64 --num-steps 32 --learning-rate 1e-3 --norm-obs --eval-episodes 200 --eval-max-steps 1000"

for part in ${PARTS:-short long table}; do
    case $part in
        short)
            hidden="cleanrl_graph/ppo_graph.py --env-id envs:EntityGym-v0"
            hidden+=" --env-kwargs '{\"name\": \"RockPaperScissors\", \"hidden\": true}'"
            run "$@" --commands \
                "rps_critic=$hidden --critic-only hidden --total-timesteps 8000 $rps" \
                "rps=$(gym RockPaperScissors) --total-timesteps 8000 $rps" \
                "count=$(gym Count '{"masked_choices": 2}') --total-timesteps 2000 $one" \
                "hotdog=$(gym NotHotdog) --total-timesteps 33000 $one" \
                "lava=$(gym FloorIsLava) --total-timesteps 33000 $one --wrap relative:Player:x,y" \
                "bandit=$(gym MultiArmedBandit) --total-timesteps 33000 $many"
            ;;
        long)
            balls='{"max_balls": 32, "one_hot": true, "randomize": true}'
            for command in \
                "cherry=$(gym CherryPick) --total-timesteps 54000 $many" \
                "origin=$(gym MoveToOrigin) --total-timesteps 120000 $many" \
                "xor=$(gym Xor) --total-timesteps 120000 ${one/-envs 16/-envs 64} --ent-coef 0.1" \
                "balls=$(gym PickMatchingBalls "$balls") --total-timesteps 500000 $many --set-layers 2" \
                "sweeper=$(gym MineSweeper) --total-timesteps 500000 $many" \
                "minefield=$(gym Minefield) --total-timesteps 1000000 $many --wrap relative:Vehicle:x_pos,y_pos:direction
                    --activation relu" \
                "snake=$(gym MultiSnake '{"num_snakes": 1}') --total-timesteps 500000 $many --wrap relative:SnakeHead:x,y"; do
                case $command in ${ONLY:-}*) run "$@" --commands "$command" ;; esac
            done
            ;;
        table)
            systems=()
            add() {  # PANEL|LABEL=PATTERN, if there are such runs
                if "$PYTHON" benchmark/tables.py $TABLE "${1##*=}" > /dev/null; then systems+=("$1"); fi
            }
            add "RockPaperScissors|ppo_graph.py, --critic-only hidden=rps_critic_*"
            add "RockPaperScissors|ppo_graph.py=rps_E*"
            add "MultiArmedBandit|ppo_graph.py=bandit_*"
            add "NotHotdog|ppo_graph.py=hotdog_*"
            add "Count|ppo_graph.py=count_*"
            add "FloorIsLava|ppo_graph.py, relative=lava_*"
            add "Xor|ppo_graph.py=xor_*"
            add "MoveToOrigin|ppo_graph.py=origin_*"
            add "CherryPick|ppo_graph.py=cherry_*"
            add "PickMatchingBalls|ppo_graph.py=balls_*"
            add "MineSweeper|ppo_graph.py=sweeper_*"
            add "Minefield|ppo_graph.py, relative=minefield_*"
            add "MultiSnake, 1 snake|ppo_graph.py, relative=snake_*"
            "$PYTHON" benchmark/report.py --table $TABLE --beside ../beside.csv --columns steps SPS final greedy \
                --systems "${systems[@]}" \
                --note "Columns return and within: what the comments of enn-trainer's configurations say, and the steps that these
give. A system without such columns is ours, with its own steps." \
                "RockPaperScissors: paper wins half of the time, a return of 1 at most on average; the value, which alone sees the
opponent, explains 1.00 of the returns' variance in the last update, and 0.00 without it. MineSweeper has no published
return. CherryPick was trained for a fifth of the published steps, whose return is of sampled actions.
Greedily MineSweeper stands still in most episodes, which an evaluation says: its return is that of sampled actions.
MultiSnake has a twentieth, Minefield a third of the published steps: its seeds reach 0.98, 0.90 and 0.89. 42 of
the 46 greedy episodes that fail run into a mine."
            ;;
    esac
done
