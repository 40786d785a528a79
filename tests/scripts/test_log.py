"""Returns and lengths in the log are one value per rollout, however many episodes ended in it;
episodes.csv has each episode, and curves are made of it."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import small_args, train_events, vector

from cleanrl_graph import ppo_graph
from cleanrl_graph.services.plot import find

KINDS = ("return", "length")


class Longer(gym.Env):
    """The next episode is one step longer than the one before. A step earns its number."""

    observation_space, action_space = vector(1), spaces.Discrete(2)
    length = 0

    def observe(self):
        return np.ones(1, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.length += 1
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), self.t, self.t == self.length, False, {}


gym.register("LogLonger-v0", entry_point=Longer)
FLAGS = dict(env_id="LogLonger-v0", num_envs=1, num_steps=6, total_timesteps=54, num_minibatches=1)


def assert_logged(log, returns, lengths):
    """`returns` and `lengths` are step of a rollout -> those of its episodes."""
    for kind, found in zip(KINDS, (returns, lengths)):
        name = f"charts/episodic_{kind}"
        several = {step: numbers for step, numbers in found.items() if len(numbers) > 1}
        assert log[name] == [(step, pytest.approx(np.mean(own))) for step, own in found.items()]
        assert log[f"{name}_min"] == [(step, min(own)) for step, own in several.items()]
        assert log[f"{name}_max"] == [(step, max(own)) for step, own in several.items()]


def test_one_value_a_rollout_alone(tmp_path):
    """A script without services logs the same, and services.plot has a point for each rollout."""
    flags = small_args(run_dir=str(tmp_path), **FLAGS)
    own = {name: getattr(flags, name) for name in ppo_graph.Args.__dataclass_fields__}
    ppo_graph.main(ppo_graph.Args(**own))
    lengths = {6: [1, 2, 3], 12: [4], 18: [5], 24: [6], 30: [7], 36: [8], 48: [9]}
    returns = {step: [n * (n + 1) / 2 for n in own] for step, own in lengths.items()}
    assert_logged(train_events(tmp_path), returns, lengths)
    [curve] = find([str(tmp_path)], 1)
    assert curve.steps.tolist() == list(lengths)
    assert curve.means.tolist() == pytest.approx([np.mean(own) for own in returns.values()])
