"""MPE2's simple_spread (agents that should cover as many landmarks) for --env-id: one action for
all agents at once.

    PYTHONPATH=benchmark/multi_agent python cleanrl_graph/ppo_graph.py \
        --env-id simple_spread:SimpleSpread-v0

The agents are the nodes of a graph with all links among them, a node has what its agent observes,
and the action is a Sequence of one of 5 moves for each. The reward is the mean of the agents'
rewards, all of which is theirs.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from mpe2 import simple_spread_v3


class SimpleSpread(gym.Env):
    """`num_agents` agents and landmarks; episodes of 25 steps are truncated."""

    def __init__(self, num_agents=3):
        self.env = simple_spread_v3.parallel_env(N=num_agents, max_cycles=25)
        self.agents = self.env.possible_agents
        node = self.env.observation_space(self.agents[0])
        self.links = np.argwhere(~np.eye(num_agents, dtype=bool))
        self.observation_space = spaces.Graph(node, None)
        self.action_space = spaces.Sequence(self.env.action_space(self.agents[0]))

    def observe(self, obs):
        return spaces.GraphInstance(
            np.stack([obs[agent] for agent in self.agents]), None, self.links
        )

    def reset(self, *, seed=None, options=None):
        return self.observe(self.env.reset(seed=seed)[0]), {}

    def step(self, actions):
        obs, rewards, terminated, truncated, _ = self.env.step(dict(zip(self.agents, actions)))
        reward = sum(rewards.values()) / len(rewards)
        return self.observe(obs), reward, any(terminated.values()), any(truncated.values()), {}


gym.register("SimpleSpread-v0", entry_point=SimpleSpread)
