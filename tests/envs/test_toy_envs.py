"""The toy environments: known optima, low random scores, valid spaces, exact seeding; pickled
copies of all."""

import itertools
import pickle

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

ENVS = [
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
ignore_scalar_warning = pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")


def make(env_id, **kwargs):
    return gym.make(f"cleanrl_graph.envs:{env_id}", disable_env_checker=True, **kwargs).unwrapped


def random_action(env, observation, rng):
    """A uniform choice among the allowed ones; a pair of choices where the mask has two columns."""
    mask = observation.get("action_mask")
    if mask is None:
        return rng.integers(len(observation["avail_actions"]))
    if mask.ndim == 2:
        return tuple(rng.choice(np.flatnonzero(column)) for column in mask.T)
    return rng.choice(np.flatnonzero(mask))


def mean_return(env, choose, num_episodes):
    total = 0.0
    for episode in range(num_episodes):
        observation, _ = env.reset(seed=0 if episode == 0 else None)
        done = False
        while not done:
            observation, reward, terminated, truncated, _ = env.step(choose(observation))
            total += reward
            done = terminated or truncated
    return total / num_episodes


def walk_counts(graph, hops):
    """By plain loops: how many walks of `hops` edges from flagged nodes end at each node."""
    count = graph.nodes[:, 0].astype(float)
    for _ in range(hops):
        new = np.zeros(len(count))
        for source, target in graph.edge_links:
            new[target] += count[source]
        count = new
    return count


@pytest.mark.parametrize("hops", [1, 2])
def test_poisson_graph_optimum_from_the_observation_alone(hops):
    env = make("PoissonGraph-v0", hops=hops)

    def best(observation):
        counts = np.where(observation["action_mask"], walk_counts(observation["graph"], hops), -1)
        return counts.argmax()

    assert mean_return(env, best, 30) == env.episode_length


BEST = ("BestOfSet-v0", "avail_actions", 5), ("MatchGoal-v0", "avail_actions", 12)


@pytest.mark.parametrize("env_id, key, optimum", [("BestOfSet-v0", "set", 5), *BEST])
def test_best_of_set_optimum_from_the_observation_alone(env_id, key, optimum):
    env = make(env_id, key=key, **({} if env_id == "MatchGoal-v0" else {"episode_length": 5}))

    def best(observation):
        scores = observation[key] @ observation["query"]
        return np.where(observation.get("action_mask", True), scores, -np.inf).argmax()

    assert mean_return(env, best, 100) == optimum


def test_nearest_to_marked_optimum_from_the_observation_alone():
    """The nearest element is the only one that earns 1, and is in each set."""
    env = make("NearestToMarked-v0")
    sizes = set()

    def nearest(observation):
        places, marks = observation["set"][:, :2], observation["set"][:, 2]
        assert sorted(set(marks)) == [0, 1] and marks.sum() == 1
        assert np.array_equal(observation["action_mask"], 1 - marks)
        sizes.add(len(marks))
        (marked,) = np.flatnonzero(marks)
        distances = [np.hypot(*(place - places[marked])) for place in places.astype(float)]
        distances[marked] = np.inf
        return int(np.argmin(distances))

    assert mean_return(env, nearest, 60) == env.episode_length
    assert sizes == set(range(2, 17))


@pytest.mark.parametrize("env_id, kwargs", ENVS)
def test_random_policy_scores_low(env_id, kwargs):
    env = make(env_id, **kwargs)
    rng = np.random.default_rng(1)
    length = env.episode_length
    score = mean_return(env, lambda o: random_action(env, o, rng), 4000 // length) / length
    assert 0.05 < score < 0.4


def test_node_features_without_edges_do_not_solve_poisson_graph():
    env = make("PoissonGraph-v0")
    for sign in (1, -1):  # flagged first, unflagged first
        worth = lambda o: o["action_mask"] * (2 + sign * o["graph"].nodes[:, 0])
        score = mean_return(env, lambda o: worth(o).argmax(), 250)
        assert score / env.episode_length < 0.4


def test_masked_and_outside_choices_earn_nothing():
    env = make("PoissonGraph-v0")
    observation, _ = env.reset(seed=0)
    for _ in range(200):
        forbidden = np.flatnonzero(observation["action_mask"] == 0)
        action = forbidden[0] if len(forbidden) else len(observation["action_mask"])
        observation, reward, *_ = env.step(action)
        assert reward == 0


@ignore_scalar_warning
@pytest.mark.parametrize("env_id, kwargs", ENVS)
def test_spaces_contain_observations_and_actions(env_id, kwargs):
    env = make(env_id, **kwargs)
    rng = np.random.default_rng(0)
    largest = min(space.n for space in getattr(env.action_space, "spaces", [env.action_space]))
    observation, _ = env.reset(seed=3)
    for _ in range(60):
        assert observation in env.observation_space
        action = random_action(env, observation, rng)
        assert np.all(np.asarray(action) < largest)
        observation, reward, terminated, truncated, _ = env.step(action)
        assert isinstance(reward, float) and terminated in (True, False) and truncated is False
        if terminated:
            observation, _ = env.reset()


def test_link_graph_refuses_links_outside_the_graph():
    env = make("PoissonGraph-v0")
    graph = env.reset(seed=0)[0]["graph"]
    space = env.observation_space["graph"]
    assert graph in space and space.sample() in space
    assert graph._replace(edge_links=graph.edge_links + len(graph.nodes)) not in space
    assert graph._replace(edge_links=graph.edge_links.astype(np.float32)) not in space
    assert graph._replace(nodes=graph.nodes[:, :-1]) not in space


def flat(observation):
    """All the arrays of an observation, with their types and shapes, as bytes."""
    arrays = []
    for key in sorted(observation):
        parts = observation[key] if isinstance(observation[key], tuple) else [observation[key]]
        for part in [part for part in parts if part is not None]:
            arrays.append((key, part.dtype.str, part.shape, part.tobytes()))
    return pickle.dumps(arrays)


def trace(env, observation, num_steps):
    rng = np.random.default_rng(5)
    out = [flat(observation)]
    for _ in range(num_steps):
        observation, reward, terminated, _, _ = env.step(random_action(env, observation, rng))
        out += [flat(observation), reward, terminated]
        if terminated:
            observation, _ = env.reset()
            out.append(flat(observation))
    return out


@pytest.mark.parametrize("env_id, kwargs", ENVS)
def test_seed_fixes_everything(env_id, kwargs):
    used, fresh = make(env_id, **kwargs), make(env_id, **kwargs)
    trace(used, used.reset(seed=1)[0], 37)
    first = trace(used, used.reset(seed=7)[0], 600)
    assert first == trace(fresh, fresh.reset(seed=7)[0], 600)
    assert first != trace(fresh, fresh.reset(seed=8)[0], 600)


# Pickled copies of all shipped environments: what exact resume rests on
IN_TIME = {"reward_unit": "time", "max_episode_steps": 30}
SHIPPED = ENVS + [
    ("StatelessCartPole-v1", {}),
    ("StatelessCartPole-v1", {"max_episode_steps": 9}),
    ("Recall-v0", {"num_cues": 3}),
    ("LastGraphs-v0", {}),
    ("LastGraphs-v0", {"window": 5, "episode_length": 3, "max_episode_steps": 2}),
    ("GraphExplore-v0", {}),
    ("GraphExplore-v0", {"task": "find", "num_nodes": (8, 20), "episode_length": 20}),
    ("JobShop-v0", {}),
    ("JobShop-v0", {"dispatch": "nondelay", "skip_forced": False} | IN_TIME),
    ("JobShop-v0", {"jobs": (3, 6), "machines": (3, 5), "machine_edges": "clique"}),
    ("JobShop-v0", {"instance": "ft06"}),
    ("Atari-v0", {"game": "Pong", "frames": 2}),
]


def any_action(env, observation, rng):
    if isinstance(observation, dict):
        return random_action(env, observation, rng)
    return rng.integers(env.action_space.n)


def all_bytes(tree):
    """What tells two results of an environment apart: types, dtypes, shapes and values, bitwise."""
    if isinstance(tree, dict):
        return [(key, all_bytes(tree[key])) for key in sorted(tree)]
    if isinstance(tree, (tuple, list)):
        return [type(tree), *map(all_bytes, tree)]
    if isinstance(tree, np.ndarray):
        return tree.dtype, tree.shape, tree.tobytes()
    return type(tree), repr(tree)


@pytest.mark.parametrize("num_steps", [0, 5, 300])
@pytest.mark.parametrize("env_id, kwargs", SHIPPED)
def test_pickled_copies_go_on_alike(env_id, kwargs, num_steps):
    """A copy goes on bitwise as its original, in the middle of an episode, through its end and a
    time limit, and through the end of a block of observations; that it goes on does not touch the
    original."""
    if env_id == "Atari-v0":
        pytest.importorskip("ale_py", reason="it is no requirement of this project")
    env = gym.make(f"cleanrl_graph.envs:{env_id}", disable_env_checker=True, **kwargs)
    rng, observation = np.random.default_rng(0), env.reset(seed=1)[0]

    def go_on(env, observation, seed, num_steps):
        rng, rows = np.random.default_rng(seed), []
        for _ in range(num_steps):
            observation, *outcome = env.step(any_action(env, observation, rng))
            rows.append(all_bytes((observation, outcome)))
            if outcome[1] or outcome[2]:
                observation, info = env.reset()
                rows.append(all_bytes((observation, info)))
        return rows

    for _ in range(num_steps):
        observation, _, terminated, truncated, _ = env.step(any_action(env, observation, rng))
        if terminated or truncated:
            observation, _ = env.reset()
    saved = cloudpickle.dumps(env)
    assert len(saved) < 600_000
    first, second = cloudpickle.loads(saved), cloudpickle.loads(saved)
    expected = go_on(first, observation, 5, 300)
    assert go_on(env, observation, 5, 300) == expected == go_on(second, observation, 5, 300)


@pytest.mark.parametrize("env_id, kwargs", SHIPPED[:-1])
def test_pickled_before_the_first_reset(env_id, kwargs):
    """As an environment is at the start of a run."""
    env = gym.make(f"cleanrl_graph.envs:{env_id}", disable_env_checker=True, **kwargs)
    copy = cloudpickle.loads(cloudpickle.dumps(env))
    assert all_bytes(env.reset(seed=4)) == all_bytes(copy.reset(seed=4))


def test_sizes_are_long_tailed():
    env = make("PoissonGraph-v0")
    env.reset(seed=0)
    sizes = [len(env.step(0)[0]["action_mask"]) for _ in range(20_000)]
    assert 9 < np.mean(sizes) < 11 and 1 <= min(sizes) <= 2 and 100 < max(sizes) <= 200
    env = make("PoissonGraph-v0", mean_nodes=(300,), weights=(1.0,))
    assert len(env.reset(seed=0)[0]["action_mask"]) == 200

    env = make("BestOfSet-v0")
    env.reset(seed=0)
    sizes = [len(env.step(0)[0]["set"]) for _ in range(5_000)]
    assert min(sizes) == 1 and 6 < np.mean(sizes) < 10 and 32 < max(sizes) <= 64

    env = make("MatchGoal-v0")
    sizes = [len(env.reset(seed=0)[0]["avail_actions"])]
    sizes += [len(env.step(0)[0]["avail_actions"]) for _ in range(5_000)]
    assert min(sizes) == 1 and 29 < np.mean(sizes) < 32 and max(sizes) == 60


def test_declared_max_changes_the_action_space_only():
    small, large = make("PoissonGraph-v0"), make("PoissonGraph-v0", declared_max=2000)
    assert (small.action_space.n, large.action_space.n) == (200, 2000)
    assert trace(small, small.reset(seed=0)[0], 300) == trace(large, large.reset(seed=0)[0], 300)


@pytest.mark.parametrize(
    "env_id, kwargs, words",
    [
        ("PoissonGraph-v0", {"hops": 3}, "hops is 3"),
        ("PoissonGraph-v0", {"weights": (0.5, 0.5)}, "sum to 1"),
        ("PoissonGraph-v0", {"declared_max": 10}, "below max_nodes"),
        ("BestOfSet-v0", {"key": "items"}, "avail_actions"),
        ("PairNodes-v0", {"num_pairs": 9}, "num_colours"),
    ],
)
def test_bad_arguments_say_what_is_wrong(env_id, kwargs, words):
    with pytest.raises(ValueError, match=words):
        make(env_id, **kwargs)


# PairNodes: what a chain and what independent heads can reach


def product_return(p, q, num_steps):
    """Exact return of independent heads with probabilities p of the left and q of the right nodes,
    [K] each."""
    return np.sum(p * q) + (num_steps - 1) * np.sum(p * (1 - p) * q)


def test_best_independent_return_by_brute_force():
    """On a grid of all p for 3 pairs; for a given p the return is linear in q, so the best q picks
    one node."""
    env = make("PairNodes-v0", num_pairs=3)
    ticks = np.arange(61) / 60
    pairs = [(a, b) for a, b in itertools.product(ticks, ticks) if a + b <= 1]
    of = lambda a, b, q: product_return(np.array([a, b, 1 - a - b]), q, env.episode_length)
    best = max(of(a, b, q) for a, b in pairs for q in np.eye(3))
    assert best <= env.best_independent_return + 1e-9
    assert best > 0.999 * env.best_independent_return
    rng = np.random.default_rng(0)
    for _ in range(2000):
        p, q = rng.dirichlet(np.full(6, 0.3)), rng.dirichlet(np.full(6, 0.3))
        assert product_return(p, q, 16) <= make("PairNodes-v0").best_independent_return


def test_pair_nodes_scores_of_played_policies():
    """A uniform chain, the best independent heads and a policy with memory reach the returns of the
    docstring."""
    env = make("PairNodes-v0")
    rng = np.random.default_rng(0)

    def match_of(observation, left):
        nodes = observation["graph"].nodes
        same = (nodes[:, :-2] == nodes[left, :-2]).all(1) & (nodes[:, -1] == 1)
        return np.flatnonzero(same)[0]

    def chain(observation):
        left = rng.choice(np.flatnonzero(observation["action_mask"][:, 0]))
        return left, match_of(observation, left)

    p = env.episode_length / (2 * (env.episode_length - 1))

    def independent(observation):
        left = np.flatnonzero(observation["action_mask"][:, 0])
        return (left[0] if rng.random() < p else left[1]), match_of(observation, left[0])

    def with_memory(observation):
        left = np.flatnonzero(observation["action_mask"][:, 0])[env.num_steps % 2]
        return left, match_of(observation, left)

    def greedy(observation):
        left = np.flatnonzero(observation["action_mask"][:, 0])[0]
        return left, match_of(observation, left)

    def uniform(observation):
        return random_action(env, observation, rng)

    assert mean_return(env, greedy, 5) == 1
    assert mean_return(env, uniform, 1000) == pytest.approx(2.25, abs=0.2)
    assert mean_return(env, chain, 400) == pytest.approx(env.best_chain_return, abs=0.25)
    assert mean_return(env, independent, 400) == pytest.approx(env.best_independent_return, abs=0.4)
    assert mean_return(env, with_memory, 5) == env.episode_length
    assert env.best_independent_return < env.best_chain_return / 3


def test_pair_nodes_observation_is_constant_within_an_episode():
    """Otherwise independent heads could share the observation as a source of randomness."""
    env = make("PairNodes-v0")
    first, _ = env.reset(seed=0)
    for _ in range(env.episode_length):
        assert flat(env.step((0, 0))[0]) == flat(first)
    assert flat(env.reset()[0]) != flat(first)
