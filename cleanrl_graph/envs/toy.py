"""Cheap synthetic tasks on graphs and sets, each with a known optimum: a few microseconds per step.

PoissonGraph-v0      choose the node with the most flagged in-neighbours; long-tailed graph sizes
BestOfSet-v0         choose the element with the largest dot product with a query; long-tailed sizes
MatchGoal-v0         the same with 1 to 60 `avail_actions`, all sizes as likely, and 12 steps
NearestToMarked-v0   choose the element nearest to a marked one, where the elements are all there is
PairNodes-v0         choose a node, then the node that matches it; independent heads cannot solve it
SkillGraph-v0        choose the node to which a mark points; only the reset options say which mark

Observations of the first four are drawn in blocks and sliced, so an observation is a view of its
block. A choice that is masked, or beyond the last node, earns 0 and does not raise.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

BLOCK = 256  # observations drawn at once


class LinkGraph(spaces.Graph):
    """A graph space without edge features in which graphs may have edges.

    gymnasium's Graph.contains() refuses edge links where there is no edge space.
    """

    def contains(self, x):
        """True if `x` is a GraphInstance of nodes [n, *node shape], edges None and links [e, 2] (or
        None) below n."""
        if self.edge_space is not None:
            return super().contains(x)
        if not isinstance(x, spaces.GraphInstance) or x.edges is not None:
            return False
        if not isinstance(x.nodes, np.ndarray) or x.nodes.ndim == 0:
            return False
        if not all(node in self.node_space for node in x.nodes):
            return False
        links = x.edge_links
        if links is None:
            return True
        if not isinstance(links, np.ndarray) or not np.issubdtype(links.dtype, np.integer):
            return False
        if links.ndim != 2 or links.shape[1] != 2:
            return False
        return links.size == 0 or bool(links.min() >= 0 and links.max() < len(x.nodes))


def mask_space(*shape):
    """The space of a ragged mask: one int8 array [n, *shape] of 0 and 1."""
    return spaces.Sequence(spaces.Box(0, 1, shape, np.int8), stack=True)


def starts_of(sizes):
    """Offsets of segments of the given sizes, [len(sizes) + 1]: segment i is rows
    starts[i]:starts[i + 1]."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def draw_mask(rng, starts, forbidden):
    """int8 [starts[-1]]: 0 with probability `forbidden`, but at least one 1 (uniformly drawn) in
    every segment."""
    mask = rng.random(starts[-1]) >= forbidden
    mask[starts[:-1] + rng.integers(np.diff(starts))] = True
    return mask.astype(np.int8)


def best_of_segment(score, mask, starts):
    """bool [starts[-1]]: the allowed rows whose score is the largest allowed one of their
    segment."""
    score = np.where(mask, score, -np.inf)
    largest = np.maximum.reduceat(score, starts[:-1])
    return score == np.repeat(largest, np.diff(starts))


class BlockEnv(gym.Env):
    """Base of the tasks in which one chooses a best row of a fresh observation at every step.

    A subclass defines _draw_block(), which draws BLOCK observations: `starts` are where the rows of
    each begin, `best` [rows] tells which earn 1; and _observe(start, end), which returns the
    observation of these rows. `cursor` is the number of the present observation in its block.
    """

    cursor = BLOCK

    def reset(self, *, seed=None, options=None):
        """Return the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        self.cursor = BLOCK if seed is not None else min(self.cursor + 1, BLOCK)
        self.num_steps = 0
        return self._observation(), {}

    def step(self, action):
        """Return the next observation, reward 0.0 or 1.0, terminated, False and {}."""
        start = self.starts[self.cursor]
        end = self.starts[self.cursor + 1]
        reward = float(0 <= action < end - start and self.best[start + action])
        self.cursor += 1
        self.num_steps += 1
        terminated = self.num_steps >= self.episode_length
        return self._observation(), reward, terminated, False, {}

    def best_actions(self):
        """Indices of the rows of the present observation that earn 1, int64 [at least one]."""
        start = self.starts[self.cursor]
        end = self.starts[self.cursor + 1]
        return np.flatnonzero(self.best[start:end])

    def _observation(self):
        if self.cursor == BLOCK:
            self._draw_block()
            self.cursor = 0
        return self._observe(self.starts[self.cursor], self.starts[self.cursor + 1])


class PoissonGraphEnv(BlockEnv):
    """Choose the allowed node at which most walks of `hops` edges from flagged nodes end.

    With hops=1 this is the number of incoming edges from flagged nodes (parallel edges and
    self-loops count), with hops=2 the sum of that number over the in-neighbours: `hops` rounds of
    sum message passing show it, the features of the nodes do not. A fresh graph is drawn at every
    step.

    Observation: {"graph": nodes float32 [n, num_features], edge_links int64 [edges_per_node * n, 2]
    of (source, target); "action_mask": int8 [n]}. Feature 0 is the flag (0 or 1), the rest is
    standard normal noise. n is drawn from a mixture of Poisson distributions, clipped to [1,
    max_nodes]. Action: the index of a node. Reward 1 for a best allowed node (there always is one),
    otherwise 0, so the optimal return is exactly `episode_length`. The episode terminates after
    `episode_length` steps.

    Args:
        mean_nodes, weights: means and probabilities of the mixture of sizes.
        max_nodes: the largest graph that is drawn.
        declared_max: the bound of the action space, max_nodes if None; it changes nothing else.
        forbidden: probability that a node is not allowed.
    Raises ValueError if hops is not 1 or 2, the weights do not sum to 1, or declared_max is below
    max_nodes.
    """

    def __init__(
        self,
        mean_nodes=(7, 25, 120),
        weights=(0.9, 0.09, 0.01),
        max_nodes=200,
        edges_per_node=4,
        num_features=8,
        episode_length=16,
        hops=1,
        declared_max=None,
        forbidden=0.2,
    ):
        if hops not in (1, 2):
            raise ValueError(f"hops is {hops}; choose 1 or 2")
        if len(mean_nodes) != len(weights) or not np.isclose(sum(weights), 1):
            raise ValueError(
                f"weights {weights} must be as many as mean_nodes {mean_nodes} and sum to 1"
            )
        if declared_max is not None and declared_max < max_nodes:
            raise ValueError(
                f"declared_max {declared_max} is below max_nodes {max_nodes}; "
                "raise it or lower max_nodes"
            )
        self.mean_nodes = np.asarray(mean_nodes, float)
        self.weights = np.asarray(weights, float)
        self.max_nodes = max_nodes
        self.edges_per_node = edges_per_node
        self.num_features = num_features
        self.episode_length = episode_length
        self.hops = hops
        self.forbidden = forbidden
        node_space = spaces.Box(-np.inf, np.inf, (num_features,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "graph": LinkGraph(node_space, edge_space=None),
                "action_mask": mask_space(),
            }
        )
        self.action_space = spaces.Discrete(declared_max or max_nodes)

    def _draw_block(self):
        rng = self.np_random
        component = rng.choice(len(self.weights), BLOCK, p=self.weights)
        sizes = rng.poisson(self.mean_nodes[component]).clip(1, self.max_nodes)
        self.starts = starts_of(sizes)
        num_nodes = self.starts[-1]
        self.nodes = rng.standard_normal((num_nodes, self.num_features), np.float32)
        flag = rng.random(num_nodes) < 0.5
        self.nodes[:, 0] = flag
        graph_size = np.repeat(sizes, sizes * self.edges_per_node)  # of each edge's graph
        uniform = rng.random((len(graph_size), 2))
        self.links = (uniform * graph_size[:, None]).astype(np.int64)
        self.mask = draw_mask(rng, self.starts, self.forbidden)

        offset = np.repeat(self.starts[:-1], sizes * self.edges_per_node)
        source = self.links[:, 0] + offset
        target = self.links[:, 1] + offset
        count = flag
        for _ in range(self.hops):
            count = np.bincount(target, count[source], minlength=num_nodes)
        self.best = best_of_segment(count, self.mask, self.starts)
        self.starts = self.starts.tolist()  # Python integers slice faster

    def _observe(self, start, end):
        links = self.links[start * self.edges_per_node : end * self.edges_per_node]
        graph = spaces.GraphInstance(self.nodes[start:end], None, links)
        return {"graph": graph, "action_mask": self.mask[start:end]}


class BestOfSetEnv(BlockEnv):
    """Choose the allowed element of a set that has the largest dot product with the query.

    Observation: {key: float32 [n, 4] in [-1, 1], a tuple of n arrays [4] with stack=False; "query":
    float32 [4]; "action_mask": int8 [n]}. With key="avail_actions" every element is allowed and
    there is no mask. n is a rounded lognormal, 1 to max_size: median 5, mean about 8, and 1 in 7%
    of the sets; with uniform_sizes it is uniform. Action: the index of an element. Reward 1 for the
    best allowed element, otherwise 0: the optimal return is exactly `episode_length`. A fresh set
    is drawn at every step; the episode terminates after `episode_length` steps. Raises ValueError
    if key is not "set" or "avail_actions".
    """

    def __init__(
        self,
        max_size=64,
        episode_length=1,
        stack=True,
        key="set",
        forbidden=0.2,
        uniform_sizes=False,
    ):
        if key not in ("set", "avail_actions"):
            raise ValueError(f'key is "{key}"; choose "set" or "avail_actions"')
        self.max_size = max_size
        self.episode_length = episode_length
        self.stack = stack
        self.key = key
        self.forbidden = forbidden if key == "set" else 0.0
        self.uniform_sizes = uniform_sizes
        element = spaces.Box(-1, 1, (4,), np.float32)
        observation = {
            key: spaces.Sequence(element, stack=stack),
            "query": spaces.Box(-1, 1, (4,), np.float32),
        }
        if key == "set":
            observation["action_mask"] = mask_space()
        self.observation_space = spaces.Dict(observation)
        self.action_space = spaces.Discrete(max_size)

    def _draw_block(self):
        rng = self.np_random
        if self.uniform_sizes:
            sizes = rng.integers(1, self.max_size, BLOCK, endpoint=True)
        else:
            sizes = 1 + rng.lognormal(1.5, 1.0, BLOCK).astype(np.int64)
            sizes = sizes.clip(1, self.max_size)
        starts = starts_of(sizes)
        self.elements = rng.uniform(-1, 1, (starts[-1], 4)).astype(np.float32)
        self.queries = rng.uniform(-1, 1, (BLOCK, 4)).astype(np.float32)
        self.mask = draw_mask(rng, starts, self.forbidden)
        query = np.repeat(self.queries, sizes, 0)  # of each element's set
        score = (self.elements * query).sum(1)
        self.best = best_of_segment(score, self.mask, starts)
        self.starts = starts.tolist()

    def _observe(self, start, end):
        elements = self.elements[start:end]
        if not self.stack:
            elements = tuple(elements)
        observation = {self.key: elements, "query": self.queries[self.cursor]}
        if self.key == "set":
            observation["action_mask"] = self.mask[start:end]
        return observation


class NearestToMarkedEnv(BlockEnv):
    """Choose the element of a set that is nearest to the marked one.

    Observation: {"set": float32 [n, 3], the place of each element in a square of side 2 and its
    mark, 1 for one element and 0 for the others; "action_mask": int8 [n], 0 for the marked one}. n
    is uniform from 2 to max_size. Action: the index of an element. Reward 1 for the nearest one,
    otherwise 0: the optimal return is exactly `episode_length`. No feature says how near an element
    is: that takes a comparison with another one. A fresh set is drawn at every step; the episode
    terminates after `episode_length` steps.
    """

    def __init__(self, max_size=16, episode_length=8):
        self.max_size = max_size
        self.episode_length = episode_length
        low = np.array([-1, -1, 0], np.float32)
        element = spaces.Box(low, np.ones(3, np.float32))
        self.observation_space = spaces.Dict(
            {"set": spaces.Sequence(element, stack=True), "action_mask": mask_space()}
        )
        self.action_space = spaces.Discrete(max_size)

    def _draw_block(self):
        rng = self.np_random
        sizes = rng.integers(2, self.max_size, BLOCK, endpoint=True)
        starts = starts_of(sizes)
        self.elements = rng.uniform(-1, 1, (starts[-1], 3)).astype(np.float32)
        marked = starts[:-1] + rng.integers(sizes)
        self.elements[:, 2] = 0
        self.elements[marked, 2] = 1
        self.mask = np.ones(starts[-1], np.int8)
        self.mask[marked] = 0
        offset = self.elements - np.repeat(self.elements[marked], sizes, 0)
        distance = (offset[:, :2].astype(float) ** 2).sum(1)
        self.best = best_of_segment(-distance, self.mask, starts)
        self.starts = starts.tolist()

    def _observe(self, start, end):
        return {"set": self.elements[start:end], "action_mask": self.mask[start:end]}


class PairNodesEnv(gym.Env):
    """Choose a left node other than the last one chosen, then the right node of the same colour.

    The graph holds `num_pairs` pairs of one left and one right node of the same colour, each pair
    of another colour, and a Poisson number of grey nodes that may not be chosen. It stays the same
    for the whole episode.

    Observation: {"graph": nodes float32 [n, num_colours + 2], edge_links int64 [2 * n, 2], drawn at
    random and without meaning; "action_mask": int8 [n, 2], column k for the k-th choice}. Features:
    one-hot colour, is left, is right. Action: (left node, right node). Reward 1 if they match and
    the left node is not the one chosen in the step before (the first step is free). What was chosen
    before is not observed. The episode terminates after `episode_length` = T steps.

    Why independent heads fail. Where the state is fully observed, some deterministic policy is
    optimal, and a deterministic policy needs no dependence between heads. So the last choice is
    hidden here: a policy without memory acts alike at every step of an episode, is paid for not
    repeating itself, and must therefore be random. Let p(k) be its probability of left node k, q(k)
    of right node k given the observation, and K the number of pairs. Per step after the first,
        a chain p(k) q(match | k) earns at most 1 - sum p(k)^2 <= 1 - 1/K (uniform p);
        independent heads earn sum p(k) (1 - p(k)) q(k) <= max p (1 - p) = 1/4, whatever K.
    Best returns with the first step: `best_chain_return` = 1 + (T - 1)(1 - 1/K), 13.5 by default,
    and `best_independent_return` = T^2 / (4 (T - 1)), 4.27 by default. A uniform choice among the
    allowed earns 2.25. Score sampled actions: greedy ones repeat themselves and earn at most 1. A
    policy with memory of its last choice can earn T, with independent heads too. Raises ValueError
    if there are fewer than 2 pairs or steps, or fewer colours than pairs.
    """

    def __init__(self, num_pairs=6, num_colours=8, mean_grey=4, episode_length=16):
        if num_pairs < 2 or episode_length < 2 or num_colours < num_pairs:
            raise ValueError(
                f"num_pairs {num_pairs} and episode_length {episode_length} must be at least 2, "
                f"and num_colours {num_colours} at least num_pairs"
            )
        self.num_pairs = num_pairs
        self.num_colours = num_colours
        self.mean_grey = mean_grey
        self.episode_length = episode_length
        self.max_nodes = 2 * num_pairs + 4 * mean_grey
        self.best_chain_return = 1 + (episode_length - 1) * (1 - 1 / num_pairs)
        self.best_independent_return = episode_length**2 / (4 * (episode_length - 1))
        node_space = spaces.Box(0, 1, (num_colours + 2,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "graph": LinkGraph(node_space, edge_space=None),
                "action_mask": mask_space(2),
            }
        )
        left_space = spaces.Discrete(self.max_nodes)
        right_space = spaces.Discrete(self.max_nodes)
        self.action_space = spaces.Tuple((left_space, right_space))

    def _draw_graph(self):
        rng = self.np_random
        num_pairs = self.num_pairs
        num_grey = min(rng.poisson(self.mean_grey), 4 * self.mean_grey)
        num_nodes = 2 * num_pairs + num_grey
        order = rng.permutation(num_nodes)  # left nodes, then their right nodes, then grey ones
        left = order[:num_pairs]
        right = order[num_pairs : 2 * num_pairs]
        colour = rng.permutation(self.num_colours)[:num_pairs]
        self.nodes = np.zeros((num_nodes, self.num_colours + 2), np.float32)
        self.nodes[left, colour] = 1
        self.nodes[right, colour] = 1
        self.nodes[left, -2] = 1
        self.nodes[right, -1] = 1
        self.links = rng.integers(num_nodes, size=(2 * num_nodes, 2))
        self.mask = self.nodes[:, -2:].astype(np.int8)
        self.match = np.full(num_nodes, -1)
        self.match[left] = right

    def _observation(self):
        graph = spaces.GraphInstance(self.nodes.copy(), None, self.links.copy())
        return {"graph": graph, "action_mask": self.mask.copy()}

    def reset(self, *, seed=None, options=None):
        """Return the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        self._draw_graph()
        self.num_steps = 0
        self.last = -1
        return self._observation(), {}

    def step(self, action):
        """Return the observation (the same in the whole episode), reward 0.0 or 1.0, terminated,
        False and {}."""
        first = int(action[0])
        second = int(action[1])
        is_left = 0 <= first < len(self.match) and self.match[first] >= 0
        reward = float(is_left and second == self.match[first] and first != self.last)
        self.last = first
        self.num_steps += 1
        terminated = self.num_steps >= self.episode_length
        return self._observation(), reward, terminated, False, {}


class SkillGraphEnv(gym.Env):
    """A family of K tasks on the same graphs: task k is to choose the node to which the node with
    mark k points.

    A graph has K to `max_nodes` nodes, of which K carry the marks 0 to K - 1, one each, and every
    node points to one node and is pointed to by one (a random permutation). A fresh graph is drawn
    at every step. The task is that of `reset(options={"z": k})`, else `skill`, else it is drawn
    anew for every episode; the observation does not show it.

    Observation: {"graph": nodes float32 [n, K], the one-hot mark or zeros, edge_links int64 [n, 2]
    of (source, target); "action_mask": int8 [n], all ones}. Action: the index of a node. Reward 1
    for the right node, otherwise 0. The episode terminates after `episode_length` = T steps.

    The optimal return of a policy that knows the task is T. The K right nodes of a graph are
    different ones, so a choice made without knowing task and past rewards is right in one of the K
    tasks at most: the mean return over the tasks is at most `best_blind_return` = T / K, which a
    policy reaches that always plays the same task. Raises ValueError if there are fewer nodes than
    skills, or for a task that does not exist.
    """

    def __init__(self, num_skills=4, max_nodes=8, episode_length=8, skill=None):
        if not 1 <= num_skills <= max_nodes:
            raise ValueError(
                f"num_skills {num_skills} must be at least 1 and at most max_nodes {max_nodes}"
            )
        self.num_skills = num_skills
        self.max_nodes = max_nodes
        self.episode_length = episode_length
        self.always = skill
        self.best_blind_return = episode_length / num_skills
        node_space = spaces.Box(0, 1, (num_skills,), np.float32)
        self.observation_space = spaces.Dict(
            {
                "graph": LinkGraph(node_space, edge_space=None),
                "action_mask": mask_space(),
            }
        )
        self.action_space = spaces.Discrete(max_nodes)

    def _draw_graph(self):
        rng = self.np_random
        num_nodes = int(rng.integers(self.num_skills, self.max_nodes + 1))
        marked = rng.permutation(num_nodes)[: self.num_skills]
        target = rng.permutation(num_nodes)
        self.nodes = np.zeros((num_nodes, self.num_skills), np.float32)
        self.nodes[marked, np.arange(self.num_skills)] = 1
        self.links = np.stack([np.arange(num_nodes), target], 1)
        self.right = target[marked]  # of each task

    def _observation(self):
        graph = spaces.GraphInstance(self.nodes, None, self.links)
        return {"graph": graph, "action_mask": np.ones(len(self.nodes), np.int8)}

    def reset(self, *, seed=None, options=None):
        """Return the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        skill = (options or {}).get("z", self.always)
        if skill is None:
            skill = self.np_random.integers(self.num_skills)
        if not isinstance(skill, (int, np.integer)) or not 0 <= skill < self.num_skills:
            raise ValueError(f"task {skill}: an integer from 0 to {self.num_skills - 1} is needed")
        self.skill = int(skill)
        self._draw_graph()
        self.num_steps = 0
        return self._observation(), {}

    def step(self, action):
        """Return the next observation, reward 0.0 or 1.0, terminated, False and {}."""
        reward = float(action == self.right[self.skill])
        self._draw_graph()
        self.num_steps += 1
        terminated = self.num_steps >= self.episode_length
        return self._observation(), reward, terminated, False, {}
