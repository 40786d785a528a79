#!/bin/bash
# One policy for several tasks: the 4 tasks of SkillGraph with and without --agent-z, and PoissonGraph with a list of graph
# sizes: 18 runs of 2 to 7 minutes each on cores that other jobs share.
#
#     bash benchmark/skills.sh [FLAGS OF run.py]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
TABLE=skills

flags="--num-envs 16 --learning-rate 1e-3 --gnn-layers 2 --eval-episodes 50 --gamma 0"  # choices change nothing later
skills="$flags --env-id envs:SkillGraph-v0 --total-timesteps 60000"
list='[{"skill": 0}, {"skill": 1}, {"skill": 2}, {"skill": 3}]'
sizes='[{"mean_nodes": [5], "weights": [1], "episode_length": 8}, {"mean_nodes": [15], "weights": [1], "episode_length": 8}, {"mean_nodes": [45], "weights": [1], "episode_length": 8}]'
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands \
    "with_z=cleanrl_graph/ppo_graph.py $skills --agent-z skill:4" \
    "without_z=cleanrl_graph/ppo_graph.py $skills --env-kwargs '$list'" \
    "frames=cleanrl_graph/ppo_framestack.py $skills --agent-z skill:4 --obs-shifts -1:0" \
    "lstm=cleanrl_graph/ppo_lstm_sparse.py $skills --agent-z skill:4" \
    "gtrxl=cleanrl_graph/ppo_gtrxl.py $skills --agent-z skill:4 --memory-length 8" \
    "sizes=cleanrl_graph/ppo_graph.py $flags --env-id envs:PoissonGraph-v0 --env-kwargs '$sizes' --total-timesteps 100000"
"$PYTHON" benchmark/report.py --table $TABLE --columns steps final greedy "greedy 0" "greedy 1" "greedy 2" "greedy 3" \
    --reference 8 "optimum" --systems \
    "SkillGraph, 4 tasks|ppo_graph.py=with_z_*" \
    "SkillGraph, 4 tasks|the same without z=without_z_*" \
    "SkillGraph, 4 tasks|ppo_framestack.py=frames_*" \
    "SkillGraph, 4 tasks|ppo_lstm_sparse.py=lstm_*" \
    "SkillGraph, 4 tasks|ppo_gtrxl.py=gtrxl_*" \
    "PoissonGraph, 3 sizes|list of sizes=sizes_*" \
    --note "SkillGraph with --agent-z skill:4, or without z as a list of its 4 tasks; PoissonGraph as a list of 3 sizes.
Greedy k is the mean greedy return of 50 episodes of task k: of z = k, or of entry k of the list (PoissonGraph: graphs of
5, 15 and 45 nodes on average). The optimum is 8 everywhere. A policy without z cannot tell the tasks of SkillGraph apart,
and its mean over them is at most 2 (see SkillGraphEnv). Other jobs shared the machine: the minutes say little."
