"""A wrapper of TrafficLights-v0 that takes the roads away: `--wrap no_roads:no_roads`. Lights get
no messages of others, only the readout of all lights of the map."""

import gymnasium as gym
import numpy as np


def no_roads(env: gym.Env) -> gym.Env:
    """The environment, whose graphs have no edges."""
    return gym.wrappers.TransformObservation(env, without_edges, env.observation_space)


def without_edges(obs: dict) -> dict:
    graph = obs["graph"]
    width = graph.edges.shape[1]
    graph = graph._replace(
        edges=np.zeros((0, width), np.float32), edge_links=np.zeros((0, 2), np.int64)
    )
    return obs | {"graph": graph}
