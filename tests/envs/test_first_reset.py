"""Services reset each environment once, unseeded, before the training: an error there says so."""

import gymnasium as gym
import pytest
from helpers import small_args

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import check


class Broken(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        raise RuntimeError("the licence has expired")


gym.register("FirstReset-v0", Broken)


def test_an_error_of_the_first_reset_names_it():
    args = small_args(env_id="FirstReset-v0")
    makers = [lambda i=i: check.make_env(ppo_graph, args, i) for i in range(2)]
    with pytest.raises(check.UsageError) as caught:
        check.make_envs(ppo_graph, args, makers, first=4)
    said = str(caught.value)
    words = "env 4, step 0: the first reset, which looks for a mask: RuntimeError: the licence has"
    assert words in said and "raise RuntimeError" in said
