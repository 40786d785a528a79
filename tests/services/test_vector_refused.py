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
