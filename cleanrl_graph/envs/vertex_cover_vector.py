"""VertexCover-v0 as a vector environment: N graphs in arrays, which numpy steps together.

    gym.make_vec("cleanrl_graph.envs:VertexCover-v0", 256, "vector_entry_point")

Graphs, rewards and episodes are those of N single environments with the same seeds.
"""

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from .flat import FlatBatch, flat_links
from .vertex_cover import VertexCoverEnv, small_world, test_set

LOW = 2**32 - 1  # the lower half of a word


class Words:
    """Draws what a Generator of PCG64 would, but takes its 64-bit words in blocks, which makes
    single numbers cheap. Nothing else may draw from the generator."""

    def __init__(self, generator):
        self.bits = generator.bit_generator
        self.words = []  # the next one is the last
        self.half = None  # the upper half of a word whose lower half was drawn

    def word(self):
        if not self.words:
            self.words = self.bits.random_raw(256)[::-1].tolist()
        return self.words.pop()

    def half_word(self):
        half = self.half
        if half is not None:
            self.half = None
            return half
        word = self.word()
        self.half = word >> 32
        return word & LOW

    def random(self, num=None):
        """Generator.random."""
        if num is None:
            word = self.words.pop() if self.words else self.word()
            return (word >> 11) * 2.0**-53
        return np.array([self.word() >> 11 for _ in range(num)]) * 2.0**-53

    def integers(self, high):
        """Generator.integers(high), for a `high` of at most 2**32 (Lemire 2019, algorithm 5)."""
        if high == 2**32:
            return self.half_word()
        if high == 1:
            return 0
        product = self.half_word() * high
        while product & LOW < 2**32 % high:
            product = self.half_word() * high
        return product >> 32


class VertexCoverVectorEnv(VectorEnv):
    """N VertexCover-v0 at once; arguments and `info` are those of VertexCoverEnv. A new episode
    begins in the step that ends one.

    Observation: {"graph": FlatBatch, "action_mask": FlatBatch}, see flat.py. Actions: int64 [N].
    step() raises ValueError for a node whose mask is 0.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}

    def __init__(self, num_envs, nodes=(5, 10, 15), instance=None):
        single = VertexCoverEnv(nodes, instance)  # checks the arguments
        self.sizes = single.sizes
        self.instance = instance
        self.words = None  # of each environment
        self.num_envs = num_envs
        self.single_observation_space = single.observation_space
        self.single_action_space = single.action_space
        self.observation_space = batch_space(single.observation_space, num_envs)
        self.action_space = batch_space(single.action_space, num_envs)
        most = max(self.sizes)
        self.num_nodes = np.zeros(num_envs, np.int64)
        self.has_node = np.zeros((num_envs, most), bool)
        self.weights = np.ones((num_envs, most))
        self.upper = np.triu(np.ones((most, most), bool))  # each edge once
        # Edges of the graphs; behind those of a graph is nothing, from node 0 to node 0
        self.edges = np.zeros((2, num_envs, 2 * most), np.int32)
        self.is_edge = np.zeros((num_envs, 2 * most), bool)
        self.left = self.is_edge.copy()  # those that are not covered
        self.cost = np.zeros(num_envs)

    def reset(self, *, seed=None, options=None):
        """Returns the first observations and {}. Environment i has seed + i, or entry i of a list;
        a `reset_mask` in the options is not needed and not read."""
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        if isinstance(seed, (list, tuple)):
            seeds = list(seed)
        if seed is not None or self.words is None:
            self.words = [Words(seeding.np_random(own)[0]) for own in seeds]
        self.begin(np.arange(self.num_envs))
        return self.observation(), {}

    def begin(self, envs):
        """Begins new episodes of these environments."""
        graphs = np.zeros((len(envs), *self.upper.shape), bool)
        for graph, i in zip(graphs, envs.tolist()):
            if self.instance is None:
                words = self.words[i]
                num = self.sizes[words.integers(len(self.sizes))]
                graph[:num, :num] = small_world(words, num)
                weights = words.random(num)
            else:
                edges, weights = test_set(*self.sizes)[self.instance]
                num = len(weights)
                graph[tuple(edges.T)] = True
            self.num_nodes[i] = num
            self.weights[i, :num] = weights
        number, source, target = (graphs & self.upper).nonzero()
        num_edges = np.bincount(number, minlength=len(envs))
        self.is_edge[envs] = np.arange(self.is_edge.shape[1]) < num_edges[:, None]
        env, k = self.is_edge[envs].nonzero()
        self.edges[0, envs[env], k] = source
        self.edges[1, envs[env], k] = target
        self.left[envs] = self.is_edge[envs]
        self.has_node[envs] = np.arange(len(self.upper)) < self.num_nodes[envs, None]
        self.cost[envs] = 0.0

    def step(self, actions):
        """Returns the next observations, rewards, terminated, truncated (none is) and info."""
        everyone = np.arange(self.num_envs)
        covered = self.left & (self.edges == actions[:, None]).any(0)
        chooses = covered.any(1)
        if not chooses.all():
            i = int(chooses.argmin())
            nodes = np.unique(self.edges[:, i, self.left[i]]).tolist()
            raise ValueError(
                f"Env {i}: node {actions[i]} covers no edge: choose one whose action_mask is 1, "
                f"one of {nodes}."
            )
        self.left ^= covered
        weight = self.weights[everyone, actions]
        self.cost += weight
        terminated = ~self.left.any(1)
        info = {}
        ended = np.flatnonzero(terminated)
        if len(ended):
            greedy = np.zeros(self.num_envs)
            greedy[ended] = greedy_costs(
                self.edges[:, ended], self.is_edge[ended], self.weights[ended]
            )
            costs = {"cost": np.where(terminated, self.cost, 0.0), "greedy rule": greedy}
            costs |= {f"_{name}": terminated for name in costs}
            info = {"final_info": {"eval": costs, "_eval": terminated}}
            self.begin(ended)
        return self.observation(), -weight, terminated, np.zeros_like(terminated), info

    def observation(self):
        """What the present state shows."""
        source, target = self.edges[:, self.left]
        num_edges = self.left.sum(1)
        links = flat_links(source, target, num_edges)
        mask = np.zeros(self.has_node.shape, np.int8)
        env = np.arange(self.num_envs).repeat(num_edges)
        mask[env, source] = 1
        mask[env, target] = 1
        nodes = self.weights[self.has_node].astype(np.float32)[:, None]
        num_nodes = self.num_nodes.copy()
        return {
            "graph": FlatBatch(spaces.GraphInstance(nodes, None, links), num_nodes, 2 * num_edges),
            "action_mask": FlatBatch(mask[self.has_node], num_nodes),
        }


def greedy_costs(edges, is_edge, weights):
    """Returns `greedy_cost` of B graphs, float64 [B]: edges [2, B, e], where there are some [B, e],
    weights [B, n]."""
    num_graphs, num_nodes = weights.shape
    graph = np.arange(num_graphs)
    ends = (edges + num_nodes * graph[:, None]).ravel()  # a number for each node of each graph
    left = is_edge.copy()
    costs = np.zeros(num_graphs)
    with np.errstate(divide="ignore"):
        while (is_open := left.any(1)).any():
            twice = np.concatenate([left.ravel(), left.ravel()])  # both ends
            num_edges = np.bincount(ends, twice, weights.size).reshape(weights.shape)
            node = (weights / num_edges).argmin(1)
            costs += weights[graph, node] * is_open
            left &= (edges != node[:, None]).all(0)
    return costs
