"""The travelling salesman by choosing node after node: an environment of benchmark/gnn_tasks.py."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Routes(gym.Env):
    """Visit 3 to `most` cities and return to the first one; the reward is minus the distance."""

    def __init__(self, most=10):
        self.most, self.action_space = most, spaces.Discrete(most)
        self.observation_space = spaces.Dict(
            {
                "graph": spaces.Graph(spaces.Box(-1, 1, (4,)), spaces.Box(0, 2, (1,))),
                "action_mask": spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True),
            }
        )

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.cities = self.np_random.random((self.np_random.integers(3, self.most + 1), 2))
        self.open, self.first, self.at = np.ones(len(self.cities), np.int8), 0, 0
        self.open[0] = 0
        return self.observe(), {}

    def step(self, city):
        before, self.at, self.open[city] = self.at, city, 0
        distance = np.linalg.norm(self.cities[before] - self.cities[city])
        done = not self.open.any()
        if done:
            distance += np.linalg.norm(self.cities[city] - self.cities[self.first])
        return self.observe(), -distance, done, False, {}

    def observe(self):
        marks = np.arange(len(self.cities))[:, None] == [self.at, self.first]
        links = np.argwhere(~np.eye(len(self.cities), dtype=bool))
        lengths = np.linalg.norm(
            self.cities[links[:, 0]] - self.cities[links[:, 1]], axis=1, keepdims=True
        )
        nodes = np.hstack([self.cities, marks]).astype(np.float32)
        mask = self.open if self.open.any() else np.ones_like(self.open)
        return {
            "graph": spaces.GraphInstance(nodes, lengths.astype(np.float32), links),
            "action_mask": mask.copy(),
        }


gym.register("Routes-v0", entry_point=Routes)
