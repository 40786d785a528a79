"""PoissonGraph-v0 as a vector environment.

    gym.make_vec("cleanrl_graph.envs:PoissonGraph-v0", 256, "vector_entry_point")

Graphs, rewards and episodes are those of N single environments with the same seeds.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from .flat import FlatBatch
from .toy import BLOCK, PoissonGraphEnv, starts_of


def rows_from(first, counts):
    """For each k the numbers from first[k] to first[k] + counts[k] - 1, one after the other."""
    return np.arange(counts.sum()) + (first - starts_of(counts)[:-1]).repeat(counts)


class PoissonGraphVectorEnv(VectorEnv):
    """N PoissonGraph-v0 at once, whose arguments `kwargs` are. All episodes have the same length:
    they end together, and a new one begins in the step that ends one.

    Observation: {"graph": FlatBatch, "action_mask": FlatBatch}, see flat.py. Actions: int64 [N].
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}

    def __init__(self, num_envs, **kwargs):
        self.singles = [PoissonGraphEnv(**kwargs) for _ in range(num_envs)]  # each draws its graphs
        single = self.singles[0]
        self.num_envs = num_envs
        self.edges_per_node = single.edges_per_node
        self.episode_length = single.episode_length
        self.single_observation_space = single.observation_space
        self.single_action_space = single.action_space
        self.observation_space = batch_space(single.observation_space, num_envs)
        self.action_space = batch_space(single.action_space, num_envs)
        # Which of the BLOCK observations of each environment is the present one
        self.cursor = BLOCK

    def reset(self, *, seed=None, options=None):
        """Returns the first observations and {}. Environment i has seed + i, or entry i of a
        list."""
        if seed is None:
            self.cursor = min(self.cursor + 1, BLOCK)
        else:
            seeds = seed if isinstance(seed, (list, tuple)) else range(seed, seed + self.num_envs)
            for single, own in zip(self.singles, seeds):
                gym.Env.reset(single, seed=own)
            self.cursor = BLOCK
        self.num_steps = 0
        return self.observation(), {}

    def step(self, actions):
        """Returns the next observations, rewards, terminated, truncated (none is) and {}."""
        first, num_nodes = self.present()
        is_node = (actions >= 0) & (actions < num_nodes)
        reward = (self.best[first + np.where(is_node, actions, 0)] & is_node).astype(float)
        self.cursor += 1
        self.num_steps += 1
        observation = self.observation()
        is_over = self.num_steps >= self.episode_length
        if is_over:
            observation, _ = self.reset()
        terminated = np.full(self.num_envs, is_over)
        return observation, reward, terminated, np.zeros_like(terminated), {}

    def present(self):
        """(first node, number of nodes) of each environment's present graph."""
        own = slice(self.cursor * self.num_envs, (self.cursor + 1) * self.num_envs)
        return self.starts[own], self.sizes[own]

    def observation(self):
        """What the present state shows, as views of the block."""
        if self.cursor == BLOCK:
            self.draw_block()
            self.cursor = 0
        first, num_nodes = self.present()
        begin = first[0]
        end = begin + num_nodes.sum()
        e = self.edges_per_node
        graph = spaces.GraphInstance(self.nodes[begin:end], None, self.links[begin * e : end * e])
        return {
            "graph": FlatBatch(graph, num_nodes, num_nodes * e),
            "action_mask": FlatBatch(self.mask[begin:end], num_nodes),
        }

    def draw_block(self):
        """Draws BLOCK observations of each environment and orders them by steps: those of all
        environments at a step are rows one after the other."""
        for single in self.singles:
            single._draw_block()
        starts = np.array([single.starts for single in self.singles])  # [N, BLOCK + 1]
        sizes = np.diff(starts)
        first = starts[:, :-1] + starts_of(starts[:, -1])[:-1, None]
        first = first.T.ravel()
        self.sizes = sizes.T.ravel()
        self.starts = starts_of(self.sizes)
        e = self.edges_per_node
        rows = rows_from(first, self.sizes)
        edges = rows_from(first * e, self.sizes * e)
        self.nodes = np.concatenate([single.nodes for single in self.singles])[rows]
        self.mask = np.concatenate([single.mask for single in self.singles])[rows]
        self.best = np.concatenate([single.best for single in self.singles])[rows]
        self.links = np.concatenate([single.links for single in self.singles])[edges]
