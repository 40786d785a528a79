"""Pogema-v0: maps, tasks and moves are those of POGEMA 1.4.0, ways are those of a breadth-first
search, and views and rewards those of hand-made episodes."""

import hashlib
import warnings
from collections import deque

import gymnasium as gym
import numpy as np
import pytest

from cleanrl_graph.envs import pogema
from cleanrl_graph.envs.pogema import PogemaEnv, cost_to_go, grid_map, map_text

STAY, UP, DOWN, LEFT, RIGHT = range(5)
VIEW = pogema.VIEW
LAST = len(pogema.PLANES) * VIEW  # the column after the planes
CORRIDOR = "........\n"  # one row


def made(starts, goals, text=CORRIDOR, **kwargs):
    """An environment after reset() whose robots are and want to go there: (row, column)."""
    env = PogemaEnv(map=text, num_robots=len(starts), **kwargs)
    env.reset(seed=0)
    cells = [cell_of(env, *where) for where in (*starts, *goals)]
    env.place, env.goal = np.array(cells).reshape(2, -1)
    env.occupant[:] = -1
    env.occupant[env.place] = np.arange(len(starts))
    env.to_go = env.steps_to_goals()
    return env


def cell_of(env, row, column):
    return (row + pogema.RADIUS) * env.grid.width + column + pogema.RADIUS


def places(env, cells=None):
    """[(row, column)] of the robots, or of cells."""
    row, column = np.divmod(env.place if cells is None else cells, env.grid.width)
    return list(zip((row - pogema.RADIUS).tolist(), (column - pogema.RADIUS).tolist()))


def reference_costs(is_free, width, goal):
    """{cell: steps to the goal}, one cell after the other."""
    found = {goal: 0}
    queue = deque([goal])
    while queue:
        cell = queue.popleft()
        for step in (-1, 1, -width, width):
            if is_free[cell + step] and cell + step not in found:
                found[cell + step] = found[cell] + 1
                queue.append(cell + step)
    return found


# ---- Maps and ways ----
@pytest.mark.parametrize(
    ("name", "num_free", "digest"),
    [
        ("random", 37556, "d412aa6acc9d6883"),
        ("mazes", 34444, "6aea47bfda547683"),
        ("warehouse", 1278, "0d4407bf96898956"),
    ],
)
def test_maps_of_the_benchmark(name, num_free, digest):
    """Those of all its tests, 128 of a kind, and the number of their free cells."""
    texts = [map_text(name, seed) for seed in range(1 if name == "warehouse" else 128)]
    assert sum(len(text) - text.count("#") - text.count("\n") for text in texts) == num_free
    assert hashlib.sha256("\n\n".join(texts).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", ["random", "mazes", "warehouse"])
def test_cost_to_go(name):
    """All steps to all goals are those of a breadth-first search from each goal."""
    grid = grid_map(map_text(name, 3))
    goals = np.flatnonzero(grid.is_free)[::17]
    for goal, row in zip(goals.tolist(), cost_to_go(grid.is_free, grid.width, goals)):
        found = reference_costs(grid.is_free, grid.width, goal)
        expected = np.full(len(row), pogema.FAR)
        expected[list(found)] = list(found.values())
        assert row.tolist() == expected.tolist()
        assert set(found) == set(grid.members[grid.component[goal]].tolist())


# ---- Moves ----
def test_collisions():
    """Rows and rings move as one, two never change places, the lowest number gets a cell."""
    row = made([(0, 0), (0, 1), (0, 2)], [(0, 7)] * 3)
    row.step([RIGHT, RIGHT, RIGHT])
    assert places(row) == [(0, 1), (0, 2), (0, 3)]
    row.step([RIGHT, RIGHT, STAY])
    assert places(row) == [(0, 1), (0, 2), (0, 3)]
    row.step([STAY, RIGHT, LEFT])
    assert places(row) == [(0, 1), (0, 2), (0, 3)]
    row.step([LEFT, STAY, STAY])
    row.step([LEFT, STAY, STAY])  # the border
    assert places(row) == [(0, 0), (0, 2), (0, 3)]
    row.step([RIGHT, LEFT, STAY])
    assert places(row) == [(0, 1), (0, 2), (0, 3)]
    assert row.num_still.tolist() == [0, 5, 5]
    ring = made([(0, 0), (0, 1), (1, 1), (1, 0)], [(0, 0)] * 4, "...\n...\n...\n")
    ring.step([RIGHT, DOWN, LEFT, UP])
    assert places(ring) == [(0, 1), (1, 1), (1, 0), (0, 0)]


@pytest.mark.parametrize("task", ["lifelong", "one-shot"])
@pytest.mark.parametrize(
    ("name", "num", "seeds"),
    [("random", 64, (5, 0)), ("mazes", 48, (7, 0)), ("warehouse", 192, (0, 11))],
)
def test_tasks_and_moves_are_those_of_pogema(name, num, seeds, task, monkeypatch):
    """Starts, goals, later goals, places and obstacles in view of a whole episode, in which half of
    the moves are random. POGEMA's plane of robots lacks those who follow another one."""
    own = gym.registry["Pogema-v0"]
    monkeypatch.setitem(gym.registry, "Pogema-v0", own)  # pogema has an id of this name
    peer = pytest.importorskip("pogema.envs")
    from pogema import GridConfig

    map_seed, task_seed = seeds
    env = PogemaEnv(name, num, task, 128, map_seed=map_seed, task_seed=task_seed)
    env.reset(seed=0)
    end = "restart" if task == "lifelong" else "nothing"
    how = dict(on_target=end, collision_system="soft", observation_type="POMAPF")
    config = GridConfig(map=map_text(name, map_seed), num_agents=num, seed=task_seed, **how)
    kind = peer.PogemaLifeLong if task == "lifelong" else peer.PogemaCoopFinish
    theirs = kind(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observed, _ = theirs.reset()
    rng = np.random.default_rng(1)
    num_reached = 0
    for _ in range(env.length):
        of_both = (env.place, theirs.grid.positions_xy), (env.goal, theirs.grid.finishes_xy)
        for mine, other in of_both:
            row, column = np.divmod(mine, env.grid.width)
            assert list(zip(row, column)) == other
        nodes = env.observe()["graph"].nodes
        assert (nodes[:, :VIEW] == [view["obstacles"].ravel() for view in observed]).all()
        is_random = rng.random(num) < 0.5
        action = np.where(is_random, rng.integers(5, size=num), pogema.shortest(env))
        env.step(action)
        observed, rewards, *_ = theirs.step(action.tolist())
        num_reached += sum(rewards)
    assert task == "one-shot" or num_reached == env.num_reached > 10


# ---- What robots see and earn ----
def test_observation():
    """Columns of two robots that see each other, and of one that sees nobody."""
    text = "............\n.#..........\n............\n"
    env = made([(0, 1), (2, 1), (1, 11)], [(0, 3), (0, 1), (1, 11)], text)
    obs = env.observe()
    assert env.observation_space.contains(obs)
    nodes, edges, links = obs["graph"]
    walls = nodes[:, :VIEW].reshape(3, 11, 11)
    robots = nodes[:, VIEW : 2 * VIEW].reshape(3, 11, 11)
    assert walls[0, 6, 5] == walls[1, 4, 5] == 1  # the obstacle
    assert walls[0, 4, 3:].all() and walls[0, 4:, 3].sum() == 5  # the ring around the map
    assert not walls[0, :4].any()
    assert robots[0].sum() == robots[0, 7, 5] == robots[1].sum() == robots[1, 3, 5] == 1
    assert robots[2].sum() == 0
    lower, cost, down, right = nodes[:, 2 * VIEW : LAST].reshape(3, 4, 11, 11).swapaxes(0, 1)
    assert (lower[0] == -robots[0]).all() and (lower[1] == robots[1]).all() and not lower[2].any()
    # Goals are two and, around the obstacle, four steps away; one's own cell has 0
    assert cost[0, 5, 7] == np.float32(0.2) and cost[1, 3, 5] == np.float32(0.4)
    assert not cost[:, 5, 5].any()
    assert cost[0, 5, 6] == np.float32(0.1) and cost[0, 7, 5] == np.float32(-0.2)
    assert (cost[walls == 1] == -1).all()
    # 1 sees that 0 wants to go right; 0 sees that 1 goes left or right, whose sum is 0
    assert (right[1] == robots[1]).all() and not right[0].any() and not down.any()
    own = nodes[:, LAST:]
    assert np.allclose(own[0], [0, 0.2, 0, 1, 0.1, 0, 0, -1, 1, 0, 0, 0, 0, 0, 0])
    assert np.allclose(own[1], [-0.2, 0, -1, 0, 0.2, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1 / 3])
    assert obs["action_mask"].tolist() == [[1, 0, 0, 1, 1], [1, 0, 0, 1, 1], [1, 1, 1, 1, 0]]
    assert links.tolist() == [[0, 1], [1, 0]]
    assert np.allclose(edges, [[0.4, 0, 0.5, 1], [-0.4, 0, 0.5, 0]])
    assert obs["node_ids"].tolist() == [0, 1, 2]
    moved = env.step([RIGHT, LEFT, STAY])[0]["graph"].nodes[:, LAST:]
    expected = [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, np.float32(0.1)]]
    assert moved[:, 9:14].tolist() == expected

    hidden = made([(0, 1), (2, 1)], [(0, 3), (0, 1)], text, cost_to_go=False, link_radius=0)
    nodes, edges, links = hidden.observe()["graph"]
    assert not nodes[:, 3 * VIEW : LAST].any() and not nodes[:, LAST + 4 : LAST + 9].any()
    assert len(links) == len(edges) == 0
    assert nodes[:, LAST].any()


def test_lifelong_rewards():
    """1 for a goal, after which there is another one, and `progress` for each step nearer to it."""
    env = made([(0, 1), (0, 5)], [(0, 2), (0, 7)], progress=0.25, episode_length=2)
    _, reward, terminated, truncated, info = env.step([RIGHT, LEFT])
    assert info["rewards"].tolist() == [1.25, -0.25] and reward == 0.5
    assert not terminated and not truncated and "eval" not in info
    assert places(env, env.goal)[0] != (0, 2) and places(env, env.goal)[1] == (0, 7)
    _, _, terminated, truncated, info = env.step([STAY, RIGHT])
    assert info["rewards"].tolist() == [0, 0.25]
    assert truncated and not terminated
    assert info["eval"] == {"cost": -0.5, "throughput": 0.5}


def test_one_shot():
    """It ends when all are at their goals at once; leaving one costs what reaching it earned."""
    env = made([(0, 1), (0, 5)], [(0, 2), (0, 7)], task="one-shot", progress=0.0)
    assert env.step([RIGHT, RIGHT])[4]["rewards"].tolist() == [1, 0]
    assert env.step([LEFT, RIGHT])[4]["rewards"].tolist() == [-1, 1]
    _, _, terminated, truncated, info = env.step([RIGHT, STAY])
    assert terminated and not truncated and info["rewards"].tolist() == [1, 0]
    expected = {"cost": 3, "success": 1, "arrived": 1.0, "length": 3, "sum_of_costs": 5}
    assert info["eval"] == expected
    late = made([(0, 1), (0, 5)], [(0, 2), (0, 7)], task="one-shot", episode_length=2)
    late.step([RIGHT, STAY])
    info = late.step([STAY, STAY])[4]
    expected = {"cost": 2, "success": 0, "arrived": 0.5, "length": 2, "sum_of_costs": 3}
    assert info["eval"] == expected


# ---- Tasks ----
def test_suites():
    """128 tasks for each number of robots, of seeds that are never drawn for training, whose
    episodes have the benchmark's length."""
    suites = PogemaEnv.eval_suites
    assert len(suites) == 36 and all(len(tasks) == 128 for tasks in suites.values())
    for suite, length in {"random_8": 256, "mazes_8": 128, "warehouse_32": 256}.items():
        starts = []
        tasks = [suites[suite][0], suites[suite][0], suites[f"one_shot_{suite}"][0]]
        for seed, task in enumerate([*tasks, suites[suite][1]]):
            env = PogemaEnv(**task)
            env.reset(seed=seed)
            assert env.length == (length if env.is_lifelong else 128)
            starts.append(env.place.tolist())
        assert starts[0] == starts[1] == starts[2] != starts[3]


def test_drawn_tasks():
    """Maps and numbers of robots differ, too little room is drawn again."""
    env = PogemaEnv(map=["random", "mazes"], num_robots=[8, 64])
    texts, numbers = set(), set()
    for _ in range(8):
        env.reset()
        texts.add(env.grid.text)
        numbers.add(len(env.place))
        assert len(set(env.place.tolist())) == len(env.place) == len(env.goal)
        assert (env.steps_to_goals()[:, 0] < pogema.FAR).all()
    assert len(texts) == 8 and len(numbers) > 4 and min(numbers) >= 8


# ---- Rules and pictures ----
def test_rules():
    """Alone a robot is at its goal after as many steps as there are; the order of the rules."""
    env = PogemaEnv(num_robots=1, task="one-shot")
    env.reset(seed=3)
    steps = int(env.to_go[0, 0])
    assert pogema.play(env, pogema.shortest, 3)["length"] == steps
    scores = pogema.reference_scores("random_32", 1)
    assert scores["random"] < scores["shortest"] < scores["dodge"]
