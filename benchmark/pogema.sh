#!/bin/bash
# POGEMA, many robots on grid maps, each robot an agent: trained on random maps and mazes with 8 to 64 robots, tested on the
# 128 tasks of each setting of the benchmark, lifelong and one-shot, also in a warehouse with 192 robots, which is never
# trained on; beside rules and beside the benchmark's raw data, which benchmark/pogema/raw_data.py reads. Ablations on the
# first seed, a quarter of the steps each: no links between robots, no cost-to-go, one reward for all robots. A run is one
# process: 17 to 21 minutes of a core; with four times the steps, on the first seed, too (longer), 76. What is finished is
# never run again, and a run that was stopped goes on from its last checkpoint.
#
#     bash benchmark/pogema.sh [--out DIR] [FLAGS OF run.py]
#     PARTS="ablations scores" SEEDS=1 DATA=../pogema-benchmark bash benchmark/pogema.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=pogema
PARTS=${PARTS:-agents ablations longer scores}
DATA=${DATA:-}  # a clone of Cognitive-AI-Systems/pogema-benchmark, if its raw data are to be read again
export OMP_NUM_THREADS=1

flags="--env-id envs:Pogema-v0 --num-envs 8 --num-steps 64 --num-minibatches 8 --gamma 0.98 --gnn-layers 2 --norm-vloss 1
    --no-clip-vloss --learning-rate 7e-4 --eval-episodes 0 --resume auto"
tasks() {  # JSON: three of four environments are lifelong, one is one-shot; JSON is what all have besides
    local each='"map": ["random", "mazes"], "num_robots": [8, 64], '"${1:-\"link_radius\": 3}"
    echo "--env-kwargs '[{$each}, {$each}, {$each}, {$each, \"task\": \"one-shot\"}]'"
}
train() {  # SEEDS NAME=COMMAND...
    local seeds=$1
    shift
    "$PYTHON" benchmark/run.py --table $TABLE --workers 1 --seeds $seeds "${RUN_FLAGS[@]}" --commands "$@"
}
RUN_FLAGS=("$@")
seeds=(${SEEDS:-1 2 3})
for part in $PARTS; do
    case $part in
        agents) train "${seeds[*]}" "agents=cleanrl_graph/ppo_graph_agents.py $flags --total-timesteps 250000 $(tasks)" ;;
        ablations)
            short="$flags --total-timesteps 60000"
            train "${seeds[0]}" \
                "short=cleanrl_graph/ppo_graph_agents.py $short $(tasks)" \
                "no_links=cleanrl_graph/ppo_graph_agents.py $short $(tasks '"link_radius": 0')" \
                "no_cost=cleanrl_graph/ppo_graph_agents.py $short $(tasks '"link_radius": 3, "cost_to_go": false')" \
                "joint=cleanrl_graph/ppo_graph.py $short $(tasks)" ;;
        longer) train "${seeds[0]}" "longer=cleanrl_graph/ppo_graph_agents.py $flags --total-timesteps 1000000 $(tasks)" ;;
        scores)
            [ -z "$DATA" ] || "$PYTHON" benchmark/pogema/raw_data.py --data "$DATA"
            "$PYTHON" benchmark/pogema/scores.py
            "$PYTHON" benchmark/report.py --table $TABLE --skip --systems \
                "ppo_graph_agents.py=agents_*" "four times the steps=longer_*" "a quarter of the steps=short_*" \
                "no links between robots=no_links_*" \
                "no cost-to-go=no_cost_*" "one reward for all robots=joint_*" --columns steps SPS final \
                --note "The return is the sum over an episode of the robots' mean reward, on tasks of the training. Throughputs:
tables.md. The last three have a quarter of the steps, too." \
                "What limits it: robots that block each other find a way out by chance, greedy ones often none. From 200,000 steps on the return
in training is flat; four times the steps still help in mazes, and with 32 robots on random maps." ;;
    esac
done
