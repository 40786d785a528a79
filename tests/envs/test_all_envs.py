"""What each of our environments promises: observations are in its space, a seed fixes everything,
a pickled copy goes on as the original, it draws pictures, and wrong arguments are sentences."""

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

pytestmark = pytest.mark.filterwarnings("ignore")  # of gymnasium, about scalars and render modes
IN_TIME = {"reward_unit": "time", "max_episode_steps": 30}
EXPLORE = {"num_nodes": (8, 20), "episode_length": 20}
TOY = [
    ("PoissonGraph-v0", {}),
    ("PoissonGraph-v0", {"hops": 2, "edges_per_node": 2, "num_features": 3}),
    ("BestOfSet-v0", {}),
    ("BestOfSet-v0", {"stack": False, "episode_length": 3}),
    ("BestOfSet-v0", {"key": "avail_actions"}),
    ("MatchGoal-v0", {}),
    ("NearestToMarked-v0", {}),
    ("NearestToMarked-v0", {"max_size": 40, "episode_length": 3}),
    ("PairNodes-v0", {}),
    ("SkillGraph-v0", {}),
    ("SkillGraph-v0", {"num_skills": 3, "max_nodes": 3, "skill": 2}),
]
FIXED = [
    ("FlexibleJobShop-v0", {"instance": "mk01"}),
    ("DagSchedule-v0", {"num_jobs": 4, "workload": 3}),
    ("VertexCover-v0", {"nodes": (20,), "instance": 7}),
    ("TSP-v0", {"instance": 7}),
    ("TSPInsert-v0", {"instance": 7}),
    ("CVRP-v0", {"instance": 7}),
    ("CVRPSavings-v0", {"instance": 7}),
]
ENVS = TOY + FIXED
ENVS += [
    ("StatelessCartPole-v1", {}),
    ("StatelessCartPole-v1", {"max_episode_steps": 9, "velocities": True}),
    ("Recall-v0", {}),
    ("Recall-v0", {"length": 0, "num_cues": 3}),
    ("MemoryLength-v0", {"length": 3}),
    ("TMaze-v0", {"length": 3}),
    ("LastGraphs-v0", {}),
    ("LastGraphs-v0", {"window": 5, "episode_length": 3, "max_episode_steps": 2}),
    ("LastGraphs-v0", {"edges_per_node": 0}),
    ("Courier-v0", {"num_houses": 6, "num_chords": 1, "num_steps": 3}),
    ("GraphExplore-v0", EXPLORE | {"task": "find", "num_colours": 5}),
    ("GraphExplore-v0", {"num_nodes": (3, 4), "episode_length": 7, "radius_degree": 0.0}),
    ("JobShop-v0", {"dispatch": "nondelay", "skip_forced": False} | IN_TIME),
    ("JobShop-v0", {"jobs": (3, 6), "machines": (3, 5), "machine_edges": "clique"}),
    ("JobShop-v0", {"instance": "ft06"}),
    ("FlexibleJobShop-v0", {"jobs": (2, 6), "machines": (2, 4), "window": 3}),
    ("DagSchedule-v0", {"num_jobs": 4, "num_executors": 5, "sizes": (2,), "load": 1.0}),
    ("TSP-v0", {"cities": (2, 9)}),
    ("TSPInsert-v0", {"cities": (2, 3, 9)}),
    ("CVRP-v0", {"customers": (1, 9)}),
    ("CVRPSavings-v0", {"customers": (2, 9)}),
    ("Crowd-v0", {}),
    ("Pogema-v0", {"num_robots": 20}),
    ("Atari-v0", {"game": "Pong", "frames": 2}),
]


def make(env_id, **kwargs):
    if env_id == "Atari-v0":
        pytest.importorskip("ale_py", reason="it is no requirement of this project")
    return gym.make(f"cleanrl_graph.envs:{env_id}", disable_env_checker=True, **kwargs)


def random_action(env, observation, rng):
    """A uniform choice among the allowed ones, for each row where all act."""
    space = env.action_space
    if isinstance(space, spaces.Sequence):
        num, options = len(observation["node_ids"]), np.arange(space.feature_space.n)
        mask = observation.get("action_mask", np.ones((num, len(options))))
        return np.array([rng.choice(options[own > 0]) for own in mask], np.int64)
    if isinstance(space, spaces.Dict):
        node = rng.choice(np.flatnonzero(observation["action_mask"]))
        return {"node": node, "executors": rng.integers(space["executors"].n)}
    if not isinstance(observation, dict) or "places" in observation:
        return rng.integers(space.n)
    if "action_mask" not in observation:
        return rng.integers(len(observation["avail_actions"]))
    mask = observation["action_mask"]
    if mask.ndim == 2:
        return tuple(rng.choice(np.flatnonzero(column)) for column in mask.T)
    return rng.choice(np.flatnonzero(mask))


def all_bytes(tree):
    """What tells two results of an environment apart: types, dtypes, shapes and values, bitwise."""
    if isinstance(tree, dict):
        return [(key, all_bytes(tree[key])) for key in sorted(tree)]
    if isinstance(tree, (tuple, list)):
        return [type(tree), *map(all_bytes, tree)]
    if isinstance(tree, np.ndarray):
        return tree.dtype, tree.shape, tree.tobytes()
    return type(tree), repr(tree)


def trace(env, observation, num_steps, seed=5):
    """(all that random actions lead to, as bytes; the last observation); at first and where
    episodes end it is checked that it is in the spaces."""
    rng, rows = np.random.default_rng(seed), [all_bytes(observation)]
    for t in range(num_steps):
        assert t > 20 or observation in env.observation_space
        action = random_action(env, observation, rng)
        assert t > 20 or action in env.action_space
        observation, reward, terminated, truncated, info = env.step(action)
        assert isinstance(reward, float) and {terminated, truncated} <= {True, False}
        rows.append(all_bytes((observation, reward, terminated, truncated, info)))
        if terminated or truncated:
            assert t > 100 or observation in env.observation_space
            observation, info = env.reset()
            rows.append(all_bytes((observation, info)))
    return rows, observation


NUM_STEPS = {"PoissonGraph-v0": 300, "BestOfSet-v0": 300, "MatchGoal-v0": 300}  # blocks of 256


@pytest.mark.parametrize("env_id, kwargs", ENVS)
def test_seeds_and_copies(env_id, kwargs):
    """A seed fixes everything, whatever came before it; another one is another episode. A pickled
    copy goes on as the original, before the first reset, in the middle of an episode, and after
    ends of episodes and of blocks of observations.
    They are small: Pogema's lack the map's costs."""
    used, fresh = make(env_id, **kwargs), make(env_id, **kwargs)
    unused = cloudpickle.loads(cloudpickle.dumps(fresh))
    trace(used, used.reset(seed=1)[0], 23)
    first = trace(used, used.reset(seed=7)[0], 60)[0]
    assert first == trace(unused, unused.reset(seed=7)[0], 60)[0]
    assert first == trace(fresh, fresh.reset(seed=7)[0], 60)[0]
    other = trace(fresh, fresh.reset(seed=8)[0], 60)[0]
    assert (first == other) == ("instance" in kwargs)
    for num_steps in (5, NUM_STEPS.get(env_id, 30)):
        observation = trace(fresh, fresh.reset(seed=1)[0], num_steps)[1]
        saved = cloudpickle.dumps(fresh)
        assert len(saved) < (60_000 if env_id == "Pogema-v0" else 600_000)
        each = (cloudpickle.loads(saved), fresh)
        rows = [trace(env, observation, 25)[0] for env in each]
        assert rows[0] == rows[1]


@pytest.mark.parametrize("env_id, kwargs", FIXED)
def test_gymnasium_checker(env_id, kwargs):
    """Random actions are not all allowed, so the checker takes those that are."""
    env, rng = make(env_id, **kwargs).unwrapped, np.random.default_rng(0)
    env.reset(seed=0)
    observation = getattr(env, "observation", lambda: {"action_mask": env.mask})
    env.action_space.sample = lambda *_: random_action(env, observation(), rng)
    check_env(env, skip_render_check=True)


@pytest.mark.parametrize(
    "env_id, kwargs, shape, num_colours",
    [
        ("DagSchedule-v0", {"num_jobs": 5}, (300, 800, 3), 6),
        ("GraphExplore-v0", {}, (400, 400, 3), 4),
        ("GraphExplore-v0", {"task": "find"}, (400, 400, 3), 4),
        ("JobShop-v0", {"instance": "ft06"}, (148, 808, 3), 9),
        ("FlexibleJobShop-v0", {"instance": "mk01"}, (148, 808, 3), 13),
        ("Crowd-v0", {}, (400, 400, 3), 4),
        ("Pogema-v0", {"map": "........\n" * 8, "num_robots": 3}, (320, 320, 3), 4),
        ("VertexCover-v0", {}, (480, 480, 3), 4),
        ("TSP-v0", {}, (480, 480, 3), 4),
        ("TSPInsert-v0", {}, (480, 480, 3), 4),
        ("CVRP-v0", {}, (480, 480, 3), 5),
    ],
)
def test_pictures(env_id, kwargs, shape, num_colours):
    """None before the first reset and without the mode; what happens changes them."""
    env, plain = make(env_id, render_mode="rgb_array", **kwargs).unwrapped, make(env_id, **kwargs)
    assert env.render() is None
    observation, first = env.reset(seed=0)[0], env.render()
    plain.reset(seed=0)
    assert plain.unwrapped.render() is None
    ended, rng = False, np.random.default_rng(0)
    while not ended:
        observation, _, *ends, _ = env.step(random_action(env, observation, rng))
        ended = any(ends)
    image = env.render()
    assert image.dtype == np.uint8 and image.shape == shape
    assert len(np.unique(image.reshape(-1, 3), axis=0)) >= num_colours
    assert image.shape != first.shape or (image != first).any()
    if "JobShop" in env_id:  # the machines' rows
        busy = (image[4 + 24 * np.arange(6) + 10] != 255).any(axis=2).mean()
        assert 0.2 < busy < 1
    with pytest.raises(ValueError, match="render_mode"):
        make(env_id, render_mode="ansi", **kwargs)


WRONG = [  # arguments, and what the sentence says
    ("PoissonGraph-v0", {"declared_max": 10}, "below max_nodes"),
    ("BestOfSet-v0", {"key": "items"}, "avail_actions"),
    ("Recall-v0", {"num_cues": 1}, "num_cues 1"),
    ("LastGraphs-v0", {"window": 6}, "window 6"),
    ("Courier-v0", {"num_chords": 6}, "num_chords 6"),
    ("GraphExplore-v0", {"task": "return"}, "task is 'return'"),
    ("JobShop-v0", {"instance": "la99"}, "Unknown job-shop instance 'la99'"),
    ("JobShop-v0", {"instance": {"times": [[1, 2]], "machines": [[0, 0]]}}, "Job 0 must visit"),
    ("FlexibleJobShop-v0", {"instance": "mk99"}, "Unknown flexible job-shop instance 'mk99'"),
    (
        "FlexibleJobShop-v0",
        {"instance": {"times": [[1, 2], [0, 0]], "operations": [2]}},
        "Operation 1 has no machine",
    ),
    ("DagSchedule-v0", {"jobs": [([1, 2], [1.0, 1.0], [(1, 0)])]}, "Job 0: each edge"),
    ("VertexCover-v0", {"nodes": (20,), "instance": 100}, "below 100"),
    ("TSP-v0", {"cities": (1, 20)}, "cities must be numbers of at least 2"),
    ("CVRP-v0", {"customers": ()}, "customers must be numbers of at least 1"),
    ("Pogema-v0", {"map": "@#$\n"}, "a way from each start"),
]


@pytest.mark.parametrize("env_id, kwargs, sentence", WRONG)
def test_wrong_arguments(env_id, kwargs, sentence):
    """A sentence names the argument."""
    with pytest.raises(ValueError, match=sentence):
        make(env_id, **kwargs).reset(seed=0)


FORBIDS = {
    "JobShop-v0": "Action {} is not legal",
    "FlexibleJobShop-v0": "Action {} is not legal",
    "DagSchedule-v0": "Node {} is not legal",
    "VertexCover-v0": "Node {} covers no edge",
    "TSP-v0": "Row {} cannot be chosen",
    "TSPInsert-v0": "Row {} cannot be chosen",
    "CVRP-v0": "Row {} cannot be chosen",
}


@pytest.mark.parametrize("env_id", FORBIDS)
def test_wrong_actions(env_id):
    """A step before the first reset, and a row that is masked or not there, are sentences."""
    env = make(env_id).unwrapped
    own = lambda row: {"node": row, "executors": 0} if env_id == "DagSchedule-v0" else row
    with pytest.raises(ValueError, match="call reset|covers no edge|cannot be chosen"):
        env.step(own(0))
    observation, _ = env.reset(seed=0)
    observation, *_ = env.step(random_action(env, observation, np.random.default_rng(0)))
    mask = observation["action_mask"]
    for row in (mask.argmin(), -1, len(mask)):
        with pytest.raises(ValueError, match=FORBIDS[env_id].format(row)):
            env.step(own(row))


@pytest.mark.parametrize("env_id, kwargs", TOY)
def test_random_policy_scores_low(env_id, kwargs):
    """The toy environments' rewards per step are 1 at best."""
    env, rng = make(env_id, **kwargs).unwrapped, np.random.default_rng(1)
    rewards, observation = [], env.reset(seed=0)[0]
    for _ in range(2000):
        observation, reward, terminated, *_ = env.step(random_action(env, observation, rng))
        rewards.append(reward)
        observation = env.reset()[0] if terminated else observation
    assert 0.05 < np.mean(rewards) < 0.4
