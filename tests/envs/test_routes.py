"""TSP-v0, TSPInsert-v0 and CVRP-v0: returns are lengths of tours, the test sets are the
published ones, the rules have the published lengths, and no vehicle carries more than it can."""

from itertools import permutations

import gymnasium as gym
import numpy as np
import pytest

from cleanrl_graph.envs import routes
from cleanrl_graph.envs.routes import CVRPEnv, TSPEnv, distances_of, length_of


def make(env_id, **kwargs):
    return gym.make(f"cleanrl_graph.envs:{env_id}", disable_env_checker=True, **kwargs).unwrapped


def play(env, choose, seed=None):
    """The return and the last info of an episode."""
    observation, _ = env.reset(seed=seed)
    total, done = 0.0, False
    while not done:
        observation, reward, done, truncated, info = env.step(choose(observation))
        assert observation in env.observation_space and not truncated
        total += reward
    return total, info


def at_random(rng):
    return lambda observation: int(rng.choice(np.flatnonzero(observation["action_mask"])))


def all_lengths(places):
    """The lengths of all tours from the first place, by their definition."""
    lengths = []
    for order in permutations(range(1, len(places))):
        way = places[[0, *order, 0]]
        lengths.append(np.hypot(*(way[1:] - way[:-1]).T).sum())
    return lengths


@pytest.mark.parametrize("instance", [0, 1, 9_999])
def test_best_of_all_orders_is_the_shortest_tour(instance):
    """Of 7 cities all 720 tours are known; the environment plays each of them at its length."""
    env = make("TSP-v0", cities=(7,), instance=instance)
    expected = all_lengths(routes.tsp_test_set(7)[instance])
    lengths = []
    for order in permutations(range(1, 7)):
        env.reset()
        total = 0.0
        for city in order:
            _, reward, done, _, info = env.step(int(np.flatnonzero(env.shown == city)[0]))
            total += reward
        assert done and info["eval"]["length"] == pytest.approx(-total)
        lengths.append(-total)
    assert lengths == pytest.approx(expected)
    for rule in (routes.nearest_neighbour, routes.farthest_insertion):
        tour = rule(env.distances)
        assert sorted(tour) == list(range(7))
        found = length_of(env.distances, tour)
        assert min(expected) - 1e-9 <= found <= 1.25 * min(expected)


@pytest.mark.parametrize("num", [20, 50, 100])
def test_test_sets_are_those_of_the_attention_model(num):
    """What its generate_data.py draws; numpy's global generator is left alone."""
    state = np.random.get_state()
    try:
        np.random.seed(1234)
        places = np.random.uniform(size=(10_000, num, 2))
        np.random.seed(1234)
        depots = np.random.uniform(size=(10_000, 2))
        customers = np.random.uniform(size=(10_000, num, 2))
        demands = np.random.randint(1, 10, size=(10_000, num))
    finally:
        np.random.set_state(state)
    capacity = {20: 30, 50: 40, 100: 50}[num]
    routes.tsp_test_set.cache_clear()
    routes.cvrp_test_set.cache_clear()
    count = {20: 10_000}.get(num, 1000)
    assert len(TSPEnv.eval_suites[f"cities{num}"]) == count
    for k in (0, count - 1):
        env = make("TSP-v0", **TSPEnv.eval_suites[f"cities{num}"][k])
        env.reset()
        assert np.array_equal(env.places, places[k])
        env = make("CVRP-v0", **CVRPEnv.eval_suites[f"customers{num}"][k])
        env.reset()
        assert np.array_equal(env.places, [depots[k], *customers[k]])
        assert np.array_equal(env.demands, [0, *demands[k]]) and env.capacity == capacity
    after = np.random.get_state()
    assert all(np.array_equal(one, other) for one, other in zip(state, after))


def test_published_lengths_of_the_rules():
    """The first 2,500 of the 10,000 instances of 20 cities; in Kool et al. 2019, table 1, all have
    4.50 and 3.93."""
    lengths = []
    for places in routes.tsp_test_set(20)[:2500]:
        distances = distances_of(places)
        tours = routes.nearest_neighbour(distances), routes.farthest_insertion(distances)
        lengths.append([length_of(distances, tour) for tour in tours])
    assert np.mean(lengths, 0) == pytest.approx([4.50, 3.93], abs=0.01)


def test_choosing_the_nearest_city_is_the_nearest_neighbour_rule():
    env = make("TSP-v0", cities=(5, 12, 20))

    def nearest(observation):
        graph, mask = observation["graph"], observation["action_mask"]
        is_near = (graph.edge_links[:, 0] == 0) & (mask[graph.edge_links[:, 1]] == 1)
        return int(graph.edge_links[is_near, 1][graph.edges[is_near, 0].argmin()])

    sizes = set()
    for seed in range(12):
        total, info = play(env, nearest, seed)
        assert info["eval"] == pytest.approx({"length": -total, "nearest neighbour": -total})
        num = len(env.places)
        assert env.route[0] == env.route[-1] == 0 and sorted(env.route[:-1]) == list(range(num))
        way = env.places[env.route]
        assert -total == pytest.approx(np.hypot(*np.diff(way, axis=0).T).sum())
        sizes.add(num)
    assert sizes == {5, 12, 20}


def test_capacity_is_kept():
    """A route between two visits of the depot carries at most the capacity, the depot never follows
    itself, each customer is served once, and the mask shows exactly what may come next."""
    env, rng = make("CVRP-v0", customers=(1, 10, 20)), np.random.default_rng(0)
    sizes = set()

    def choose(observation):
        demands, now = env.demands[env.shown], env.route[-1]
        since = len(env.route) - env.route[::-1].index(0)  # of the last depot
        load = env.capacity - env.demands[env.route[since:]].sum()
        allowed = [place != now and env.demands[place] <= load for place in env.shown]
        assert observation["action_mask"].tolist() == allowed
        assert observation["graph"].nodes[:, -2:] == pytest.approx(
            np.stack([demands, np.full(len(demands), load)], 1) / env.capacity
        )
        return at_random(rng)(observation)

    for seed in range(12):
        total, info = play(env, choose, seed)
        num = len(env.places) - 1
        sizes.add(num)
        assert env.capacity == {1: 20, 10: 20, 20: 30}[num]
        assert env.route[0] == env.route[-1] == 0
        assert sorted(place for place in env.route if place) == list(range(1, num + 1))
        load = 0
        for source, target in zip(env.route, env.route[1:]):
            assert source != target
            load = load + env.demands[target] if target else 0
            assert load <= env.capacity
        way = env.places[env.route]
        assert -total == pytest.approx(np.hypot(*np.diff(way, axis=0).T).sum())
        assert info["eval"]["length"] == pytest.approx(-total)
    assert sizes == {1, 10, 20}


def test_what_is_visited_is_no_longer_shown():
    env = make("TSP-v0", cities=(6,))
    observation, _ = env.reset(seed=3)
    assert env.shown.tolist() == [0, 1, 2, 3, 4, 5]
    assert observation["action_mask"].tolist() == [0, 1, 1, 1, 1, 1]
    observation, *_ = env.step(4)
    assert env.shown.tolist() == [4, 0, 1, 2, 3, 5]
    assert observation["action_mask"].tolist() == [0, 0, 1, 1, 1, 1]
    observation, *_ = env.step(2)
    assert env.shown.tolist() == [1, 0, 2, 3, 5]
    graph = observation["graph"]
    rows = list(map(tuple, graph.edge_links.tolist()))
    assert sorted(rows) == sorted(permutations(range(5), 2))
    for (source, target), edge in zip(rows, graph.edges[:, 0]):
        places = env.places[env.shown[[source, target]]]
        assert edge == pytest.approx(np.hypot(*(places[0] - places[1])))
    assert graph.nodes[:, 2:4] == pytest.approx(env.distances[env.shown][:, [1, 0]])
    assert graph.nodes[:, 4:].T.tolist() == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]]


def test_convex_hull():
    """All cities are to the left of its edges; a point within and one on an edge are no corners."""
    square = np.array([[0.5, 0.5], [0, 0], [1, 1], [0.5, 0], [1, 0], [0, 1]])
    assert routes.convex_hull(square) == [1, 4, 2, 5]
    places = np.random.default_rng(0).random((50, 2))
    hull = routes.convex_hull(places)
    assert len(set(hull)) == len(hull) < 50
    for a, b in zip(hull, hull[1:] + hull[:1]):
        (x, y), others = places[b] - places[a], places - places[a]
        assert (x * others[:, 1] - y * others[:, 0] > -1e-12).all()


def test_insertion_begins_with_the_hull_and_reaches_the_optimum():
    """An optimal tour visits the corners of the hull in their order. Some order of insertions finds
    it in the most of these instances, and none finds a shorter one."""
    env, found = make("TSPInsert-v0", cities=(7,)), []
    for seed in range(12):
        env.reset(seed=seed)
        best = min(all_lengths(env.places))
        left = env.left.tolist()
        assert sorted(env.tour + left) == list(range(7)) and len(left) >= 1
        lengths = []
        for order in permutations(left):
            env.reset(seed=seed)
            steps = [env.step(city) for city in order]
            *_, done, _, info = steps[-1]
            length, rule = info["eval"]["length"], info["eval"]["rule"]
            assert done and sorted(env.tour) == list(range(7))
            assert length == pytest.approx(length_of(env.distances, env.tour))
            total = sum(reward for _, reward, *_ in steps)
            assert total == pytest.approx(100 * (1 - length / rule), abs=1e-9)
            lengths.append(length)
        assert min(lengths) >= best - 1e-9
        found.append(min(lengths) <= best + 1e-9)
        assert min(lengths) - 1e-9 <= rule <= max(lengths) + 1e-9
    assert np.mean(found) >= 0.9


def least_added(env, tour, city):
    """By how much a city makes a tour longer at the best place."""
    away = env.distances[city]
    return min(away[a] + away[b] - env.distances[a, b] for a, b in zip(tour, tour[1:] + tour[:1]))


def inserted(env, tour, city):
    tours = [tour[:k] + [city] + tour[k:] for k in range(len(tour))]
    return min(tours, key=lambda tour: length_of(env.distances, tour))


def test_what_an_insertion_shows():
    """Each number by its definition, throughout an episode. Whoever always takes the largest regret
    is the rule, whose rewards are 0; that of another choice is what the rule's tour changes by."""
    env, rng = make("TSPInsert-v0", cities=(12,)), np.random.default_rng(0)
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        while len(env.left) > 1:
            tour, left, unit = env.tour, env.left.tolist(), 12**-0.5
            nodes = observation["graph"].nodes
            assert observation["action_mask"].tolist() == [int(c in left) for c in range(12)]
            assert nodes[:, :2] == pytest.approx(2 * env.places - 1)
            assert nodes[:, 2].tolist() == [int(c in tour) for c in range(12)]
            assert nodes[:, 3] == pytest.approx(len(tour) / 12)
            assert not nodes[tour, 4:].any()
            between = list(zip(tour, tour[1:] + tour[:1]))
            links = {*between, *((b, a) for a, b in between)}
            change = np.zeros((12, 12))
            for city in left:
                away = env.distances[city]
                added = [away[a] + away[b] - env.distances[a, b] for a, b in between]
                first, second = sorted(added)[:2]
                other = min(away[c] for c in left if c != city)
                expected = np.array([first, second - first, min(away[tour]), other]) / unit
                assert nodes[city, 4:] == pytest.approx(expected, abs=1e-6)
                for end in between[int(np.argmin(added))]:
                    links |= {(city, end), (end, city)}
                for other in set(left) - {city}:
                    after = least_added(env, inserted(env, tour, city), other)
                    change[other, city] = (after - least_added(env, tour, other)) / unit
                    if abs(change[other, city]) > 1e-9:
                        links |= {(other, city), (city, other)}
            for city in range(12):
                for other in np.argsort(env.distances[city])[1 : 1 + routes.NEAREST].tolist():
                    links |= {(city, other), (other, city)}
            pairs = list(map(tuple, observation["graph"].edge_links.tolist()))
            assert sorted(pairs) == sorted(links)
            for pair, edge in zip(pairs, observation["graph"].edges):
                in_tour = pair in between or pair[::-1] in between
                expected = [
                    env.distances[pair] / unit / 2,
                    in_tour,
                    change[pair],
                    change[pair[::-1]],
                ]
                assert edge == pytest.approx(np.array(expected, float), abs=1e-6)
            regret = np.where(observation["action_mask"], nodes[:, 5], -1)
            city = int(regret.argmax()) if seed < 4 else at_random(rng)(observation)
            before = env.length_by_rule()
            observation, reward, *_ = env.step(city)
            assert reward == pytest.approx(100 * (before - env.length_by_rule()) / env.rule)
            assert sorted(env.tour) == sorted([*tour, city])
            assert reward == pytest.approx(0, abs=1e-9) or seed == 4


def by_savings(env, routes):
    """The rule by its definition: again and again the link that saves the most, of all pairs."""
    while True:
        found = []
        for one in range(len(routes)):
            for other in range(one + 1, len(routes)):
                if env.demands[routes[one] + routes[other]].sum() > env.capacity:
                    continue
                for a in {tuple(routes[one]), tuple(routes[one][::-1])}:
                    for b in {tuple(routes[other]), tuple(routes[other][::-1])}:
                        linked = [r for k, r in enumerate(routes) if k not in (one, other)]
                        linked.append([*a, *b])
                        found.append((routes_length(env, linked), linked))
        if not found:
            return routes
        routes = min(found)[1]


def routes_length(env, routes):
    ways = [env.places[[0, *route, 0]] for route in routes]
    return sum(float(np.hypot(*np.diff(way, axis=0).T).sum()) for way in ways)


def test_links_of_routes():
    """Each number by its definition, throughout an episode. Whoever always takes the largest saving
    is the rule, whose rewards are 0; that of another choice is what the rule's length changes by.
    """
    env, rng = make("CVRPSavings-v0", customers=(2, 12)), np.random.default_rng(0)
    sizes = set()
    for seed in range(8):
        (observation, _), done, total = env.reset(seed=seed), False, 0.0
        num = len(env.places) - 1
        sizes.add(num)
        first = expected = routes_length(env, by_savings(env, [[k] for k in range(1, num + 1)]))
        while not done:
            assert observation in env.observation_space
            ends = sorted({end for route in env.routes for end in (route[0], route[-1])})
            route_of = {end: route for route in env.routes for end in route}
            carried = {end: env.demands[route_of[end]].sum() for end in ends}
            home = {end: env.distances[0, end] for end in ends}
            savings = {}
            for a in ends:
                for b in ends:
                    if route_of[a] is not route_of[b] and carried[a] + carried[b] <= env.capacity:
                        savings[a, b] = home[a] + home[b] - env.distances[a, b]
            links = set()
            for a in ends:
                best = sorted(value for (one, _), value in savings.items() if one == a)[::-1]
                some = best[: routes.LARGEST]
                own = [pair for pair in savings if pair[0] == a and savings[pair] in some]
                links |= {*own, *(pair[::-1] for pair in own)}
                best += [0, 0]
                node = observation["graph"].nodes[ends.index(a)]
                x, y = 2 * (env.places[a] - env.places[0])
                alone, share = len(route_of[a]) == 1, carried[a] / env.capacity
                seen = [x, y, home[a], share, alone, best[0], best[0] - best[1], len(ends) / num]
                assert node == pytest.approx(np.array(seen, float), abs=1e-6)
            both = {(r[0], r[-1]) for r in env.routes if len(r) > 1}
            both |= {pair[::-1] for pair in both}
            pairs = list(map(tuple, env.links.tolist()))
            assert sorted(pairs) == sorted(links | both)
            allowed = [pair in links and pair[0] < pair[1] for pair in pairs]
            assert observation["action_mask"].tolist() == allowed
            for (a, b), edge in zip(pairs, observation["graph"].edges):
                load = carried[a] + (carried[b] if (a, b) in links else 0)
                saved = home[a] + home[b] - env.distances[a, b]
                seen = [env.distances[a, b] * num**0.5 / 2, saved, load / env.capacity]
                assert edge == pytest.approx(np.array([*seen, (a, b) in both]), abs=1e-6)
            edges = observation["graph"].edges[:, 1]
            action = int(np.where(observation["action_mask"], edges, -1).argmax())
            if seed > 1:
                action = at_random(rng)(observation)
            before = expected
            observation, reward, done, _, info = env.step(action)
            expected = routes_length(env, by_savings(env, env.routes))
            assert reward == pytest.approx(100 * (before - expected) / first, abs=1e-6)
            assert reward == pytest.approx(0, abs=1e-6) or seed > 1
            total += reward
        assert sorted(place for route in env.routes for place in route) == list(range(1, num + 1))
        assert all(env.demands[route].sum() <= env.capacity for route in env.routes)
        assert info["eval"] == pytest.approx({"length": expected, "rule": first})
        assert expected == pytest.approx(routes_length(env, env.routes))
    assert sizes == {2, 12}


def test_a_link_that_may_not_be_is_an_error():
    env = make("CVRPSavings-v0")
    observation, _ = env.reset(seed=0)
    for row in (int(np.flatnonzero(observation["action_mask"] == 0)[0]), -1, len(env.links)):
        with pytest.raises(ValueError, match=f"Edge {row} cannot be chosen"):
            env.step(row)
    with pytest.raises(ValueError, match="at least 2"):
        make("CVRPSavings-v0", customers=(1, 5))
