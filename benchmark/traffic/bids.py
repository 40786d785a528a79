"""A wrapper of TrafficLights-v0 in which each phase is an agent that bids, `--wrap bids:bids`: the
phase of a light with the highest score is shown. Its score is the number of vehicles that it lets
go, as of the rule greedy, plus BID times its bid. So all phases of all lights have the same
weights, and an untrained policy is the rule with a little noise: noise of a vehicle or more makes
lights change so often that traffic stands still, from which nothing is learned."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from cleanrl_graph.envs.traffic import COLUMN, LIGHT_FEATURES, NUM_SLOTS, PHASE_FEATURES

BID = 0.3  # vehicles; the deviation of the bids is 1 at first
TIE = 0.01  # vehicles for the current phase: of equal scores it stays
NUM_FEATURES = len(PHASE_FEATURES) + len(LIGHT_FEATURES)


class Bids(gym.Wrapper):
    """Observation: "graph", a node for each of p phases, in the order of the programs, with
    PHASE_FEATURES and the LIGHT_FEATURES of its light; an edge from each phase to each other one of
    its light. "node_ids", 0 to p - 1. Action: float32 [p, 1]. info["rewards"] has for each phase
    that of its light."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        node_space = spaces.Box(0, np.inf, (NUM_FEATURES,), np.float32)
        id_space = spaces.Box(0, 2**31 - 1, (), np.int64)
        self.observation_space = spaces.Dict(
            {
                "graph": spaces.Graph(node_space, None),
                "node_ids": spaces.Sequence(id_space, stack=True),
            }
        )
        self.action_space = spaces.Sequence(spaces.Box(-30, 30, (1,), np.float32), stack=True)

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        return self.of_phases(observation), info

    def step(self, action):
        scores = np.full(self.exists.shape, -np.inf)
        scores[self.exists] = self.vehicles + BID * np.ravel(action)
        chosen = scores.argmax(1)
        action = self.slots[np.arange(len(chosen)), chosen]
        observation, reward, terminated, truncated, info = self.env.step(action)
        info["rewards"] = info["rewards"].repeat(self.exists.sum(1))
        return self.of_phases(observation), reward, terminated, truncated, info

    def of_phases(self, observation: dict) -> dict:
        """The observation; keeps for the next action `slots` [n, 8], that of each phase, `exists`
        bool [n, 8] and `vehicles` [p]."""
        nodes = observation["graph"].nodes
        num = len(nodes)
        phases, light = np.split(nodes, [NUM_SLOTS * len(PHASE_FEATURES)], 1)
        phases = phases.reshape(num, NUM_SLOTS, -1)
        light = np.repeat(light[:, None], NUM_SLOTS, 1)
        rows = np.arange(num)[:, None]
        self.slots = np.argsort(self.unwrapped.slots, 1)
        features = np.concatenate([phases, light], 2)[rows, self.slots]
        self.exists = observation["action_mask"].astype(bool)[rows, self.slots]
        features = features[self.exists]
        current = features[:, COLUMN["current"]]
        self.vehicles = 10 * features[:, COLUMN["vehicles_in"]] + TIE * current
        lights = np.nonzero(self.exists)[0]
        is_same = lights[:, None] == lights
        np.fill_diagonal(is_same, False)
        links = np.argwhere(is_same)
        return {
            "graph": spaces.GraphInstance(features, None, links),
            "node_ids": np.arange(len(lights)),
        }


def bids(env: gym.Env) -> gym.Env:
    """The environment, whose phases bid."""
    return Bids(env)
