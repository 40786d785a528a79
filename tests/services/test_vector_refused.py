"""A VectorEnv that is made and then refused is closed; infos without gymnasium's masks count."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import small_args, vector

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import check
from cleanrl_graph.services.check import UsageError
from cleanrl_graph.services.vector import VectorEnvs, info_of
from cleanrl_graph.services.vector import make as make_vector

closed = []


class Short(gym.Env):
    """Episodes of two steps."""

    observation_space = vector(3)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.left = 2
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(3, np.float32), 1.0, self.left == 0, False, {}


class Closing(SyncVectorEnv):
    """Notes that it was closed."""

    def close(self, **kwargs):
        closed.append(self.num_envs)
        super().close(**kwargs)


class Plain(gym.vector.VectorWrapper):
    """Infos of episodes that end without the masks of those that have them."""

    def step(self, actions):
        obs, reward, terminated, truncated, info = self.env.step(actions)
        every = np.arange(self.num_envs)
        own = {"group": every.astype(str), "eval": {"cost": every + 0.5}}
        return obs, reward, terminated, truncated, own | {"metrics": {"late": 2 * every}}


class Empty(Short):
    """Without an input, which is refused."""

    observation_space = gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(2)})

    def reset(self, seed=None, options=None):
        return {"action_mask": np.ones(2, np.int8)}, {}


def make(num_envs, of=Short, wrong=False):
    return Closing([of] * (num_envs + wrong))


@pytest.mark.parametrize(
    "kwargs, flags, sentence",
    [
        ({"wrong": True}, {}, "num_envs is 3, --num-envs is 2"),
        ({"of": Empty}, {}, "one must be an input"),
        ({}, dict(num_steps=2, num_minibatches=4), "--num-minibatches 4: a rollout"),
    ],
)
def test_one_that_is_refused_is_closed(kwargs, flags, sentence):
    closed.clear()
    args = small_args(num_envs=2, **flags)
    args.env_id, args.env_kwargs = f"{__name__}:make", kwargs
    args.vectorization_mode = "vector_entry_point"
    with pytest.raises(UsageError, match=sentence), check.one_kind(ppo_graph):
        VectorEnvs(ppo_graph, make_vector(args), args)
    assert len(closed) == 1


def test_infos_without_masks_are_those_of_all():
    env = Plain(SyncVectorEnv([Short] * 3, autoreset_mode=AutoresetMode.SAME_STEP))
    envs = VectorEnvs(ppo_graph, env, small_args(num_envs=3))
    envs.reset(1)
    envs.step([0] * 3)
    for i, info in envs.step([0] * 3).infos:
        assert info["group"] == str(i) and info["eval"] == {"cost": i + 0.5}
        assert info["metrics"] == {"late": 2 * i}


def test_what_is_no_array_of_n_is_left_out():
    info = {"group": "all", "eval": np.ones(2), "_lost": np.ones(3, bool), "metrics": np.arange(3)}
    info["_metrics"] = np.array([True, False, True])
    assert info_of(info, 1, 3) == {} and info_of(info, 2, 3) == {"metrics": 2}


GRAPH = gym.spaces.Graph(vector(2), None)
IDS = gym.spaces.Sequence(gym.spaces.Box(0, 9, (), np.int64), stack=True)


class Nodes(Short):
    """Three nodes with ids, or what else a step shows."""

    observation_space = gym.spaces.Dict(graph=GRAPH, node_ids=IDS)
    action_space = gym.spaces.Dict(node=gym.spaces.Discrete(3))

    def __init__(self, num=3, ids=(0, 1, 2)):
        self.num = num
        self.ids = np.array(ids, np.int64)

    def show(self, num, ids):
        nodes = np.zeros((num, 2), np.float32)
        graph = gym.spaces.GraphInstance(nodes, None, np.zeros((0, 2), np.int64))
        return {"graph": graph, "node_ids": ids}

    def reset(self, seed=None, options=None):
        self.left = 3
        return self.show(3, np.arange(3)), {}

    def step(self, action):
        _, *outcome = super().step(action)
        return self.show(self.num, self.ids), *outcome


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (dict(ids=(4, 5, 4)), "leaf 'node_ids', step 1: the id 4 occurs twice"),
        (dict(ids=(1, 2)), "leaf 'node_ids', step 1: 2 rows where 'graph.nodes' has 3"),
        (dict(num=4, ids=(0, 1, 2, 3)), "leaf 'graph.nodes', step 1: 4 rows to choose from"),
        (dict(num=0, ids=()), "leaf 'graph.nodes', step 1: 0 rows to choose from"),
    ],
)
def test_rows_are_checked_as_those_of_single_environments(wrong, sentence):
    """The second environment has something else in its first step."""
    makers = [Nodes, lambda: Nodes(**wrong)]
    env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    envs = VectorEnvs(ppo_graph, env, small_args(num_envs=2))
    envs.reset(1)
    with pytest.raises(UsageError, match=f"env 1, {sentence}"):
        envs.step([{"node": 0}] * 2)


def test_a_last_observation_may_have_no_rows():
    """Only its value is needed. With NEXT_STEP it is among the observations of all."""
    for mode in AutoresetMode:
        makers = [lambda: Nodes(num=0, ids=())] * 2
        env = Last(SyncVectorEnv(makers, autoreset_mode=mode))
        envs = VectorEnvs(ppo_graph, env, small_args(num_envs=2))
        envs.reset(1)
        step = envs.step([{"node": 0}] * 2)
        assert [last.counts["graph.nodes"] for last in step.finals] == [0, 0]


class Last(gym.vector.VectorWrapper):
    """Each episode is cut off after a step."""

    def step(self, actions):
        for env in self.env.envs:
            env.left = 1
        obs, reward, terminated, truncated, info = self.env.step(actions)
        return obs, reward, truncated, terminated, info
