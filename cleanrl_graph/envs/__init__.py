"""Environments of this project: `gym.make("cleanrl_graph.envs:PoissonGraph-v0")`. An id that
somebody else registered before stays theirs."""

from typing import Any

import gymnasium as gym


def register(env_id: str, entry_point: str, **kwargs: Any) -> None:
    """Makes an environment of this package known to gymnasium."""
    if env_id not in gym.registry:
        if "vector_entry_point" in kwargs:
            kwargs["vector_entry_point"] = f"{__name__}.{kwargs['vector_entry_point']}"
        gym.register(env_id, entry_point=f"{__name__}.{entry_point}", **kwargs)


register("FlexibleJobShop-v0", "flexible_job_shop:FlexibleJobShopEnv")
register("GraphExplore-v0", "graph_explore:GraphExploreEnv")
register("DagSchedule-v0", "dag_schedule:DagScheduleEnv")
register("JobShop-v0", "job_shop:JobShopEnv")
register(
    "PoissonGraph-v0",
    "toy:PoissonGraphEnv",
    vector_entry_point="poisson_graph_vector:PoissonGraphVectorEnv",
)
register("BestOfSet-v0", "toy:BestOfSetEnv")
register(
    "MatchGoal-v0",
    "toy:BestOfSetEnv",
    kwargs={"key": "avail_actions", "max_size": 60, "uniform_sizes": True, "episode_length": 12},
)
register("NearestToMarked-v0", "toy:NearestToMarkedEnv")
register("TSP-v0", "routes:TSPEnv")
register("TSPInsert-v0", "routes:TSPInsertEnv")
register("CVRP-v0", "routes:CVRPEnv")
register("CVRPSavings-v0", "routes:CVRPSavingsEnv")
register(
    "VertexCover-v0",
    "vertex_cover:VertexCoverEnv",
    vector_entry_point="vertex_cover_vector:VertexCoverVectorEnv",
)
register("PairNodes-v0", "toy:PairNodesEnv")
register("SkillGraph-v0", "toy:SkillGraphEnv")
register(
    "StatelessCartPole-v1",
    "memory:StatelessCartPoleEnv",
    vector_entry_point="memory:StatelessCartPoleVectorEnv",
    max_episode_steps=500,
)
register("Courier-v0", "courier:CourierEnv")
register("Crowd-v0", "crowd:CrowdEnv")
register("Recall-v0", "memory:RecallEnv")
register("Recall50-v0", "memory:RecallEnv", kwargs={"length": 50})
register("MemoryLength-v0", "memory:RecallEnv", kwargs={"clock": True})
register("TMaze-v0", "memory:TMazeEnv")
register("LastGraphs-v0", "memory:LastGraphsEnv")
register("TrafficLights-v0", "traffic:TrafficLightsEnv")
register("Atari-v0", "atari:AtariEnv")
register("BestEdge-v0", "actions:BestEdgeEnv")
register("Colouring-v0", "actions:ColouringEnv")
register("NeighbourMean-v0", "actions:NeighbourMeanEnv")
register("NodeAmount-v0", "actions:NodeAmountEnv")
register("VerbObject-v0", "parts:VerbObjectEnv")
register("Switches-v0", "parts:SwitchesEnv")
register("Assign-v0", "parts:AssignEnv")
register("Convoy-v0", "parts:ConvoyEnv")
register("Dials-v0", "parts:DialsEnv")
register("PettingZoo-v0", "petting_zoo:PettingZooEnv")
register("EntityGym-v0", "entities:EntityGymEnv")
register("Pogema-v0", "pogema:PogemaEnv")
