"""Every action head learns a task of which the best return is known, in seconds."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import graph_space, train_events, vector

from cleanrl_graph import ppo_graph, services
from cleanrl_graph.services import arguments


class Match(gym.Env):
    """A fresh random target is shown at every one of 4 steps; reward 1 for the action that matches
    it.

    kind: "discrete" (allowed actions in info["action_mask"], the best is the one after that shown),
    "multidiscrete" and "bits" (share of the parts that match), "box" (1 - distance squared),
    "mixed" (all of them in a Dict)."""

    def __init__(self, kind):
        self.kind = kind
        self.observation_space = {
            "discrete": spaces.Discrete(6),
            "multidiscrete": spaces.MultiDiscrete([3, 4, 2]),
            "bits": spaces.MultiBinary(4),
            "box": vector(2),
            "mixed": spaces.Tuple((spaces.Discrete(3), vector(1), spaces.MultiBinary(2))),
        }[kind]
        self.action_space = {
            "discrete": spaces.Discrete(6, start=2),
            "mixed": spaces.Dict(
                a=spaces.Discrete(3), b=spaces.Tuple((vector(1), spaces.MultiBinary(2)))
            ),
        }.get(kind, self.observation_space)

    def draw(self):
        rng = self.np_random
        self.target = {
            "discrete": lambda: int(rng.integers(6)),
            "multidiscrete": lambda: rng.integers([3, 4, 2]),
            "bits": lambda: rng.integers(0, 2, 4).astype(np.int8),
            "box": lambda: rng.uniform(-1, 1, 2).astype(np.float32),
            "mixed": lambda: (
                int(rng.integers(3)),
                rng.uniform(-1, 1, 1).astype(np.float32),
                rng.integers(0, 2, 2).astype(np.int8),
            ),
        }[self.kind]()
        if self.kind != "discrete":
            return self.target, {}
        self.mask = (rng.random(6) < 0.5).astype(np.int8)
        self.mask[(self.target + 1) % 6] = 1
        return self.target, {"action_mask": self.mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return (*self.draw(),)

    def reward(self, action):
        if self.kind == "discrete":
            assert self.mask[action - 2], "a masked action was taken"
            return float(action - 2 == (self.target + 1) % 6)
        if self.kind == "box":
            return 1 - float(((action - self.target) ** 2).sum())
        if self.kind == "mixed":
            (a, b, c), (d, (e, f)) = self.target, (action["a"], action["b"])
            return float((a == d) + 1 - ((b - e) ** 2).sum() + (c == f).mean()) / 3
        return float((np.asarray(action) == self.target).mean())

    def step(self, action):
        reward = self.reward(action)
        self.t += 1
        obs, info = self.draw()
        return obs, reward, self.t == 4, False, info


class Agree(gym.Env):
    """Both parts of the action must agree, and must not be what they were one step before, which is
    not observed: a chain of a uniform first part and its copy earns 3/4 a step; independent parts
    earn 1/4."""

    observation_space, action_space = vector(1), spaces.Tuple([spaces.Discrete(4)] * 2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.last = 0, -1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        reward = float(action[0] == action[1] and action[0] != self.last)
        self.t, self.last = self.t + 1, action[0]
        return np.zeros(1, np.float32), reward, self.t == 16, False, {}


class Delay(gym.Env):
    """A graph in which the first choice of a node is paid in the last of 4 steps only, and the
    episode is truncated."""

    observation_space = spaces.Dict(
        graph=graph_space(features=2),
        action_mask=spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True),
    )
    action_space = spaces.Discrete(5)

    def observe(self):
        num = int(self.np_random.integers(2, 6))
        nodes = np.zeros((num, 2), np.float32)
        self.good = int(self.np_random.integers(num))
        nodes[self.good, 0] = 1
        nodes[:, 1] = self.t / 4
        return {
            "graph": spaces.GraphInstance(nodes, None, None),
            "action_mask": np.ones(num, np.int8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.hits = 0, 0
        return self.observe(), {}

    def step(self, action):
        self.hits += action == self.good
        self.t += 1
        end = self.t == 4
        return self.observe(), float(self.hits) if end else 0.0, end, False, {}


for env in (Match, Agree, Delay):
    gym.register(f"{env.__name__}-v0", entry_point=env)


def learn(tmp_path, env_id, env_kwargs=None, **kwargs):
    """(mean return of the last 200 episodes of training, mean return of 50 greedy episodes)"""
    args = dict(
        total_timesteps=20_000,
        num_envs=16,
        num_steps=32,
        learning_rate=3e-3,
        hidden_dims=(32,),
        gnn_dim=16,
        gnn_layers=1,
        gamma=0.0,
        eval_episodes=50,
        cuda=False,
        run_dir=str(tmp_path),
    )
    args |= {"env_id": env_id, "env_kwargs": env_kwargs or {}, "checkpoint_every": 0}
    rows = services.run(ppo_graph, arguments.args_of(ppo_graph, **args | kwargs))
    returns = [ret for _, ret in train_events(tmp_path)["charts/episodic_return"]]
    return np.mean(returns[-200:]), np.mean([row["return"] for row in rows] or 0.0)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "kind, optimum, threshold",
    [
        slow("discrete", 4, 3.8),
        slow("multidiscrete", 4, 3.7),
        slow("bits", 4, 3.8),
        slow("box", 4, 3.5),
        slow("mixed", 4, 3.5),
    ],
)
def test_flat_heads(tmp_path, kind, optimum, threshold):
    """Discrete with a mask from info, MultiDiscrete, MultiBinary, Box, and a Dict of them."""
    _, greedy = learn(tmp_path, "Match-v0", {"kind": kind})
    assert threshold < greedy <= optimum


@pytest.mark.slow
def test_box_with_state_dependent_std(tmp_path):
    """The standard deviation from the network."""
    assert learn(tmp_path, "Match-v0", {"kind": "box"}, state_dependent_std=True)[1] > 3.7


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_choice_of_a_node(tmp_path, workers):
    """The node with most flagged in-neighbours of a graph with a long-tailed size; the optimum is
    16."""
    sampled, greedy = learn(
        tmp_path, "envs:PoissonGraph-v0", {"num_features": 2}, num_workers=workers
    )
    assert sampled > 10 and greedy > 12


@pytest.mark.slow
@pytest.mark.parametrize("key, stack", [("set", True), ("avail_actions", False)])
def test_choice_of_an_element(tmp_path, key, stack):
    """The element of a set, or of avail_actions, with the largest product with a query; the optimum
    is 1."""
    _, greedy = learn(
        tmp_path,
        "envs:BestOfSet-v0",
        {"key": key, "stack": stack, "max_size": 16},
        total_timesteps=60_000,
        eval_episodes=200,
    )
    assert greedy > 0.85


@pytest.mark.slow
def test_delayed_reward(tmp_path):
    """Credit reaches the first of four choices through GAE; the optimum is 4."""
    assert learn(tmp_path, "Delay-v0", gamma=1.0)[1] > 3.6


@pytest.mark.slow
def test_autoregressive_parts(tmp_path):
    """Parts that must agree at random earn up to 12.25 as a chain, and at most 4.27 if they are
    independent."""
    flags = {"total_timesteps": 40_000, "gamma": 0.9, "ent_coef": 0.02, "eval_episodes": 0}
    bound = 16**2 / (4 * 15)
    assert learn(tmp_path / "chain", "Agree-v0", autoregressive=True, **flags)[0] > 2 * bound
    assert learn(tmp_path / "independent", "Agree-v0", **flags)[0] < 1.3 * bound


@pytest.mark.slow
def test_autoregressive_nodes(tmp_path):
    """Choose a node, then the node that matches it, which independent heads cannot."""
    kwargs = {"num_pairs": 4, "num_colours": 4, "mean_grey": 1}
    bound = gym.make("cleanrl_graph.envs:PairNodes-v0", **kwargs).unwrapped.best_independent_return
    sampled, _ = learn(
        tmp_path,
        "envs:PairNodes-v0",
        kwargs,
        autoregressive=True,
        gamma=0.9,
        ent_coef=0.02,
        total_timesteps=50_000,
        eval_episodes=0,
    )
    assert sampled > 1.5 * bound
