"""An environment may say a number at the end of some episodes alone."""

import csv

import gymnasium as gym
import numpy as np
from helpers import run


class Crossing(gym.Env):
    """Episodes of two steps; each second one has a crash, after so many seconds."""

    observation_space = gym.spaces.Box(0, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    number = -2  # the reset that looks for a mask begins an episode, too

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number += 1
        self.left = 2
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.left -= 1
        name = "crash_after" if self.number % 2 else "speed"
        info = {"metrics": {name: self.number}} if self.left == 0 else {}
        return np.zeros(2, np.float32), 1.0, self.left == 0, False, info


gym.register("Crossing-v0", Crossing)


def test_numbers_of_some_episodes(tmp_path):
    """Each has its column, and the mean is that of the episodes that have it."""
    result = run(tmp_path, env_id="Crossing-v0", num_envs=1, num_steps=8, total_timesteps=16)
    with open(result.folder / "episodes.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["crash_after"] for row in rows] == ["", "1.0", "", "3.0", "", "5.0", "", "7.0"]
    assert [row["speed"] for row in rows] == ["0.0", "", "2.0", "", "4.0", "", "6.0", ""]
    assert result.scalars["charts/crash_after"] == [(8, 2.0), (16, 6.0)]
    assert result.scalars["charts/speed"] == [(8, 1.0), (16, 5.0)]
