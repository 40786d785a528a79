"""Cheap synthetic tasks whose actions are edges, one per node, or mixed, each with a known optimum.

BestEdge-v0        choose the edge with the largest feature among those whose ends have one colour
Colouring-v0       colour all nodes of a tree at once, so that the ends of each edge differ
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
    """Base of the tasks below: episodes of `episode_length` steps.

    A subclass defines draw(), which draws what the next observation shows; observation(), which
    returns it; and reward(action), the reward for what the last observation showed.
    """

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
        terminated = self.num_steps >= self.episode_length
        self.draw()
        return self.observation(), reward, terminated, False, {}


class BestEdgeEnv(StepsEnv):
    """Choose the allowed edge with the largest feature among those whose ends have the same colour.

    Observation: {"graph": nodes float32 [n, num_colours], the one-hot colour, edges float32 [e, 1]
    in [0, 1], edge_links int64 [e, 2], at least one allowed edge between nodes of one colour;
    "action_mask": {"edge": int8 [e]}}. n is 2 to `max_nodes`, e up to `max_edges`. Action: {"edge":
    index}. Reward 1 for the best edge, otherwise 0: the optimal return is T.
    """

    def __init__(
        self,
        max_nodes=10,
        max_edges=20,
        num_colours=3,
        forbidden=0.2,
        episode_length=8,
    ):
        super().__init__(episode_length)
        self.max_nodes = max_nodes
        self.max_edges = max_edges
        self.num_colours = num_colours
        self.forbidden = forbidden
        node_space = spaces.Box(0, 1, (num_colours,), np.float32)
        edge_space = spaces.Box(0, 1, (1,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "graph": spaces.Graph(node_space, edge_space),
                "action_mask": spaces.Dict({"edge": mask_space()}),
            }
        )
        self.action_space = spaces.Dict({"edge": spaces.Discrete(max_edges)})

    def draw(self):
        rng = self.np_random
        num_nodes = rng.integers(2, self.max_nodes + 1)
        num_edges = rng.integers(1, self.max_edges + 1)
        colour = rng.integers(self.num_colours, size=num_nodes)
        self.links = rng.integers(num_nodes, size=(num_edges, 2))
        is_allowed = rng.random(num_edges) >= self.forbidden
        self.mask = is_allowed.astype(np.int8)

        # At least this edge is allowed, and its ends have the same colour.
        fitting = rng.integers(num_edges)
        source_colour = colour[self.links[fitting, 0]]
        same_colour = np.flatnonzero(colour == source_colour)
        self.links[fitting, 1] = rng.choice(same_colour)
        self.mask[fitting] = 1

        self.nodes = np.eye(self.num_colours, dtype=np.float32)[colour]
        self.edges = rng.random((num_edges, 1)).astype(np.float32)
        source, target = self.links.T
        is_fitting = (colour[source] == colour[target]) & (self.mask > 0)
        score = self.edges[:, 0] + 2 * is_fitting
        self.best = int(np.argmax(score))

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
        self.max_nodes = max_nodes
        self.depth = depth
        node_space = spaces.Box(0, 1, (3,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "graph": LinkGraph(node_space, edge_space=None),
                "action_mask": mask_space(2),
            }
        )
        self.action_space = spaces.Sequence(spaces.Discrete(2))

    def draw(self):
        rng = self.np_random
        num_nodes = int(rng.integers(2, self.max_nodes + 1))
        depths = [0]  # of the root, then of the other nodes
        parents = []  # of the nodes from 1 on
        for _ in range(1, num_nodes):
            possible = [i for i, depth in enumerate(depths) if depth < self.depth]
            parent = int(rng.choice(possible))
            parents.append(parent)
            depths.append(depths[parent] + 1)
        order = rng.permutation(num_nodes)  # node i of the tree is row order[i]
        links = np.stack([order[1:], order[parents]], 1)
        self.links = np.concatenate([links, links[:, ::-1]])

        root = order[0]
        root_colour = int(rng.integers(2))
        self.nodes = np.zeros((num_nodes, 3), np.float32)
        self.nodes[:, 2] = 1
        self.nodes[root, 2] = 0
        self.nodes[root, root_colour] = 1
        self.mask = np.ones((num_nodes, 2), np.int8)
        self.mask[root, 1 - root_colour] = 0
        self.colours = np.empty(num_nodes, np.int64)  # the best ones
        self.colours[order] = (np.array(depths) + root_colour) % 2

    def observation(self):
        graph = spaces.GraphInstance(self.nodes, None, self.links)
        return {"graph": graph, "action_mask": self.mask}

    def reward(self, action):
        colours = np.array(action)
        source, target = self.links.T
        return (colours[source] != colours[target]).mean()


class NeighbourMeanEnv(StepsEnv):
    """A number for each node, in one action: the mean of the features of the nodes with an edge to
    it, 0 if none has.

    Observation: nodes float32 [n, 1] in [-1, 1], edge_links int64 [e, 2], n from 0 to `max_nodes`,
    e up to 3 n. Action: float32 [n, 1]. Reward 1 minus the mean squared error times 4, 1 for an
    empty graph: the optimal return is T, answers that are all 0 earn about 0.37 T.
    """

    def __init__(self, max_nodes=8, episode_length=8):
        super().__init__(episode_length)
        self.max_nodes = max_nodes
        node_space = spaces.Box(-1, 1, (1,), np.float32)
        answer_space = spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space = LinkGraph(node_space, edge_space=None)
        self.action_space = spaces.Sequence(answer_space, stack=True)

    def draw(self):
        rng = self.np_random
        num_nodes = int(rng.integers(self.max_nodes + 1))
        nodes = rng.uniform(-1, 1, (num_nodes, 1))
        self.nodes = nodes.astype(np.float32)
        num_edges = rng.integers(3 * num_nodes + 1)
        self.links = rng.integers(max(num_nodes, 1), size=(num_edges, 2))
        source, target = self.links.T
        total = np.bincount(target, self.nodes[source, 0], minlength=num_nodes)
        count = np.bincount(target, minlength=num_nodes)
        mean = total / count.clip(1)
        self.best = mean.astype(np.float32)[:, None]

    def observation(self):
        return spaces.GraphInstance(self.nodes, None, self.links)

    def reward(self, action):
        if len(self.best) == 0:
            return 1.0
        error = action - self.best
        return 1 - 4 * np.square(error).mean()


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

    def __init__(
        self,
        num_wanting=4,
        num_amounts=6,
        mean_others=3,
        episode_length=8,
    ):
        super().__init__(episode_length)
        self.num_wanting = num_wanting
        self.num_amounts = num_amounts
        self.mean_others = mean_others
        self.best_chain_return = 1 + (episode_length - 1) * (1 - 1 / num_wanting)
        self.best_independent_return = episode_length**2 / (4 * (episode_length - 1))
        node_space = spaces.Box(0, 1, (num_amounts + 1,), np.float32)
        masks = {"node": mask_space(), "amount": spaces.MultiBinary(num_amounts)}
        self.observation_space = spaces.Dict(
            {
                "graph": LinkGraph(node_space, edge_space=None),
                "action_mask": spaces.Dict(masks),
            }
        )
        max_nodes = num_wanting + 4 * mean_others
        self.action_space = spaces.Dict(  # drawn in this order; a dict would be sorted
            [
                ("node", spaces.Discrete(max_nodes)),
                ("amount", spaces.Discrete(num_amounts)),
            ]
        )

    def draw(self):
        if self.num_steps > 0:
            return  # the graph stays the same
        rng = self.np_random
        num_others = rng.poisson(self.mean_others)
        num_others = min(num_others, 4 * self.mean_others)
        wanted = rng.permutation(self.num_amounts)[: self.num_wanting]
        wanted_by_others = np.full(num_others, self.num_amounts)  # none
        self.wants = rng.permutation(np.append(wanted, wanted_by_others))
        num_nodes = len(self.wants)
        self.links = rng.integers(num_nodes, size=(num_nodes, 2))
        wants_any = self.wants < self.num_amounts
        self.mask = wants_any.astype(np.int8)
        self.amounts = np.zeros(self.num_amounts, np.int8)
        self.amounts[wanted] = 1
        self.last = -1

    def observation(self):
        nodes = np.eye(self.num_amounts + 1, dtype=np.float32)[self.wants]
        graph = spaces.GraphInstance(nodes, None, self.links)
        masks = {"node": self.mask.copy(), "amount": self.amounts.copy()}
        return {"graph": graph, "action_mask": masks}

    def reward(self, action):
        node = action["node"]
        wants_it = node < len(self.wants) and self.wants[node] == action["amount"]
        is_another = node != self.last
        self.last = node
        return wants_it and is_another
