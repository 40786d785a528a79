"""Environments of this repository. With cleanrl_graph/ on sys.path:
`gym.make("envs:PoissonGraph-v0")`."""

import gymnasium as gym

gym.register("FlexibleJobShop-v0", entry_point=f"{__name__}.flexible_job_shop:FlexibleJobShopEnv")
gym.register("GraphExplore-v0", entry_point=f"{__name__}.graph_explore:GraphExploreEnv")
gym.register("DagSchedule-v0", entry_point=f"{__name__}.dag_schedule:DagScheduleEnv")
gym.register("JobShop-v0", entry_point=f"{__name__}.job_shop:JobShopEnv")
gym.register("PoissonGraph-v0", entry_point=f"{__name__}.toy:PoissonGraphEnv")
gym.register("BestOfSet-v0", entry_point=f"{__name__}.toy:BestOfSetEnv")
gym.register(
    "MatchGoal-v0",
    entry_point=f"{__name__}.toy:BestOfSetEnv",
    kwargs={"key": "avail_actions", "max_size": 60, "uniform_sizes": True, "episode_length": 12},
)
gym.register("PairNodes-v0", entry_point=f"{__name__}.toy:PairNodesEnv")
gym.register("SkillGraph-v0", entry_point=f"{__name__}.toy:SkillGraphEnv")
gym.register(
    "StatelessCartPole-v1",
    entry_point=f"{__name__}.memory:StatelessCartPoleEnv",
    max_episode_steps=500,
)
gym.register("Recall-v0", entry_point=f"{__name__}.memory:RecallEnv")
gym.register("LastGraphs-v0", entry_point=f"{__name__}.memory:LastGraphsEnv")
gym.register("Atari-v0", entry_point=f"{__name__}.atari:AtariEnv")
gym.register("BestEdge-v0", entry_point=f"{__name__}.actions:BestEdgeEnv")
gym.register("Colouring-v0", entry_point=f"{__name__}.actions:ColouringEnv")
gym.register("NeighbourMean-v0", entry_point=f"{__name__}.actions:NeighbourMeanEnv")
gym.register("NodeAmount-v0", entry_point=f"{__name__}.actions:NodeAmountEnv")
