#!/bin/bash
# One policy for several tasks: the 4 tasks of SkillGraph with and without --wrap z:skill:4, and PoissonGraph with a list
# of graph sizes: 18 runs of 2 to 7 minutes each on cores that other jobs share.
#
#     bash benchmark/skills.sh [--out DIR] [FLAGS OF run.py]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
TABLE=skills

flags="--num-envs 16 --learning-rate 1e-3 --gnn-layers 2 --gamma 0"  # choices change nothing later
skills="$flags --env-id envs:SkillGraph-v0 --total-timesteps 60000"
z="$skills --wrap z:skill:4 --eval-episodes 200"
list='[{"skill": 0}, {"skill": 1}, {"skill": 2}, {"skill": 3}]'
sizes='[{"mean_nodes": [5], "weights": [1], "episode_length": 8}, {"mean_nodes": [15], "weights": [1], "episode_length": 8}, {"mean_nodes": [45], "weights": [1], "episode_length": 8}]'
"$PYTHON" benchmark/run.py --table $TABLE --seeds ${SEEDS:-1 2 3} "$@" --commands \
    "z_graph=cleanrl_graph/ppo_graph.py $z" \
    "z_stay=cleanrl_graph/ppo_graph.py $z --adv-floor 0.1" \
    "without_z=cleanrl_graph/ppo_graph.py $skills --env-kwargs '$list' --eval-episodes 50" \
    "z_frames=cleanrl_graph/ppo_framestack.py $z --obs-shifts -1:0" \
    "z_lstm=cleanrl_graph/ppo_lstm_sparse.py $z" \
    "z_gtrxl=cleanrl_graph/ppo_gtrxl.py $z --memory-length 8" \
    "sizes=cleanrl_graph/ppo_graph.py $flags --env-id envs:PoissonGraph-v0 --env-kwargs '$sizes' --total-timesteps 100000 --eval-episodes 50"
"$PYTHON" benchmark/report.py --table $TABLE --columns steps final greedy "greedy 0" "greedy 1" "greedy 2" "greedy 3" \
    --reference 8 "optimum" --systems \
    "SkillGraph, 4 tasks|ppo_graph.py=z_graph_*" \
    "SkillGraph, 4 tasks|the same, --adv-floor 0.1=z_stay_*" \
    "SkillGraph, 4 tasks|ppo_graph.py without z=without_z_*" \
    "SkillGraph, 4 tasks|ppo_framestack.py=z_frames_*" \
    "SkillGraph, 4 tasks|ppo_lstm_sparse.py=z_lstm_*" \
    "SkillGraph, 4 tasks|ppo_gtrxl.py=z_gtrxl_*" \
    "PoissonGraph, 3 sizes|list of sizes=sizes_*" \
    --note "SkillGraph with --wrap z:skill:4, or without z as a list of its 4 tasks; PoissonGraph as a list of 3 sizes.
Greedy k is the mean greedy return of the episodes of task k: of z = k (200 episodes altogether), or of entry k of the list
(50 episodes each; PoissonGraph: graphs of 5, 15 and 45 nodes on average). The optimum is 8 everywhere. A policy without z
cannot tell the tasks of SkillGraph apart, and its mean over them is at most 2 (see SkillGraphEnv). Other jobs shared the machine: the minutes say little."
