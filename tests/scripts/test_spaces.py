"""Spaces and environments at the edge of what is supported train, or a sentence names them."""

import os

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import make_envs, run, run_folder, small_args, vector

from cleanrl_graph import ppo_framestack, ppo_graph, services


class Samples(gym.Env):
    """Observations are samples; an action that is not in its space is a failure."""

    def __init__(self, observation, action):
        self.observation_space = observation
        self.action_space = action

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.num_steps += 1
        return self.observation_space.sample(), 1.0, False, self.num_steps == 5, {}


def train(tmp_path, observation, action, script=ppo_graph, **flags):
    gym.register("Samples-v0", lambda: Samples(observation, action))
    try:
        return run(tmp_path, script, env_id="Samples-v0", eval_episodes=1, **flags)
    finally:
        del gym.registry["Samples-v0"]


WIDE = {
    "box": spaces.Box(-1, 1, (1000,), np.float32),
    "bits": spaces.MultiBinary(1200),
    "parts": spaces.Tuple([spaces.Discrete(2)] * 1001),
}


@pytest.mark.parametrize("script", [ppo_graph, ppo_framestack])
@pytest.mark.parametrize("name", WIDE)
def test_many_columns(name, script, tmp_path):
    """An action may have more than a thousand of them."""
    train(tmp_path, vector(2), WIDE[name], script)


@pytest.mark.parametrize("action", [spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2))])
def test_a_rollout_is_longer_than_its_rows(action, tmp_path):
    """Actions per node, of which there are fewer than steps in a rollout: most graphs are empty."""

    class Empty(Samples):
        def reset(self, **kwargs):
            super().reset(**kwargs)
            return (), {}

        def step(self, action):
            self.num_steps += 1
            return (), 1.0, False, self.num_steps == 5, {}

    space = spaces.Sequence(vector(2))
    gym.register("Empty-v0", lambda: Empty(space, action))
    try:
        for k, script in enumerate([ppo_graph, ppo_framestack]):
            run(tmp_path / str(k), script, env_id="Empty-v0", eval_episodes=1)
    finally:
        del gym.registry["Empty-v0"]


NARROW = {
    "alone": vector(0),
    "beside": spaces.Dict(a=vector(2), b=vector(0)),
    "nodes": spaces.Graph(vector(0), None),
    "elements": spaces.Sequence(vector(0), stack=True),
}


@pytest.mark.parametrize("norm_obs", [False, True])
@pytest.mark.parametrize("name", NARROW)
def test_leaves_of_width_0(name, norm_obs, tmp_path):
    """They train, normalised too."""
    train(tmp_path, NARROW[name], spaces.Discrete(2), norm_obs=norm_obs)


NOTHING = "there is nothing to choose"
REFUSED = {
    "box": (vector(2), vector(0), NOTHING),
    "tuple": (vector(2), spaces.Tuple(()), NOTHING),
    "dict": (vector(2), spaces.Dict({}), NOTHING),
    "multidiscrete": (vector(2), spaces.MultiDiscrete([]), NOTHING),
    "sequence": (spaces.Sequence(vector(2)), spaces.Sequence(vector(0)), NOTHING),
    "observation": (spaces.Discrete(2**40), spaces.Discrete(2), "leaf 'obs': .* over 10000000"),
    "entries": (spaces.MultiDiscrete([2, 2**40]), spaces.Discrete(2), "leaf 'obs'"),
    "action": (vector(2), spaces.Discrete(2**40), "action space .* over 10000000 options"),
    "no_leaf": (spaces.Dict({}), spaces.Discrete(2), "one must be an input"),
    "no_input": (spaces.Dict(action_mask=spaces.MultiBinary(2)), spaces.Discrete(2), "an input"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_spaces_without_a_network(name, tmp_path):
    """Nothing to choose, or more categories than there is memory for weights: a sentence."""
    observation, action, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        train(tmp_path, observation, action)


def test_names_of_leaves_are_unique():
    """Two inputs that would share a module, and so their statistics, are refused."""
    observation = spaces.Dict({"a.b": vector(2), "a": spaces.Dict(b=vector(3))})
    with pytest.raises(ValueError, match="need different names"):
        make_envs([lambda: Samples(observation, spaces.Discrete(2))])


def test_names_that_look_alike(tmp_path):
    """The keys "a/b" and "a.b" are two inputs."""
    observation = spaces.Dict({"a/b": vector(2), "a": spaces.Dict(b=vector(3))})
    assert len(train(tmp_path, observation, spaces.Discrete(2)).scalars) > 0


def test_one_buffer_of_all_environments():
    """What an environment returned is not what the next one writes into the same array."""

    class Shares(Samples):
        buffer = np.zeros(2, np.float32)

        def reset(self, **kwargs):
            super().reset(**kwargs)
            self.number = self.np_random.random()
            return self.show(), {}

        def step(self, action):
            return self.show(), 0.0, False, False, {}

        def show(self):
            self.buffer[:] = self.number
            return self.buffer

    envs = ppo_graph.Envs([lambda: Shares(vector(2), spaces.Discrete(2))] * 3)
    for step in (envs.reset(0), envs.step([0] * 3)):
        numbers = [[env.number] * 2 for env in envs.envs]
        np.testing.assert_allclose(step.obs.values[0], numbers, rtol=1e-6)


def test_an_environment_that_changes_the_folder(tmp_path, monkeypatch):
    """Log and model stay together, in the folder that was the current one when the run began."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    class Walks(Samples):
        def reset(self, **kwargs):
            os.chdir(tmp_path / "elsewhere")
            return super().reset(**kwargs)

    gym.register("Walks-v0", lambda: Walks(vector(2), spaces.Discrete(2)))
    try:
        flags = {"env_id": "Walks-v0", "run_dir": "runs", "save_model": True, "eval_episodes": 1}
        services.run(ppo_graph, small_args(**flags))
    finally:
        del gym.registry["Walks-v0"]
    assert not list((tmp_path / "elsewhere").iterdir())
    names = {path.name.split(".")[0] for path in run_folder(tmp_path / "runs").iterdir()}
    assert {"events", "model", "eval"} < names


def test_a_layer_that_is_not_known():
    """--gnn is checked by tyro; whoever adds a name there and not in make_conv is told."""
    args = small_args(gnn="gcn")
    leaves = ppo_graph.leaves_of(spaces.Graph(vector(2), None))
    with pytest.raises(ppo_graph.UsageError, match="--gnn gcn: make_conv knows no such layer"):
        ppo_graph.Encoder(leaves, args)
    assert torch.is_tensor(next(ppo_graph.Encoder(leaves, small_args()).parameters()))


def test_integers_of_another_byte_order(tmp_path):
    """They are read as what they are."""
    observation = spaces.Box(0, 1000, (2,), np.dtype(">i4"))
    train(tmp_path, observation, spaces.Discrete(2))


def test_an_environment_that_stops_gradients(tmp_path):
    """What it sets in this process is put back before the networks learn."""

    class Stops(Samples):
        def reset(self, **kwargs):
            torch.set_grad_enabled(False)
            return super().reset(**kwargs)

    gym.register("Stops-v0", lambda: Stops(vector(2), spaces.Discrete(2)))
    try:
        run(tmp_path, env_id="Stops-v0", eval_episodes=1)
    finally:
        del gym.registry["Stops-v0"]
        torch.set_grad_enabled(True)
