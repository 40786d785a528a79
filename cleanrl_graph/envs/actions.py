"""Cheap synthetic tasks whose actions are edges, one per node, or mixed, each with a known optimum.

BestEdge-v0        choose the edge with the largest feature among those whose ends have the same
colour Colouring-v0       colour all nodes of a tree at once, so that the ends of each edge differ
NeighbourMean-v0   a number for each node at once: the mean of its neighbours' features
NodeAmount-v0      choose a node and the amount that it wants; independent heads cannot solve it

A fresh graph is drawn at every step, but for NodeAmount. The episode terminates after
`episode_length` = T steps.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .toy import LinkGraph, mask_space


class StepsEnv(gym.Env):
    """Episodes of `episode_length` steps; `draw` makes what the next observation shows, `reward`
    the reward."""

    def __init__(self, episode_length):
        self.episode_length = episode_length

    def reset(self, *, seed=None, options=None):
        """Return the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        self.num_steps = 0
        self.draw()
        return self.observation(), {}

    def step(self, action):
        """Return the next observation, reward, terminated, False and {}."""
        reward = float(self.reward(action))
        self.num_steps += 1
        self.draw()
        return self.observation(), reward, self.num_steps >= self.episode_length, False, {}


class BestEdgeEnv(StepsEnv):
    """Choose the allowed edge with the largest feature among those whose ends have the same colour.

    Observation: {"graph": nodes float32 [n, num_colours], the one-hot colour, edges float32 [e, 1]
    in [0, 1], edge_links int64 [e, 2], at least one allowed edge between nodes of one colour;
    "action_mask": {"edge": int8 [e]}}. n is 2 to `max_nodes`, e up to `max_edges`. Action: {"edge":
    index}. Reward 1 for the best edge, otherwise 0: the optimal return is T.
    """

    def __init__(self, max_nodes=10, max_edges=20, num_colours=3, forbidden=0.2, episode_length=8):
        super().__init__(episode_length)
        self.max_nodes, self.max_edges, self.num_colours = max_nodes, max_edges, num_colours
        self.forbidden = forbidden
        graph = spaces.Graph(
            spaces.Box(0, 1, (num_colours,), np.float32), spaces.Box(0, 1, (1,), np.float32)
        )
        self.observation_space = spaces.Dict(
            {"graph": graph, "action_mask": spaces.Dict({"edge": mask_space()})}
        )
        self.action_space = spaces.Dict({"edge": spaces.Discrete(max_edges)})

    def draw(self):
        rng = self.np_random
        num, num_edges = rng.integers(2, self.max_nodes + 1), rng.integers(1, self.max_edges + 1)
        colour = rng.integers(self.num_colours, size=num)
        self.links = rng.integers(num, size=(num_edges, 2))
        self.mask = (rng.random(num_edges) >= self.forbidden).astype(np.int8)
        fits = rng.integers(num_edges)  # one that does
        self.links[fits, 1], self.mask[fits] = (
            rng.choice(np.flatnonzero(colour == colour[self.links[fits, 0]])),
            1,
        )
        self.nodes = np.eye(self.num_colours, dtype=np.float32)[colour]
        self.edges = rng.random((num_edges, 1)).astype(np.float32)
        same = colour[self.links[:, 0]] == colour[self.links[:, 1]]
        self.best = int(np.argmax(self.edges[:, 0] + 2 * (same & (self.mask > 0))))

    def observation(self):
        graph = spaces.GraphInstance(self.nodes, self.edges, self.links)
        return {"graph": graph, "action_mask": {"edge": self.mask}}

    def reward(self, action):
        return action["edge"] == self.best


class ColouringEnv(StepsEnv):
    """Colour all nodes of a tree with two colours, in one action. The root's colour is given, the
    mask allows no other.

    Observation: {"graph": nodes float32 [n, 3] of (is root and has colour 0, is root and has colour
    1, is no root), edge_links int64 [2 (n - 1), 2], both directions; "action_mask": int8 [n, 2]}.
    Trees have 2 to `max_nodes` nodes, at most `depth` edges away from the root. Action: a tuple of
    n colours. Reward: the share of edges whose ends differ; the optimal return is T. It takes
    `depth` rounds of message passing; random colours earn about T / 2.
    """

    def __init__(self, max_nodes=8, depth=2, episode_length=8):
        super().__init__(episode_length)
        self.max_nodes, self.depth = max_nodes, depth
        graph = LinkGraph(spaces.Box(0, 1, (3,), np.float32), edge_space=None)
        self.observation_space = spaces.Dict({"graph": graph, "action_mask": mask_space(2)})
        self.action_space = spaces.Sequence(spaces.Discrete(2))

    def draw(self):
        rng = self.np_random
        num, far, parent = int(rng.integers(2, self.max_nodes + 1)), [0], []
        for _ in range(1, num):
            parent.append(int(rng.choice([i for i, d in enumerate(far) if d < self.depth])))
            far.append(far[parent[-1]] + 1)
        order, colour = rng.permutation(num), int(rng.integers(2))  # node i of the tree is order[i]
        links = np.stack([order[1:], order[np.array(parent)]], 1)
        self.links = np.concatenate([links, links[:, ::-1]])
        self.nodes = np.tile(np.array([0, 0, 1], np.float32), (num, 1))
        self.nodes[order[0]] = np.eye(3)[colour]
        self.mask = np.ones((num, 2), np.int8)
        self.mask[order[0], 1 - colour] = 0
        self.colours = np.empty(num, np.int64)  # the best ones
        self.colours[order] = (np.array(far) + colour) % 2

    def observation(self):
        return {
            "graph": spaces.GraphInstance(self.nodes, None, self.links),
            "action_mask": self.mask,
        }

    def reward(self, action):
        colours = np.array(action)
        return (colours[self.links[:, 0]] != colours[self.links[:, 1]]).mean()


class NeighbourMeanEnv(StepsEnv):
    """A number for each node, in one action: the mean of the features of the nodes with an edge to
    it, 0 if none has.

    Observation: nodes float32 [n, 1] in [-1, 1], edge_links int64 [e, 2], n from 0 to `max_nodes`,
    e up to 3 n. Action: float32 [n, 1]. Reward 1 minus the mean squared error times 4, 1 for an
    empty graph: the optimal return is T, answers that are all 0 earn about 0.5 T.
    """

    def __init__(self, max_nodes=8, episode_length=8):
        super().__init__(episode_length)
        self.max_nodes = max_nodes
        self.observation_space = LinkGraph(spaces.Box(-1, 1, (1,), np.float32), edge_space=None)
        self.action_space = spaces.Sequence(spaces.Box(-1, 1, (1,), np.float32), stack=True)

    def draw(self):
        rng = self.np_random
        num = int(rng.integers(self.max_nodes + 1))
        self.nodes = rng.uniform(-1, 1, (num, 1)).astype(np.float32)
        self.links = rng.integers(max(num, 1), size=(rng.integers(3 * num + 1), 2))
        total = np.bincount(self.links[:, 1], self.nodes[self.links[:, 0], 0], minlength=num)
        self.best = (total / np.bincount(self.links[:, 1], minlength=num).clip(1)).astype(
            np.float32
        )[:, None]

    def observation(self):
        return spaces.GraphInstance(self.nodes, None, self.links)

    def reward(self, action):
        return 1 - 4 * np.square(action - self.best).mean() if len(self.best) else 1.0


class NodeAmountEnv(StepsEnv):
    """Choose a node other than the last one chosen, and the amount that it wants.

    `num_wanting` nodes want an amount each, all of them different ones, and a Poisson number of
    others want none and may not be chosen. The graph stays the same for the whole episode.
    Observation: {"graph": nodes float32 [n, num_amounts + 1], one-hot, the last one for none,
    edge_links int64 [n, 2], drawn at random and without meaning; "action_mask": {"node": int8 [n],
    "amount": int8 [num_amounts], the wanted ones}}. Action: {"node": index, "amount": k}. Reward 1
    if the node wants the amount and is not the one chosen in the step before, which is not
    observed.

    Best returns without memory, as for PairNodes (where it is shown), with K = num_wanting:
    `best_chain_return` = 1 + (T - 1)(1 - 1/K) where the amount depends on the node,
    `best_independent_return` = T^2 / (4 (T - 1)).
    """

    def __init__(self, num_wanting=4, num_amounts=6, mean_others=3, episode_length=8):
        super().__init__(episode_length)
        self.num_wanting, self.num_amounts, self.mean_others = num_wanting, num_amounts, mean_others
        self.best_chain_return = 1 + (episode_length - 1) * (1 - 1 / num_wanting)
        self.best_independent_return = episode_length**2 / (4 * (episode_length - 1))
        masks = spaces.Dict({"node": mask_space(), "amount": spaces.MultiBinary(num_amounts)})
        graph = LinkGraph(spaces.Box(0, 1, (num_amounts + 1,), np.float32), edge_space=None)
        self.observation_space = spaces.Dict({"graph": graph, "action_mask": masks})
        most = num_wanting + 4 * mean_others
        self.action_space = spaces.Dict(
            {"node": spaces.Discrete(most), "amount": spaces.Discrete(num_amounts)}
        )

    def draw(self):
        if self.num_steps:
            return
        rng = self.np_random
        num_others = min(rng.poisson(self.mean_others), 4 * self.mean_others)
        wanted = rng.permutation(self.num_amounts)[: self.num_wanting]
        self.wants = rng.permutation(np.append(wanted, np.full(num_others, self.num_amounts)))
        self.links = rng.integers(len(self.wants), size=(len(self.wants), 2))
        self.mask = (self.wants < self.num_amounts).astype(np.int8)
        self.amounts, self.last = np.isin(np.arange(self.num_amounts), wanted).astype(np.int8), -1

    def observation(self):
        nodes = np.eye(self.num_amounts + 1, dtype=np.float32)[self.wants]
        graph = spaces.GraphInstance(nodes, None, self.links)
        return {
            "graph": graph,
            "action_mask": {"node": self.mask.copy(), "amount": self.amounts.copy()},
        }

    def reward(self, action):
        right = self.wants[action["node"]] == action["amount"] and action["node"] != self.last
        self.last = action["node"]
        return right
