"""graph-jsp-env's disjunctive graph of a job shop for --env-id, as it is: the instance ft06, with
the mask it offers.

    PYTHONPATH=benchmark/third_party python cleanrl_graph/ppo_graph.py \
        --env-id graph_jsp:GraphJsp-v0

Its constructor wants arrays, which --env-kwargs cannot give; so the instance is registered here.
"""

import gymnasium as gym
import numpy as np
from graph_jsp_env.disjunctive_graph_jsp_env import DisjunctiveGraphJspEnv

FT06 = np.array(
    [  # of Fisher and Thompson, 1963: the machines of each job, then the times; optimum 55
        [
            [2, 0, 1, 3, 5, 4],
            [1, 2, 4, 5, 0, 3],
            [2, 3, 5, 0, 1, 4],
            [1, 0, 2, 3, 4, 5],
            [2, 1, 4, 5, 0, 3],
            [1, 3, 5, 0, 4, 2],
        ],
        [
            [1, 3, 6, 7, 3, 6],
            [8, 5, 10, 10, 10, 4],
            [5, 4, 8, 9, 1, 7],
            [5, 5, 5, 3, 8, 9],
            [9, 3, 5, 4, 3, 1],
            [3, 3, 9, 10, 4, 1],
        ],
    ]
)

gym.register(
    "GraphJsp-v0", DisjunctiveGraphJspEnv, kwargs={"jps_instance": FT06, "env_transform": "mask"}
)
