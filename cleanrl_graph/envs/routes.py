"""TSP-v0, TSPInsert-v0: the shortest tour through all cities. CVRP-v0: the shortest routes of a
vehicle that serves all customers.

Instances are drawn as in Kool et al. 2019 (arXiv:1803.08475), places uniform in the unit square.
`tsp_test_set` and `cvrp_test_set` make the 10,000 instances on which its tables, and those of many
papers since, compare methods (generate_data.py of github.com/wouterkool/attention-learn-to-route
with seed 1234). Its tours of 20 cities are 3.93 long by farthest insertion, 4.50 by nearest
neighbour.
"""

from functools import lru_cache

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from PIL import Image, ImageDraw

from .toy import mask_space

TEST_SEED = 1234
NUM_TESTS = 10_000
NEAREST = 5  # links of a city of TSPInsertEnv
LARGEST = 4  # savings of a customer from which CVRPSavingsEnv lets choose
COLOURS = ["royalblue", "crimson", "seagreen", "darkorange", "purple", "teal", "goldenrod"]
CAPACITIES = {10: 20, 20: 30, 50: 40, 100: 50}  # of the vehicle, by number of customers


@lru_cache(maxsize=None)
def tsp_test_set(num):
    """Returns the places of `num` cities of each test instance, float64 [NUM_TESTS, num, 2]."""
    return np.random.RandomState(TEST_SEED).uniform(size=(NUM_TESTS, num, 2))


@lru_cache(maxsize=None)
def cvrp_test_set(num):
    """Returns places, the depot first, float64 [NUM_TESTS, 1 + num, 2], and demands, of the depot
    0, int64 [NUM_TESTS, 1 + num]."""
    rng = np.random.RandomState(TEST_SEED)
    depots = rng.uniform(size=(NUM_TESTS, 1, 2))
    customers = rng.uniform(size=(NUM_TESTS, num, 2))
    demands = rng.randint(1, 10, size=(NUM_TESTS, num))
    return np.concatenate([depots, customers], 1), np.pad(demands, ((0, 0), (1, 0)))


def distances_of(places):
    """Returns the distances between the places [n, 2], float64 [n, n]."""
    return np.sqrt(((places[:, None] - places) ** 2).sum(2))


def length_of(distances, tour):
    """Returns the length of the way through `tour` and back to its first place."""
    return float(distances[tour, np.roll(tour, -1)].sum())


def nearest_neighbour(distances):
    """Returns the tour that goes on to the nearest city that is left, from city 0."""
    left = distances.copy()
    tour = [0]
    for _ in range(1, len(distances)):
        left[:, tour[-1]] = np.inf
        tour.append(int(left[tour[-1]].argmin()))
    return tour


def farthest_insertion(distances):
    """Returns a tour: again and again it gets the city that is farthest from it, at the place where
    that adds the least (Rosenkrantz, Stearns and Lewis 1977). It begins with the two cities that
    are farthest from each other."""
    tour = [int(city) for city in np.unravel_index(distances.argmax(), distances.shape)]
    to_tour = distances[tour].min(0)
    while len(tour) < len(distances):
        city = int(to_tour.argmax())
        following = np.roll(tour, -1)
        added = distances[tour, city] + distances[city, following] - distances[tour, following]
        tour.insert(int(added.argmin()) + 1, city)
        to_tour = np.minimum(to_tour, distances[city])
    return tour


def insert_by_regret(distances, tour, left):
    """Returns `tour` with the cities `left` inserted, each at the place where it makes the tour
    longer by the least; next comes always the one that would suffer most from the second best
    place."""
    tour, left = list(tour), list(left)
    while left:
        source = np.array(tour)
        target = np.roll(source, -1)
        rows = distances[left]
        added = rows[:, source] + rows[:, target] - distances[source, target]
        next_one = 0
        if len(tour) > 2:  # else both places are the same
            best_two = np.partition(added, 1, 1)
            next_one = int((best_two[:, 1] - best_two[:, 0]).argmax())
        tour.insert(int(added[next_one].argmin()) + 1, left.pop(next_one))
    return tour


def merge_by_savings(distances, demands, capacity, routes):
    """Returns `routes`, lists of customers, merged by the rule of Clarke and Wright 1964: again and
    again it links those ends of two routes for which that saves most of the ways from and to the
    depot, as long as the vehicle can carry what both need."""
    routes = [list(route) for route in routes]
    ends = np.unique([end for route in routes for end in (route[0], route[-1])])
    saved = distances[0, ends][:, None] + distances[0, ends] - distances[ends][:, ends]
    first, second = np.triu_indices(len(ends), 1)
    order = np.argsort(-saved[first, second], kind="stable")
    route_of = {end: route for route in routes for end in (route[0], route[-1])}
    load_of = {id(route): int(demands[route].sum()) for route in routes}
    for a, b in zip(ends[first[order]].tolist(), ends[second[order]].tolist()):
        one, other = route_of.get(a), route_of.get(b)
        if one is None or other is None or one is other:
            continue
        load = load_of[id(one)] + load_of[id(other)]
        if load > capacity:
            continue
        for end in (a, b):
            del route_of[end]
        merged = link(one, a, other, b)
        route_of[merged[0]] = route_of[merged[-1]] = merged
        load_of[id(merged)] = load
        routes = [route for route in routes if route is not one and route is not other] + [merged]
    return routes


def link(one, a, other, b):
    """Returns the route in which `b`, an end of the route `other`, follows `a`, an end of `one`."""
    one = one if one[-1] == a else one[::-1]
    return one + (other if other[0] == b else other[::-1])


def length_of_routes(distances, routes):
    """Returns the length of the ways of all `routes` from the depot and back to it."""
    way = [place for route in routes for place in (0, *route)] + [0]
    return float(distances[way[:-1], way[1:]].sum())


def convex_hull(places):
    """Returns the corners of the convex hull of the places [n, 2], counterclockwise (Andrew's
    monotone chain)."""
    x, y = places.T.tolist()
    order = np.lexsort((places[:, 1], places[:, 0])).tolist()
    hull = []
    for half in (order, order[::-1]):  # the lower one, then the upper one
        chain = []
        for c in half:
            while len(chain) > 1:
                a, b = chain[-2:]
                if (x[b] - x[a]) * (y[c] - y[a]) > (y[b] - y[a]) * (x[c] - x[a]):
                    break  # a turn to the left
                chain.pop()
            chain.append(c)
        hull += chain[:-1]
    return hull


def suites(name):
    """Returns dict suite name -> list of keyword arguments, one per test instance: all of 20, and
    the first 1,000 of others."""
    return {
        f"{name}{num}": [{name: (num,), "instance": k} for k in range(count)]
        for num, count in ((20, NUM_TESTS), (50, 1000), (100, 1000))
    }


@lru_cache(maxsize=None)
def links_of(num):
    """Returns the links of each of `num` nodes with each other one, int64 [num (num - 1), 2], and
    their places in a matrix [num, num], bool."""
    other = ~np.eye(num, dtype=bool)
    return np.stack(np.nonzero(other), 1), other


class RouteEnv(gym.Env):
    """What the tasks share: places, the way so far, the graph of what is left, the picture.

    A subclass has `num_features` of a node beside the six that all have and defines draw(), which
    returns the places [n, 2] of a new instance, the first one being where the route begins.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}
    num_features = 0
    num_edge_features = 1

    def __init__(self, sizes, instance, render_mode):
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f'render_mode must be None or "rgb_array", got {render_mode!r}.')
        if instance is not None and (len(sizes) > 1 or not 0 <= instance < NUM_TESTS):
            raise ValueError(
                f"instance must be below {NUM_TESTS}, with one size, got {instance!r} "
                f"with {sizes!r}."
            )
        self.sizes = tuple(sizes)
        self.instance = instance
        self.render_mode = render_mode
        self.route = None
        node_space = spaces.Box(-np.inf, np.inf, (6 + self.num_features,), np.float32)
        edge_space = spaces.Box(-np.inf, np.inf, (self.num_edge_features,), np.float32)
        self.observation_space = spaces.Dict(
            {"graph": spaces.Graph(node_space, edge_space), "action_mask": mask_space()}
        )
        self.shown, self.mask = np.zeros(0, int), np.zeros(0, np.int8)

    def reset(self, *, seed=None, options=None):
        """Returns the first observation and {}. A seed fixes everything that follows."""
        super().reset(seed=seed)
        self.places = self.draw(int(self.sizes[self.np_random.integers(len(self.sizes))]))
        self.distances = distances_of(self.places)
        self.route = [0]
        self.left = np.arange(1, len(self.places))  # places that are still to be visited
        return self.observation(), {}

    def place_of(self, action):
        """Returns the place that row `action` of the last observation shows."""
        if not 0 <= action < len(self.shown) or not self.mask[action]:
            raise ValueError(
                f"Row {action} cannot be chosen: choose one whose action_mask is 1, one of "
                f"{np.flatnonzero(self.mask).tolist()}."
            )
        return int(self.shown[action])

    def go_to(self, place):
        """Goes there, and home from the last place. Returns minus the length of this way."""
        way = self.distances[self.route[-1], place]
        self.route.append(place)
        self.left = self.left[self.left != place]
        if not len(self.left):
            way += self.distances[place, 0]
            self.route.append(0)
        return -float(way)

    def graph(self):
        """The place where the route is, its first one and those that are left, each linked with
        each other one. Sets `shown` [n], the place of each row."""
        now = self.route[-1]
        begin = [now] if now == 0 else [now, 0]
        self.shown = np.concatenate([begin, self.left])
        distances = self.distances[self.shown[:, None], self.shown]
        nodes = np.zeros((len(self.shown), 6 + self.num_features), np.float32)
        nodes[:, :2] = self.places[self.shown] - self.places[now]
        nodes[:, 2] = distances[0]
        nodes[:, 3] = distances[len(begin) - 1]
        nodes[0, 4] = 1
        nodes[len(begin) - 1, 5] = 1
        links, is_link = links_of(len(self.shown))
        edges = distances[is_link][:, None].astype(np.float32)
        return spaces.GraphInstance(nodes, edges, links.copy())

    def render(self):
        """Returns the places and the way so far, uint8 [480, 480, 3]: each tour from the first
        place (a square) has a colour of its own."""
        if self.render_mode != "rgb_array" or self.route is None:
            return None
        size = 960  # drawn twice as large, for smooth lines
        picture = Image.new("RGB", (size, size), "white")
        pen = ImageDraw.Draw(picture)
        at = size * (0.05 + 0.9 * self.places)
        tour = 0
        for source, target in zip(self.route, self.route[1:]):
            pen.line([*at[source], *at[target]], fill=COLOURS[tour % len(COLOURS)], width=8)
            tour += target == self.route[0]
        for place, (x, y) in enumerate(at):
            radius = 16 if place in (self.route[0], self.route[-1]) else 11
            box = [x - radius, y - radius, x + radius, y + radius]
            if place == self.route[0]:
                pen.rectangle(box, "black")
            else:
                is_left = place in self.left
                pen.ellipse(box, "white" if is_left else "dimgray", "dimgray", 4)
        return np.asarray(picture.resize((size // 2, size // 2), Image.LANCZOS))


class TSPEnv(RouteEnv):
    """The travelling salesman: go to the cities in any order, and back. The return is minus the
    length of the tour, to be learned with gamma 1.

    Cities are drawn anew in each episode, uniform in the unit square; there are as many as one of
    `cities`, each as likely.

    Observation: {"graph": the city where one is, the first one (unless that is the same) and those
    that are left, as nodes float32 [n, 6]: x and y as seen from where one is, the distances to
    where one is and to the first city, 1 for where one is, 1 for the first city; each is linked
    with each other one, edges float32 [n (n - 1), 1]: the distance; "action_mask": int8 [n], 1 for
    those that are left}. What is visited is no longer shown: an episode of n cities has graphs of n
    nodes and less. Action: a row whose mask is 1, the next city. Reward: minus the distance to it,
    with the last one also that back to the first. The episode terminates then; info["eval"] has the
    length of the tour and that of the nearest neighbour rule.

    Args:
        cities: numbers of cities that instances have, at least 2.
        instance: None, or the number of the instance of `tsp_test_set` that each episode has.
        render_mode: None or "rgb_array".
    Raises ValueError for arguments that make no sense, and in step() for a row whose mask is 0.
    """

    eval_suites = suites("cities")

    def __init__(self, cities=(20,), instance=None, render_mode=None):
        if not cities or min(cities) < 2:
            raise ValueError(f"cities must be numbers of at least 2, got {cities!r}.")
        super().__init__(cities, instance, render_mode)
        self.action_space = spaces.Discrete(max(cities))

    def draw(self, num):
        if self.instance is not None:
            return tsp_test_set(num)[self.instance]
        return self.np_random.random((num, 2))

    def observation(self):
        """What the present state shows."""
        graph = self.graph()
        self.mask = np.ones(len(self.shown), np.int8)
        self.mask[: len(self.shown) - len(self.left)] = 0
        return {"graph": graph, "action_mask": self.mask}

    def step(self, action):
        """Returns the next observation, the reward, terminated, False, and info, which is {} before
        the end."""
        reward = self.go_to(self.place_of(action))
        terminated = len(self.left) == 0
        info = {}
        if terminated:
            rule = nearest_neighbour(self.distances)
            info = {
                "eval": {
                    "length": length_of(self.distances, self.route[:-1]),
                    "nearest neighbour": length_of(self.distances, rule),
                }
            }
        return self.observation(), reward, terminated, False, info


class TSPInsertEnv(TSPEnv):
    """The travelling salesman by insertion, as in Dai et al. 2017 (arXiv:1704.01665): an action
    chooses a city, which comes into the tour where that makes it longer by the least. It begins
    with the convex hull of the cities, whose corners an optimal tour visits in their order. The
    return is by how many percent the tour is shorter than that of a rule, `insert_by_regret`, to be
    learned with gamma 1.

    Cities are drawn as those of `TSPEnv`.

    Observation: {"graph": all cities as nodes float32 [n, 8]: x and y from the middle of the
    square, 1 for those of the tour, the share of cities that it has, and, where a city is not in
    it, by how much it would make it longer, by how much more at the second best place, the
    distances to the nearest city of the tour and to the nearest other one that is not in it; each
    is linked with its `NEAREST` nearest ones, those of the tour with the next ones, those that are
    not in it with the two between which they would come and with those that change what they add,
    all both ways, edges float32 [e, 4]: half the distance, 1 if it is a part of the tour, by how
    much the first one's addition changes if the second one comes first, and the reverse;
    "action_mask": int8 [n], 1 for those that are not in the tour}. Lengths, but for x and y, are
    multiples of 1 / sqrt(n), so that many cities look like few. Action: a city whose mask is 1.
    Reward: by how much shorter the tour gets by this choice if the rule inserts the others, as
    percent of the length by the rule alone. The episode terminates when all are in the tour;
    info["eval"] has its length and that by the rule.

    Args: those of `TSPEnv`. Raises the same.
    """

    num_features = 2
    num_edge_features = 4

    def reset(self, *, seed=None, options=None):
        """Returns the first observation and {}. A seed fixes everything that follows."""
        gym.Env.reset(self, seed=seed)
        self.places = self.draw(int(self.sizes[self.np_random.integers(len(self.sizes))]))
        self.distances = distances_of(self.places)
        num = len(self.places)
        self.shown = np.arange(num)
        nearest = np.argsort(self.distances, 1)[:, 1 : 1 + NEAREST]
        self.near = np.zeros((num, num), bool)
        self.near[self.shown[:, None], nearest] = True
        self.near |= self.near.T
        self.tour = convex_hull(self.places)[: num - 1]  # one is left even if all are corners
        self.rule = self.expected = self.length_by_rule()
        return self.observation(), {}

    @staticmethod
    def least_two(added):
        """The two smallest numbers of each row [n, places], [n] each, the same where there are but
        two places, which then are the same."""
        if added.shape[1] < 3:
            return added.min(1), added.min(1)
        return tuple(np.partition(added, 1, 1)[:, :2].T)

    def after_another(self, least, second):
        """What a city of `left` (row) adds if another one (column) has come into the tour first."""
        tour, left, where = np.array(self.tour), self.left, self.where
        between = self.distances[left][:, left]
        added = np.where(where[:, None] == where, second[:, None], least[:, None])
        for end in (tour[where], np.roll(tour, -1)[where]):
            new = self.distances[left][:, end] + between - self.distances[left, end]
            added = np.minimum(added, new)
        np.fill_diagonal(added, least)
        return added

    def length_by_rule(self):
        """The length of the tour if `insert_by_regret` inserts the cities that are not in it."""
        left = np.setdiff1d(self.shown, self.tour)
        return length_of(self.distances, insert_by_regret(self.distances, self.tour, left))

    def observation(self):
        """What the present state shows. Sets `where`, the place in the tour of each city of
        `left`."""
        num = len(self.places)
        tour = np.array(self.tour)
        following = np.roll(tour, -1)
        self.route = [*self.tour, self.tour[0]]
        self.mask = np.ones(num, np.int8)
        self.mask[tour] = 0
        self.left = left = np.flatnonzero(self.mask)
        to_tour = self.distances[left][:, tour]
        added = to_tour + self.distances[left][:, following] - self.distances[tour, following]
        self.where = where = added.argmin(1)

        nodes = np.zeros((num, 8), np.float32)
        nodes[:, :2] = 2 * self.places - 1
        nodes[tour, 2] = 1
        nodes[:, 3] = len(tour) / num
        unit = 1 / np.sqrt(num)
        least, second = self.least_two(added)
        nodes[left, 4] = least / unit
        nodes[left, 5] = (second - least) / unit
        nodes[left, 6] = to_tour.min(1) / unit
        if len(left) > 1:
            nodes[left, 7] = np.sort(self.distances[left][:, left], 1)[:, 1] / unit

        change = np.zeros((num, num))  # of what a row adds if the column comes first
        change[left[:, None], left] = self.after_another(least, second) - least[:, None]
        is_link = self.near | (change != 0) | (change.T != 0)
        in_tour = np.zeros((num, num), bool)
        in_tour[tour, following] = in_tour[following, tour] = True
        for ends in (tour[where], following[where]):
            is_link[left, ends] = is_link[ends, left] = True
        is_link |= in_tour
        np.fill_diagonal(is_link, False)
        links = np.stack(np.nonzero(is_link), 1)
        edges = [self.distances / (2 * unit), in_tour, change / unit, change.T / unit]
        edges = np.stack([each[is_link] for each in edges], 1)
        graph = spaces.GraphInstance(nodes, edges.astype(np.float32), links)
        return {"graph": graph, "action_mask": self.mask}

    def step(self, action):
        """Returns the next observation, the reward, terminated, False, and info, which is {} before
        the end."""
        city = self.place_of(action)
        at = int(self.where[np.flatnonzero(self.left == city)[0]]) + 1
        self.tour = [city, *self.tour[at:], *self.tour[:at]]  # begins with the newest
        before, self.expected = self.expected, self.length_by_rule()
        reward = 100 * (before - self.expected) / self.rule
        observation = self.observation()
        terminated = len(self.left) == 0
        info = {"eval": {"length": self.expected, "rule": self.rule}} if terminated else {}
        return observation, reward, terminated, False, info


class CVRPEnv(RouteEnv):
    """Routing of a vehicle with a capacity: serve all customers, each at once, and go back to the
    depot to load whenever that is needed. The return is minus the length of the way, to be learned
    with gamma 1.

    Depot and customers are drawn anew in each episode, uniform in the unit square; there are as
    many customers as one of `customers`, each as likely. A demand is one of 1 to 9; CAPACITIES says
    what the vehicle holds (between its entries by interpolation).

    Observation: as that of `TSPEnv` for the depot as first city, with two more features of a node,
    its demand (of the depot 0) and what the vehicle still has, as shares of the capacity.
    "action_mask" is 1 for customers whose demand the vehicle still has, and for the depot if it is
    elsewhere. Action: a row whose mask is 1. Reward: minus the distance to it, with the last
    customer also that to the depot. The episode terminates then; info["eval"] has the length of
    the way.

    Args:
        customers: numbers of customers that instances have, at least 1.
        instance: None, or the number of the instance of `cvrp_test_set` that each episode has.
        render_mode: None or "rgb_array".
    Raises ValueError for arguments that make no sense, and in step() for a row whose mask is 0.
    """

    eval_suites = suites("customers")
    num_features = 2

    def __init__(self, customers=(20,), instance=None, render_mode=None):
        if not customers or min(customers) < 1:
            raise ValueError(f"customers must be numbers of at least 1, got {customers!r}.")
        super().__init__(customers, instance, render_mode)
        self.action_space = spaces.Discrete(1 + max(customers))

    def draw(self, num):
        self.capacity = self.load = round(np.interp(num, [*CAPACITIES], [*CAPACITIES.values()]))
        if self.instance is not None:
            places, demands = cvrp_test_set(num)
            self.demands = demands[self.instance]
            return places[self.instance]
        self.demands = np.append(0, self.np_random.integers(1, 10, num))
        return self.np_random.random((num + 1, 2))

    def observation(self):
        """What the present state shows."""
        graph = self.graph()
        demands = self.demands[self.shown]
        graph.nodes[:, 6] = demands / self.capacity
        graph.nodes[:, 7] = self.load / self.capacity
        self.mask = (demands <= self.load).astype(np.int8)
        self.mask[0] = 0  # one is there already
        return {"graph": graph, "action_mask": self.mask}

    def step(self, action):
        """Returns the next observation, the reward, terminated, False, and info, which is {} before
        the end."""
        place = self.place_of(action)
        reward = self.go_to(place)
        self.load = self.capacity if place == 0 else self.load - int(self.demands[place])
        terminated = len(self.left) == 0
        info = {}
        if terminated:
            way = self.distances[self.route[:-1], self.route[1:]]
            info = {"eval": {"length": float(way.sum())}}
        return self.observation(), reward, terminated, False, info


class CVRPSavingsEnv(CVRPEnv):
    """Routing of a vehicle with a capacity, by savings (Clarke and Wright 1964): at first each
    customer has a route of its own, and an action links the ends of two routes, so that they become
    one. The return is by how many percent the routes are shorter than those of a rule,
    `merge_by_savings`, to be learned with gamma 1 and `--action-head edges`.

    Instances are those of `CVRPEnv`.

    Observation: {"graph": the customers that are ends of routes as nodes float32 [n, 8]: x and y as
    seen from the depot, the distance to it, what their route carries as share of the capacity, 1 if
    it serves nobody else, the largest saving that a link of theirs makes, by how much the second
    one is smaller, and the share of customers that are ends; their links, each both ways, are those
    whose saving is one of the LARGEST largest of one of their ends, among the ones that the vehicle
    can carry, and those between both ends of a route, edges float32 [e, 4]: the distance, the
    saving, what both carry together, 1 for the ends of one route; "action_mask": int8 [e], 1 for
    links of two routes, in one direction}. Lengths are those of the unit square, but the distance
    of an edge is times sqrt(number of customers) / 2, so that neighbours are about as far apart in
    instances of all sizes. What lies between the ends is no longer shown. Action: a row of
    the edges whose mask is 1. Reward: by how much shorter the routes get by this choice if the rule
    links the others, as percent of the length by the rule alone. The episode terminates when no two
    routes can be linked; info["eval"] has their length and that by the rule.

    Args: those of `CVRPEnv`; at least 2 customers. Raises the same.
    """

    num_features = 2
    num_edge_features = 4

    def __init__(self, customers=(20,), instance=None, render_mode=None):
        if not customers or min(customers) < 2:
            raise ValueError(f"customers must be numbers of at least 2, got {customers!r}.")
        super().__init__(customers, instance, render_mode)
        self.action_space = spaces.Discrete(max(customers) ** 2)  # edges at most

    def reset(self, *, seed=None, options=None):
        """Returns the first observation and {}. A seed fixes everything that follows."""
        gym.Env.reset(self, seed=seed)
        self.places = self.draw(int(self.sizes[self.np_random.integers(len(self.sizes))]))
        self.distances = distances_of(self.places)
        self.routes = [[customer] for customer in range(1, len(self.places))]
        self.rule = self.expected = self.length_by_rule()
        return self.observation(), {}

    def length_by_rule(self):
        """The length of the routes if `merge_by_savings` links what is not linked yet."""
        merged = merge_by_savings(self.distances, self.demands, self.capacity, self.routes)
        return length_of_routes(self.distances, merged)

    def observation(self):
        """What the present state shows. Sets `links` [e, 2], the customers that each edge links."""
        self.route = [place for route in self.routes for place in (0, *route)] + [0]
        self.left = np.array([route[0] for route in self.routes if len(route) == 1], int)
        route_of = np.zeros(len(self.places), int)
        loads = np.zeros(len(self.routes), int)
        for k, route in enumerate(self.routes):
            route_of[route], loads[k] = k, self.demands[route].sum()
        self.shown = shown = np.unique([end for r in self.routes for end in (r[0], r[-1])])
        route_of = route_of[shown]
        load, num = loads[route_of], len(self.places) - 1
        distances, home = self.distances[shown][:, shown], self.distances[0, shown]
        saved = home[:, None] + home - distances
        same = route_of[:, None] == route_of
        carried = np.where(same, load, load[:, None] + load)
        can_link = ~same & (carried <= self.capacity)
        ranked = np.where(can_link, saved, -np.inf)
        if len(shown) > LARGEST:
            least = -np.partition(-ranked, LARGEST - 1, 1)[:, LARGEST - 1, None]
            can_link &= (ranked >= least) | (ranked >= least.T)
        best = -np.sort(-np.where(can_link, saved, 0), 1)

        nodes = np.zeros((len(shown), 8), np.float32)
        nodes[:, :2] = 2 * (self.places[shown] - self.places[0])
        nodes[:, 2] = home
        nodes[:, 3] = load / self.capacity
        nodes[:, 4] = same.sum(1) == 1
        nodes[:, 5] = best[:, 0]
        nodes[:, 6] = best[:, 0] - best[:, 1]
        nodes[:, 7] = len(shown) / num
        np.fill_diagonal(same, False)
        is_edge = can_link | same
        source, target = np.nonzero(is_edge)
        edges = [distances * np.sqrt(num) / 2, saved, carried / self.capacity, same]
        edges = np.stack([each[is_edge] for each in edges], 1).astype(np.float32)
        graph = spaces.GraphInstance(nodes, edges, np.stack([source, target], 1))
        self.links = shown[graph.edge_links]
        self.mask = (can_link[is_edge] & (source < target)).astype(np.int8)
        return {"graph": graph, "action_mask": self.mask}

    def step(self, action):
        """Returns the next observation, the reward, terminated, False, and info, which is {} before
        the end."""
        if not 0 <= action < len(self.mask) or not self.mask[action]:
            raise ValueError(
                f"Edge {action} cannot be chosen: choose one whose action_mask is 1, one of "
                f"{np.flatnonzero(self.mask).tolist()}."
            )
        a, b = self.links[action].tolist()
        one, other = (next(r for r in self.routes if end in (r[0], r[-1])) for end in (a, b))
        self.routes = [r for r in self.routes if r is not one and r is not other]
        self.routes.append(link(one, a, other, b))
        before, self.expected = self.expected, self.length_by_rule()
        reward = 100 * (before - self.expected) / self.rule
        observation = self.observation()
        terminated = not self.mask.any()
        info = {"eval": {"length": self.expected, "rule": self.rule}} if terminated else {}
        return observation, reward, terminated, False, info
