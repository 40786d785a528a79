"""GraphExplore-v0: graphs are those of plain loops, an observation shows a node and its neighbours
and nothing else, rewards are paid once, and reference policies have the docstring's scores."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from helpers import mismatch, run

from cleanrl_graph import ppo_lstm_sparse
from cleanrl_graph.envs.graph_explore import (
    COLOUR,
    CURRENT,
    DEGREE,
    ID_BOUND,
    PREVIOUS,
    TIME,
    VISITED,
    geometric_graph,
    hops_from,
    play_episode,
    reference_scores,
)

SMALL = {"num_nodes": (8, 20), "episode_length": 20}
ENVS = [
    {},
    {"task": "find"},
    SMALL,
    SMALL | {"task": "find", "num_colours": 5},
    {"num_nodes": (3, 4), "episode_length": 7, "radius_degree": 0.0},
    {"task": "find", "num_nodes": (4, 5), "num_colours": 3, "radius_degree": 20.0},
]
ignore_scalar_warning = pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")


def make(**kwargs):
    env = gym.make("cleanrl_graph.envs:GraphExplore-v0", disable_env_checker=True, **kwargs)
    return env.unwrapped


def spanning_tree(points):
    """Prim's minimum spanning tree by plain loops: a set of sorted pairs."""
    distance = np.linalg.norm(points[:, None] - points, axis=2)
    inside, tree = {0}, set()
    while len(inside) < len(points):
        outside = [j for j in range(len(points)) if j not in inside]
        i, j = min(((i, j) for i in inside for j in outside), key=lambda pair: distance[pair])
        inside.add(j)
        tree.add((min(i, j), max(i, j)))
    return tree


@pytest.mark.parametrize("n", [2, 3, 50])
@pytest.mark.parametrize("radius_degree", [0.0, 2.5])
def test_geometric_graph(n, radius_degree):
    for seed in range(5):
        points = np.random.default_rng(seed).random((n, 2))
        linked = geometric_graph(points, radius_degree)
        assert (linked == linked.T).all() and not linked.diagonal().any()
        distance = np.linalg.norm(points[:, None] - points, axis=2)
        pairs = lambda matrix: {(i, j) for i, j in np.argwhere(matrix).tolist() if i < j}
        close = pairs(distance < np.sqrt(radius_degree / np.pi / n))
        assert pairs(linked) == close | spanning_tree(points)
        hops, parent = hops_from(1, linked)
        assert hops[1] == 0 and parent[1] == 1
        others = np.arange(n) != 1
        assert linked[others, parent[others]].all() and (hops[parent] == hops - 1)[others].all()
        assert all(hops[j] <= hops[i] + 1 for i, j in np.argwhere(linked))


@ignore_scalar_warning
@pytest.mark.parametrize("kwargs", ENVS)
def test_observation_shows_the_node_and_its_neighbours(kwargs):
    env = make(**kwargs)
    rng = np.random.default_rng(0)
    name_of, neighbours_of = {}, {}
    observation, _ = env.reset(seed=3)
    previous = None
    for _ in range(100):
        assert observation in env.observation_space
        nodes, links = observation["graph"].nodes, observation["graph"].edge_links
        ids, mask = observation["node_ids"], observation["action_mask"]
        k = len(nodes)
        assert ids.shape == mask.shape == (k,) and nodes.dtype == np.float32
        assert ids.dtype == links.dtype == np.int64 and mask.dtype == np.int8
        assert len(set(ids.tolist())) == k and 0 <= ids.min() and ids.max() < ID_BOUND
        assert mask.tolist() == [0] + [1] * (k - 1) and k <= env.action_space.n
        assert nodes[:, CURRENT].tolist() == [1] + [0] * (k - 1)
        assert nodes[0, DEGREE] * 4 == k - 1 and (nodes[:, DEGREE] > 0).all()
        assert (nodes[:, TIME] == np.float32(env.num_steps / env.episode_length)).all()
        assert ids[nodes[:, PREVIOUS] == 1].tolist() == ([] if previous is None else [previous])
        both = [[[0, j], [j, 0]] for j in range(1, k)]
        assert sorted(links.tolist()) == sorted(sum(both, []))
        # The same name, the same neighbours
        assert name_of.setdefault(env.current, ids[0]) == ids[0]
        assert neighbours_of.setdefault(ids[0], ids[1:].tolist()) == ids[1:].tolist()
        near = set(np.flatnonzero(env.place[env.current] >= 0))
        assert near == set(env.rows[np.isin(env.node_ids, ids)])

        action = int(rng.integers(k + 1))  # the own row and one beyond the last are no moves
        goal = ids[action] if 0 < action < k else ids[0]
        previous = ids[0] if 0 < action < k else previous
        observation, _, terminated, truncated, info = env.step(action)
        assert observation["node_ids"][0] == goal and truncated is False and info == {}
        if terminated:
            assert observation in env.observation_space
            observation, _ = env.reset()
            name_of, neighbours_of, previous = {}, {}, None


def test_visit_pays_for_discoveries_only():
    env = make(episode_length=10)
    observation, _ = env.reset(seed=0)
    home = observation["node_ids"][0]
    observation, reward, *_ = env.step(1)
    assert reward == 0.1 and env.visited == {env.start, env.current}
    back = observation["node_ids"].tolist().index(home)
    assert env.step(back)[1] == 0  # the start is known
    assert [env.step(action)[1] for action in (1, 0, 10_000, -1)] == [0] * 4


def way_to(env, goal):
    """Actions along a shortest way from the start."""
    hops, _ = hops_from(goal, env.place >= 0)
    node, actions = env.start, []
    while node != goal:
        near = np.flatnonzero(env.place[node] > 0)
        last, node = node, next(w for w in near if hops[w] == hops[node] - 1)
        actions.append(int(env.place[last, node]))
    return actions


@pytest.mark.parametrize("task", ("visit", "find"))
def test_the_map_shows_the_whole_graph(task):
    env = make(task=task, **SMALL, show_map=True)
    plain = make(task=task, **SMALL)
    observation, _ = env.reset(seed=3)
    other, _ = plain.reset(seed=3)
    for action in (1, 1, 2, 0, 1):
        shown = {key: value for key, value in observation.items() if key != "map"}
        assert data_equivalence(shown, other, exact=True)
        assert env.observation_space.contains(observation)
        nodes, links = observation["map"].nodes, observation["map"].edge_links
        source, target = np.nonzero((env.place >= 0) & ~np.eye(len(nodes), dtype=bool))
        np.testing.assert_array_equal(links, np.stack((source, target), 1))
        np.testing.assert_array_equal(nodes[:, CURRENT].nonzero()[0], [env.current])
        np.testing.assert_array_equal(nodes[:, VISITED].nonzero()[0], sorted(env.visited))
        np.testing.assert_array_equal(nodes[:, DEGREE] * 4, np.bincount(source))
        assert (nodes[:, TIME] == np.float32(env.num_steps / SMALL["episode_length"])).all()
        if task == "find":
            colours = nodes[:, COLOUR:-1].argmax(1)
            assert {v: colours[v] for v in env.colour} == env.colour
            np.testing.assert_array_equal(nodes[:, -1].nonzero()[0], [env.target])
        observation = env.step(action)[0]
        other = plain.step(action)[0]


def test_a_critic_sees_the_map_beside_a_state_per_node(tmp_path):
    flags = dict(env_kwargs={"show_map": True} | SMALL, critic_only=("map",))
    assert mismatch(run(tmp_path, ppo_lstm_sparse, env_id="envs:GraphExplore-v0", **flags)) < 1e-5


def test_find_target_decoys_and_cue():
    env = make(task="find", episode_length=50)
    cues = []
    for seed in range(30):
        observation, _ = env.reset(seed=seed)
        cues.append(env.cue)
        cue = observation["graph"].nodes[:, COLOUR:]
        assert cue[0].sum() == 1 and cue[0].argmax() == env.cue and env.start not in env.colour
        assert sorted(env.colour.values()) == [0, 1, 2, 3] and env.colour[env.target] == env.cue
        assert all(2 <= env.hops[node] for node in env.colour)

        # no decoy needs to be passed on a shortest way
        decoys = [node for node in env.colour if node != env.target]
        linked = env.place >= 0
        linked[decoys] = linked[:, decoys] = False
        assert hops_from(env.start, linked)[0][env.target] == env.hops[env.target]

        decoy = decoys[0]
        for action in way_to(env, decoy):
            before = env.visited.copy()
            observation, reward, terminated, _, _ = env.step(action)
            assert observation["graph"].nodes[0, COLOUR:].sum() == (env.current in env.colour)
            assert terminated == (env.current == env.target)
        if not terminated:
            assert reward == (-0.51 if decoy not in before else -0.01)
            env.step(1)
            own = env.rows[env.first_row[env.current] : env.first_row[env.current + 1]]
            back = own.tolist().index(decoy)
            assert env.step(back)[1] == -0.01  # a decoy costs once

        env.reset(seed=seed)
        rewards = [env.step(action)[1:3] for action in way_to(env, env.target)]
        if not set(decoys) & env.visited:
            total = sum(reward for reward, _ in rewards)
            assert total == pytest.approx(1 - 0.01 * env.hops[env.target])
        assert [terminated for _, terminated in rewards] == [False] * (len(rewards) - 1) + [True]
    assert set(cues) == {0, 1, 2, 3}


def test_reference_scores_of_the_docstring():
    scores = reference_scores(40)
    expected = {"random walk": 0.225, "non-backtracking": 0.387, "least recent": 0.645}
    expected |= {"depth first": 0.686, "nearest frontier": 0.728, "bound": 1.0}
    assert {name: mean for name, (mean, _) in scores.items()} == pytest.approx(expected, abs=0.05)
    assert scores["depth first"][0] > 1.5 * scores["non-backtracking"][0]

    scores = reference_scores(40, task="find")
    blind = max(mean for name, (mean, _) in scores.items() if "blind" in name)
    knowing = min(mean for name, (mean, _) in scores.items() if "blind" not in name)
    assert blind < 0 < knowing < scores["shortest way"][0] == pytest.approx(0.964, abs=0.01)


@pytest.mark.parametrize("name", ["depth first", "nearest frontier"])
def test_a_whole_tree_is_visited_in_twice_its_edges(name):
    env = make(num_nodes=(12, 12), radius_degree=0.0, episode_length=22)
    for seed in range(20):
        assert play_episode(env, name, seed) == pytest.approx(11 / 22)
