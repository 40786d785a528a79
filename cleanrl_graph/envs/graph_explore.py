"""GraphExplore-v0: walk on a graph of which only the neighbourhood is seen; remembering nodes pays.

`reference_scores()` plays the policies of the table in GraphExploreEnv's docstring: they see what
an agent sees.
"""

from functools import lru_cache

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .toy import LinkGraph, mask_space, starts_of

TASKS = ("visit", "find")
CURRENT, PREVIOUS, DEGREE, TIME, COLOUR = range(5)  # columns of the node features
VISITED = PREVIOUS  # in the map
ID_BOUND = 100_000
RENDER_MODES = (None, "rgb_array")
MAP_SIZE = 400  # pixels


class GraphExploreEnv(gym.Env):
    """Walk on an unknown graph, seeing the own node and its neighbours: visit many nodes, or find
    one.

    The graph, new in every episode: n uniform in `num_nodes`, n points uniform in the unit square,
    linked where two are closer than a radius, and by their minimum spanning tree, which makes it
    connected. The mean degree is 2.9; triangles and dead ends abound. In 64 steps a good agent sees
    about 23% of the nodes.

    Observation, a dict of k rows: the own node first, then its neighbours, in an order that means
    nothing.
        "graph": nodes float32 [k, 4], or [k, 4 + num_colours] with task="find"; edge_links int64
            [2 * (k - 1), 2], the edges of the own node in both directions. Edges between two
            neighbours are not seen: a policy without memory that keeps out of triangles would visit
            0.52 instead of 0.39 (see the table). Node features: 1 for the own node; 1 for the node
            that the last move came from; degree / 4 (of the whole graph); steps taken /
            episode_length, the same in all rows; with task="find" the colour, one-hot, zeros for
            most nodes.
        "node_ids": int64 [k], below 100,000: the name of a node, drawn anew in every episode. It
            tells one node from another and nothing else.
        "action_mask": int8 [k], 0 for the own node and 1 for its neighbours.
        "map", with show_map: the whole graph of n nodes, for a critic that sees more (--critic-only
            map): nodes float32 [n, 4], or [n, 5 + num_colours] with task="find": as above, 1 for a
            visited node instead of the previous one, and for the target; edges in both directions.
    Action: the row of the neighbour to move to. The own row, or one beyond the last, stays put and
    does not raise. Episode end: terminated after `episode_length` steps; task="find" also where the
    target is reached.

    task="visit": reward 1 / episode_length for every move to a node not visited before. The start
        counts as visited, so the return is the fraction of steps that were discoveries; 1 is an
        upper bound.
    task="find": `num_colours` nodes have colours, each another one; one of them is the target and
        the others are decoys. At the first step only, the own node shows the colour of the target.
        Reward 1 for reaching the target, -0.5 for the first move to each decoy, and a cost of 0.5 /
        episode_length per step. The coloured nodes are drawn from those `distance` hops away from
        the start that are on no shortest way to another node (of one spanning tree), so no decoy is
        in the way; where there are too few, they are the nearest ones beyond.

    Reference returns, mean of 1,000 episodes from `reference_scores(1000)`, which takes seconds.
    Standard errors are at most 0.004 for "visit" and 0.03 for "find".

    | policy | memory | visit | find |
    | --- | --- | --- | --- |
    | random walk | none | 0.225 | -0.313 (blind) |
    | non-backtracking walk | none | 0.387 | -0.268 (blind) |
    | non-backtracking walk | the cue | | 0.424 |
    | depth first | the nodes | 0.686 | -0.254 (blind) |
    | depth first | the nodes, the cue | | 0.361 |
    | least recent | the nodes, the cue | 0.645 | 0.502 |
    | nearest frontier | the map, the cue | 0.728 | 0.365 |
    | upper bound | | 1 | 0.964 (the shortest way) |

    "non-backtracking" is about the best policy without memory for task="visit": choosing with
    probability proportional to a power of the degree, from -2 to 2, is no better. What it takes to
    explore is local, each node's own memory of its visits. "least recent" moves to a neighbour
    never visited, else to the one last visited longest ago. "depth first" moves to one never
    visited, else back to where this node was first reached from: the neighbour with the latest
    first visit before this node's own. "nearest frontier" walks the shortest known way to a node
    that was seen and never visited. "blind" does not know the cue and walks to any colour; the
    others walk to the target where they see it and avoid the decoys. Targets are near, so for
    task="find" going deep is no better than going around.

    Args:
        task: "visit" or "find".
        num_nodes: smallest and largest number of nodes of a graph.
        radius_degree: expected number of nodes within the radius around an inner node.
        episode_length: steps.
        num_colours: task="find" only.
        distance: smallest and largest number of hops from the start to a coloured node;
            task="find" only.
        show_map: adds the whole graph to the observation.
        render_mode: None or "rgb_array", a map of what was visited and seen.
    Raises ValueError for an unknown task or render_mode, num_nodes outside 3 to 4096, distances
    below 1, or more colours than a graph has room for.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}

    def __init__(
        self,
        task="visit",
        num_nodes=(100, 400),
        radius_degree=2.5,
        episode_length=64,
        num_colours=4,
        distance=(2, 6),
        show_map=False,
        render_mode=None,
    ):
        if task not in TASKS:
            raise ValueError(f"task is {task!r}; choose one of {TASKS}")
        if render_mode not in RENDER_MODES:
            raise ValueError(f"render_mode is {render_mode!r}; choose one of {RENDER_MODES}")
        low, high = num_nodes
        if not 3 <= low <= high <= 4096:
            raise ValueError(
                f"num_nodes {num_nodes} must be two numbers from 3 to 4096, the smaller one first"
            )
        if radius_degree < 0 or episode_length < 1:
            raise ValueError(
                f"radius_degree {radius_degree} must be at least 0, "
                f"episode_length {episode_length} 1"
            )
        if task == "find" and not (2 <= num_colours < low and 1 <= distance[0] <= distance[1]):
            raise ValueError(
                f"num_colours {num_colours} must be from 2 to below num_nodes[0] = {low}, and "
                f"distance {distance} two numbers from 1 on, the smaller one first"
            )
        self.task = task
        self.num_nodes = (low, high)
        self.radius_degree = radius_degree
        self.episode_length = episode_length
        self.num_colours = num_colours
        self.distance = distance
        self.show_map = show_map
        self.render_mode = render_mode
        self.num_features = COLOUR
        if task == "find":
            self.num_features += num_colours
        node_space = spaces.Box(0, np.inf, (self.num_features,), np.float32)
        id_space = spaces.Box(0, ID_BOUND - 1, (), np.int64)
        self.observation_space = spaces.Dict(
            {
                "graph": LinkGraph(node_space, edge_space=None),
                "node_ids": spaces.Sequence(id_space, stack=True),
                "action_mask": mask_space(),
            }
        )
        if show_map:
            num_columns = self.num_features + (task == "find")
            space = spaces.Box(0, np.inf, (num_columns,), np.float32)
            self.observation_space["map"] = LinkGraph(space, edge_space=None)
        self.action_space = spaces.Discrete(high)

    def _draw_graph(self):
        rng = self.np_random
        low, high = self.num_nodes
        n = int(rng.integers(low, high + 1))
        self.points = rng.random((n, 2))
        ids = rng.choice(ID_BOUND, n, replace=False)
        self.start = int(rng.integers(n))
        linked = geometric_graph(self.points, self.radius_degree)
        source, target = np.divmod(np.flatnonzero(linked), n)  # sorted by source
        degree = np.bincount(source, minlength=n)

        # What is seen from v are rows first_row[v]:first_row[v + 1]: v itself, then its neighbours.
        first_row = starts_of(degree + 1)
        own_row = first_row[:-1]
        rows = np.empty(len(source) + n, np.int64)
        rows[own_row] = np.arange(n)
        rows[np.arange(len(source)) + source + 1] = target
        seer = np.repeat(np.arange(n), degree + 1)
        local_row = np.arange(len(rows)) - own_row[seer]
        # [v, w]: the row of w as seen from v, -1 if it is not visible
        self.place = np.full((n, n), -1, np.int16)
        self.place[seer, rows] = local_row

        self.base = np.zeros((len(rows), self.num_features), np.float32)
        self.base[own_row, CURRENT] = 1
        self.base[:, DEGREE] = degree[rows] / 4
        self.node_ids = ids[rows]
        self.mask = (local_row > 0).astype(np.int8)
        self.colour = {}
        if self.task == "find":
            self._draw_colours(rows)
        self.rows = rows
        self.first_row = first_row.tolist()  # Python integers slice faster
        self.map_links = np.stack((source, target), 1)

    def _draw_colours(self, rows):
        rng = self.np_random
        low, high = self.distance
        self.hops, parent = hops_from(self.start, self.place >= 0)
        # on the way to another node, in a tree of shortest ways
        is_inner = np.zeros(len(parent), bool)
        is_inner[parent] = True
        near = np.flatnonzero((self.hops >= low) & (self.hops <= high) & ~is_inner)
        if len(near) < self.num_colours:
            is_start = self.hops == 0  # the last choice
            order = np.lexsort((self.hops, self.hops < low, is_inner, is_start))
            near = order[: self.num_colours]  # the next ones beyond
        coloured = rng.permutation(near)[: self.num_colours]
        one_hot = np.zeros((len(self.points), self.num_colours), np.float32)
        one_hot[coloured, np.arange(self.num_colours)] = 1
        self.base[:, COLOUR:] = one_hot[rows]
        self.colour = {node: colour for colour, node in enumerate(coloured.tolist())}
        self.cue = int(rng.integers(self.num_colours))
        self.target = int(coloured[self.cue])

    def _observation(self):
        v = self.current
        rows = slice(self.first_row[v], self.first_row[v + 1])
        nodes = self.base[rows].copy()
        nodes[:, TIME] = self.num_steps / self.episode_length
        if self.previous >= 0:
            nodes[self.place[v, self.previous], PREVIOUS] = 1
        if self.num_steps == 0 and self.task == "find":
            nodes[0, COLOUR + self.cue] = 1
        graph = spaces.GraphInstance(nodes, None, star(len(nodes)))
        obs = {"graph": graph, "node_ids": self.node_ids[rows], "action_mask": self.mask[rows]}
        if self.show_map:
            obs["map"] = self._map()
        return obs

    def _map(self):
        nodes = self.base[self.first_row[:-1]]  # as each node sees itself
        nodes[:, CURRENT] = 0
        nodes[self.current, CURRENT] = 1
        nodes[list(self.visited), VISITED] = 1
        nodes[:, TIME] = self.num_steps / self.episode_length
        if self.task == "find":
            is_target = np.zeros((len(nodes), 1), np.float32)
            is_target[self.target] = 1
            nodes = np.hstack((nodes, is_target))
        return spaces.GraphInstance(nodes, None, self.map_links)

    def reset(self, *, seed=None, options=None):
        """Return the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        self._draw_graph()
        self.current = self.start
        self.previous = -1
        self.num_steps = 0
        self.visited = {self.start}
        return self._observation(), {}

    def step(self, action):
        """Return the next observation, the reward, terminated, False and {}."""
        self.num_steps += 1
        terminated = self.num_steps >= self.episode_length
        first = self.first_row[self.current]
        num_rows = self.first_row[self.current + 1] - first
        if 0 < action < num_rows:
            self.previous = self.current
            self.current = int(self.rows[first + action])
        is_new = self.current not in self.visited
        self.visited.add(self.current)
        if self.task == "visit":
            reward = is_new / self.episode_length
        else:
            reward = -0.5 / self.episode_length
            if is_new and self.current == self.target:
                reward += 1.0
                terminated = True
            elif is_new and self.current in self.colour:
                reward -= 0.5
        return self._observation(), reward, terminated, False, {}

    def render(self):
        """The map, uint8 [400, 400, 3]: unseen grey, seen black, visited blue, the start green, the
        agent red, other colours for the coloured nodes. None where render_mode is not "rgb_array"
        or before reset()."""
        if self.render_mode != "rgb_array" or not hasattr(self, "points"):
            return None
        image = np.full((MAP_SIZE, MAP_SIZE, 3), 255, np.uint8)
        position = 8 + self.points * (MAP_SIZE - 16)
        visited = np.array(sorted(self.visited))
        is_visible = self.place >= 0
        seen = is_visible[visited].any(0)
        source, target = np.nonzero(np.triu(is_visible, 1))
        known = np.isin(source, visited) | np.isin(target, visited)
        draw_lines(image, position[source[~known]], position[target[~known]], 225)
        draw_lines(image, position[source[known]], position[target[known]], 120)
        draw_squares(image, position[~seen], (200, 200, 200), 1)
        draw_squares(image, position[seen], (0, 0, 0), 2)
        draw_squares(image, position[visited], (60, 110, 230), 2)
        for node in self.colour:
            colour = (160, 60, 200)
            if node == self.target:
                colour = (240, 150, 0)
            draw_squares(image, position[[node]], colour, 4)
        draw_squares(image, position[[self.start]], (30, 160, 60), 4)
        draw_squares(image, position[[self.current]], (220, 30, 30), 4)
        return image


def draw_lines(image, starts, ends, colour):
    """Draw a line from each of `starts` to each of `ends`, pixels (x, y) float [lines, 2]."""
    share = np.linspace(0, 1, 100)[:, None, None]
    pixels = (starts * share + ends * (1 - share)).astype(int)  # [100, lines, 2]
    image[pixels[:, :, 1], pixels[:, :, 0]] = colour


def draw_squares(image, centres, colour, radius):
    """Draw squares around `centres`, pixels (x, y) float [squares, 2]."""
    for x, y in centres.astype(int):
        image[y - radius : y + radius + 1, x - radius : x + radius + 1] = colour


@lru_cache(maxsize=None)
def star(num):
    """int64 [2 * (num - 1), 2], read-only: the links (0, k) and (k, 0) for k from 1 to num - 1."""
    links = np.zeros((2, num - 1, 2), np.int64)
    links[0, :, 1] = np.arange(1, num)
    links[1, :, 0] = np.arange(1, num)
    links.flags.writeable = False
    return links.reshape(-1, 2)


def geometric_graph(points, radius_degree):
    """bool [n, n], symmetric: pairs of points closer than sqrt(radius_degree / (pi n)), and the
    minimum spanning tree.

    The tree is Boruvka's: every component takes its shortest edge to another, components merge,
    until one is left. All distances must be different, as those of random points are."""
    n = len(points)
    x, y = points.T
    distance = x[:, None] - x
    distance *= distance
    other = y[:, None] - y
    other *= other
    distance += other  # squared
    linked = distance < radius_degree / (np.pi * n)
    nodes = np.arange(n)
    label = nodes  # the component of a node, named by one of its nodes
    while True:
        np.putmask(distance, label[:, None] == label, np.inf)
        nearest = distance.argmin(1)
        length = distance[nodes, nearest]
        shortest = np.full(n, np.inf)  # of a component
        np.minimum.at(shortest, label, length)
        chosen = np.flatnonzero(length == shortest[label])
        neighbour = nearest[chosen]
        linked[chosen, neighbour] = True
        linked[neighbour, chosen] = True
        label = merge_components(label, chosen, neighbour)
        if (label == label[0]).all():
            np.fill_diagonal(linked, False)
            return linked


def merge_components(label, chosen, neighbour):
    """Labels int [n] after each component was linked: node chosen[i] with neighbour[i]."""
    components = np.arange(len(label))
    parent = components.copy()
    parent[label[chosen]] = label[neighbour]
    # Two that chose each other are a cycle: the smaller one becomes the root.
    is_root = (parent[parent] == components) & (components < parent)
    parent = np.where(is_root, components, parent)
    while (parent[parent] != parent).any():
        parent = parent[parent]
    return parent[label]


def hops_from(start, linked):
    """(hops, parent), int [n] each: edges from `start` to each node of a connected graph, linked
    bool [n, n], and the node before it on a shortest way (`start` for itself)."""
    hops = np.full(len(linked), -1)
    parent = np.full(len(linked), start)
    hops[start] = 0
    frontier = np.array([start])
    num_hops = 0
    while len(frontier):
        num_hops += 1
        reached = linked[frontier]  # [frontier, n]
        new = np.flatnonzero(reached.any(0) & (hops < 0))
        hops[new] = num_hops
        parent[new] = frontier[reached[:, new].argmax(0)]
        frontier = new
    return hops, parent


class Explorer:
    """A reference policy that sees what an agent sees and remembers the present episode: see
    reference_scores().

    Call it with an observation for the row to move to; `Explorer` made anew for every episode."""

    def __init__(self, name, rng):
        self.rule = name.removesuffix(", blind")
        self.blind = self.rule != name
        self.rng = rng
        self.cue = None
        self.num_steps = 0
        self.first = {}  # id: step of its first visit
        self.last = {}  # id: step of its last visit
        self.map = {}  # id of a visited node: ids of its neighbours
        self.avoid = set()  # ids of decoys

    def __call__(self, observation):
        nodes = observation["graph"].nodes
        ids = observation["node_ids"].tolist()
        self.remember(nodes, ids)
        rows = list(range(1, len(ids)))
        self.rng.shuffle(rows)
        if self.cue is not None:
            target = self.find_target(rows, nodes, ids)
            if target is not None:
                return target
            safe = [row for row in rows if ids[row] not in self.avoid]
            if safe:
                rows = safe
        return self.follow_rule(rows, nodes, ids)

    def remember(self, nodes, ids):
        """Take note of the own node, ids[0], its neighbours, and the cue if it is shown."""
        if self.num_steps == 0 and nodes[:, COLOUR:].any():
            self.cue = nodes[0, COLOUR:].argmax()
        self.first.setdefault(ids[0], self.num_steps)
        self.last[ids[0]] = self.num_steps
        self.map[ids[0]] = ids[1:]
        self.num_steps += 1

    def find_target(self, rows, nodes, ids):
        """The row of the target, or None; a blind policy takes any new coloured node for it. Other
        coloured nodes will be avoided."""
        for row in rows:
            if not nodes[row, COLOUR:].any():
                continue
            if self.blind:
                if ids[row] not in self.first:
                    return row
            elif nodes[row, COLOUR + self.cue]:
                return row
            else:
                self.avoid.add(ids[row])
        return None

    def follow_rule(self, rows, nodes, ids):
        """The row that the rule chooses among `rows`, which are in random order."""
        if self.rule == "non-backtracking":
            for row in rows:
                if not nodes[row, PREVIOUS]:
                    return row
        if self.rule == "least recent":
            return min(rows, key=lambda row: self.last.get(ids[row], -1))
        if self.rule in ("depth first", "nearest frontier"):
            for row in rows:
                if ids[row] not in self.first:
                    return row
        if self.rule == "depth first":
            before = self.first[ids[0]]
            older = [row for row in rows if self.first[ids[row]] < before]
            if older:
                return max(older, key=lambda row: self.first[ids[row]])
        if self.rule == "nearest frontier":
            step = self.towards_frontier(ids[0])
            if step is not None:
                return ids.index(step)
        return rows[0]

    def towards_frontier(self, own):
        """The neighbour of `own` on a shortest known way to a node never visited, None if there is
        none."""
        queue = [own]
        step_towards = {}  # id of a reached node: the neighbour of `own` that leads to it
        for node in queue:
            for other in self.map[node]:
                if other == own or other in step_towards or other in self.avoid:
                    continue
                step_towards[other] = step_towards.get(node, other)
                if other not in self.first:
                    return step_towards[other]
                queue.append(other)
        return None


POLICIES = {
    "visit": ("random walk", "non-backtracking", "least recent", "depth first", "nearest frontier"),
    "find": (
        "random walk, blind",
        "non-backtracking, blind",
        "depth first, blind",
        "non-backtracking",
        "least recent",
        "depth first",
        "nearest frontier",
    ),
}


def play_episode(env, name, seed=None):
    """The return of one episode of the policy `name` (one of POLICIES[task])."""
    observation, _ = env.reset(seed=seed)
    policy = Explorer(name, np.random.default_rng(seed))
    total = 0.0
    done = False
    while not done:
        action = policy(observation)
        observation, reward, terminated, truncated, _ = env.step(action)
        total += reward
        done = terminated or truncated
    return total


def shortest_way_return(env, seed):
    """The return of walking straight to the target; -0.5 where it is out of reach."""
    env.reset(seed=seed)
    hops = env.hops[env.target]
    if hops > env.episode_length:
        return -0.5
    return 1 - 0.5 * hops / env.episode_length


def reference_scores(num_episodes=200, seed=0, **kwargs):
    """dict policy -> (mean return, standard error) over episodes seeded with seed, seed + 1, ...;
    kwargs of the env.

    Every policy plays the same graphs. "shortest way" (task="find") and "bound" (task="visit") are
    upper bounds."""
    env = GraphExploreEnv(**kwargs)
    seeds = range(seed, seed + num_episodes)
    returns = {}
    for name in POLICIES[env.task]:
        returns[name] = [play_episode(env, name, each) for each in seeds]
    if env.task == "find":
        returns["shortest way"] = [shortest_way_return(env, each) for each in seeds]
    else:
        returns["bound"] = [1.0] * num_episodes
    scores = {}
    for name, values in returns.items():
        error = np.std(values) / np.sqrt(num_episodes)
        scores[name] = (float(np.mean(values)), float(error))
    return scores
