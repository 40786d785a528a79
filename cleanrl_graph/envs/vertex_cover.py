"""VertexCover-v0: choose nodes until each edge has a chosen end, at the least weight.

The task, its graphs and its test are those of the ICLR 2026 blog post "Using Graph Neural Networks
in Reinforcement Learning: a practical guide" (github.com/alex-schutz/RL-with-GNNs): trained on 5,
10 and 15 nodes, tested on 100 graphs of 20 nodes, on which a cover costs 5.28 at least and 5.56 by
the greedy rule. Costs of policies: see benchmark/results/vertex_cover/table.md.
"""

from functools import lru_cache

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from PIL import Image, ImageDraw

from .toy import LinkGraph, mask_space

TEST_SEED = 1
NUM_TESTS = 100


def draw_below(rng, num):
    """Returns a whole number below `num`, which is below 2**16, drawn as networkx does it: its bits
    are the first ones of bytes, two of which stand in 32 random bits with the lower one first."""
    shift = 16 - num.bit_length()
    drawn = num
    while drawn >= num:
        bits = int(rng.integers(2**32))
        drawn = ((bits & 255) << 8 | bits >> 8 & 255) >> shift
    return drawn


@lru_cache(maxsize=None)
def ring(num_nodes, degree):
    """Returns the edges of a ring in which each node is linked to the `degree` nearest ones, and
    the same as a matrix, a byte of 0 or 1 for each pair of nodes."""
    edges = [
        (i, (i + distance) % num_nodes)
        for distance in range(1, degree // 2 + 1)
        for i in range(num_nodes)
    ]
    is_linked = bytearray(num_nodes**2)
    for i, k in edges:
        is_linked[num_nodes * i + k] = is_linked[num_nodes * k + i] = 1
    return edges, is_linked


def small_world(rng, num_nodes, degree=4, rewired=0.3):
    """Returns a random graph, bool [num_nodes, num_nodes], where two nodes are linked (Watts and
    Strogatz 1998): each node of a ring is linked to the `degree` nearest ones, then each edge gets
    another end with probability `rewired`. Draws as networkx.watts_strogatz_graph(num_nodes,
    degree, rewired, seed=rng) does."""
    edges, is_linked = ring(num_nodes, degree)
    is_linked = is_linked.copy()  # Python reads and writes a bytearray faster than an array
    num_linked = [degree] * num_nodes
    for i, k in edges:
        if rng.random() >= rewired:
            continue
        new = draw_below(rng, num_nodes)
        while new == i or is_linked[num_nodes * i + new]:
            new = draw_below(rng, num_nodes)
            if num_linked[i] == num_nodes - 1:
                break  # it is linked to all others
        else:
            is_linked[num_nodes * i + k] = is_linked[num_nodes * k + i] = 0
            is_linked[num_nodes * i + new] = is_linked[num_nodes * new + i] = 1
            num_linked[k] -= 1
            num_linked[new] += 1
    return np.frombuffer(is_linked, bool).reshape(num_nodes, num_nodes)


def random_instance(rng, num_nodes):
    """Returns (edges [e, 2], each once and sorted, weights [num_nodes] in [0, 1)) of a graph."""
    edges = np.argwhere(np.triu(small_world(rng, num_nodes)))
    return edges, rng.random(num_nodes)


@lru_cache(maxsize=None)
def test_set(num_nodes):
    """Returns the NUM_TESTS fixed instances with so many nodes."""
    rng = np.random.default_rng(TEST_SEED)
    return [random_instance(rng, num_nodes) for _ in range(NUM_TESTS)]


test_set.__test__ = False  # it is none of pytest's


def greedy_cost(edges, weights):
    """Returns the cost of the greedy rule: again and again the node with the least weight for each
    edge that it covers."""
    cost = 0.0
    while len(edges):
        num_edges = np.bincount(edges.ravel(), minlength=len(weights))
        with np.errstate(divide="ignore"):
            node = np.argmin(weights / num_edges)
        cost += float(weights[node])
        edges = edges[(edges != node).all(1)]
    return cost


def suites():
    """Returns dict suite name -> list of VertexCoverEnv keyword arguments, one per test graph."""
    return {
        f"nodes{num}": [{"nodes": (num,), "instance": k} for k in range(NUM_TESTS)]
        for num in (20, 60, 200)
    }


class VertexCoverEnv(gym.Env):
    """Choose nodes, one a step, until each edge has a chosen end: a vertex cover. The return is
    minus the sum of their weights, to be learned with gamma 1.

    A graph is drawn anew in each episode: a small world, see `small_world`, with as many nodes as
    one of `nodes`, each as likely. Weights are uniform in [0, 1).

    Observation: {"graph": nodes float32 [n, 1], the weights; edge_links int64 [2 e, 2], the edges
    that are not covered, in both directions; "action_mask": int8 [n], 1 where a node has such an
    edge}. Action: the index of a node whose mask is 1. Reward: minus its weight. The episode
    terminates when all edges are covered; info["eval"] then has the weight of the cover ("cost")
    and that of the greedy rule, see `greedy_cost`.

    Args:
        nodes: numbers of nodes that graphs have, at least 5.
        instance: None, or the number of the graph of `test_set` that each episode has.
        render_mode: None or "rgb_array": the graph as a ring, chosen nodes red.
    Raises ValueError for such arguments that make no sense, and in step() for a node whose mask is
    0.
    """

    eval_suites = suites()
    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, nodes=(5, 10, 15), instance=None, render_mode=None):
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f'render_mode must be None or "rgb_array", got {render_mode!r}.')
        if not nodes or min(nodes) < 5:
            raise ValueError(f"nodes must be numbers of at least 5, got {nodes!r}.")
        if instance is not None and (len(nodes) > 1 or not 0 <= instance < NUM_TESTS):
            raise ValueError(
                f"instance must be below {NUM_TESTS}, with one number of nodes, got {instance!r} "
                f"with {nodes!r}."
            )
        self.sizes = tuple(nodes)
        self.instance = instance
        self.render_mode = render_mode
        self.edges = None
        node_space = spaces.Box(0, 1, (1,), np.float32)
        self.observation_space = spaces.Dict(
            {"graph": LinkGraph(node_space, edge_space=None), "action_mask": mask_space()}
        )
        self.action_space = spaces.Discrete(max(nodes))
        self.left = np.zeros((0, 2), np.int64)

    def reset(self, *, seed=None, options=None):
        """Returns the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        if self.instance is None:
            size = self.sizes[self.np_random.integers(len(self.sizes))]
            self.edges, self.weights = random_instance(self.np_random, size)
        else:
            self.edges, self.weights = test_set(*self.sizes)[self.instance]
        self.left = self.edges  # those that are not covered
        self.cost = 0.0
        self.chosen = np.zeros(len(self.weights), bool)
        return self.observation(), {}

    def step(self, action):
        """Returns the next observation, the reward, terminated, False, and info, which is {} before
        the end."""
        covered = (self.left == action).any(1)
        if not covered.any():
            raise ValueError(
                f"Node {action} covers no edge: choose one whose action_mask is 1, one of "
                f"{np.unique(self.left).tolist()}."
            )
        self.left = self.left[~covered]
        self.chosen[action] = True
        weight = float(self.weights[action])
        self.cost += weight
        terminated = len(self.left) == 0
        info = {}
        if terminated:
            greedy = greedy_cost(self.edges, self.weights)
            info = {"eval": {"cost": self.cost, "greedy rule": greedy}}
        return self.observation(), -weight, terminated, False, info

    def observation(self):
        """What the present state shows."""
        mask = np.zeros(len(self.weights), np.int8)
        mask[self.left] = 1
        links = np.concatenate([self.left, self.left[:, ::-1]])
        nodes = self.weights[:, None].astype(np.float32)
        return {"graph": spaces.GraphInstance(nodes, None, links), "action_mask": mask}

    def render(self):
        """Returns the graph, uint8 [480, 480, 3]: a node is the larger the more it weighs, and red
        if it is chosen; edges that are covered are light."""
        if self.render_mode != "rgb_array" or self.edges is None:
            return None
        size = 960  # drawn twice as large, for smooth edges
        picture = Image.new("RGB", (size, size), "white")
        pen = ImageDraw.Draw(picture)
        angles = 2 * np.pi * np.arange(len(self.weights)) / len(self.weights)
        places = size / 2 + 0.43 * size * np.stack([np.sin(angles), -np.cos(angles)], 1)
        is_covered = self.chosen[self.edges].any(1)
        for colour, width, edges in (
            ("gainsboro", 4, self.edges[is_covered]),
            ("dimgray", 6, self.edges[~is_covered]),
        ):
            for first, second in places[edges]:
                pen.line([*first, *second], fill=colour, width=width)
        for place, weight, is_chosen in zip(places, self.weights, self.chosen):
            radius = 8 + 28 * weight**0.5
            colour = "crimson" if is_chosen else "cornflowerblue"
            pen.ellipse([*(place - radius), *(place + radius)], colour, "white", 3)
        return np.asarray(picture.resize((size // 2, size // 2), Image.LANCZOS))
