"""The toy environments and the memory tasks have the optima that they promise, with and without
memory: policies that see the observation alone reach them."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from cleanrl_graph.envs.memory import MIN_GAP, best_memoryless


def make(env_id, **kwargs):
    return gym.make(f"cleanrl_graph.envs:{env_id}", disable_env_checker=True, **kwargs).unwrapped


def play(env, choose, num_episodes):
    """The returns of episodes of the policy choose(observation)."""
    returns = []
    for episode in range(num_episodes):
        observation, _ = env.reset(seed=0 if episode == 0 else None)
        total, done = 0.0, False
        while not done:
            observation, reward, terminated, truncated, _ = env.step(choose(observation))
            total += reward
            done = terminated or truncated
        returns.append(total)
    return np.array(returns)


# ---- What an observation shows is enough ----
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
def test_poisson_graph_optimum(hops):
    env = make("PoissonGraph-v0", hops=hops)

    def best(observation):
        counts = np.where(observation["action_mask"], walk_counts(observation["graph"], hops), -1)
        return counts.argmax()

    assert (play(env, best, 30) == env.episode_length).all()


@pytest.mark.parametrize(
    "env_id, key", [("BestOfSet-v0", "set"), ("MatchGoal-v0", "avail_actions")]
)
def test_best_of_set_optimum(env_id, key):
    env = make(env_id, key=key, episode_length=5)

    def best(observation):
        scores = observation[key] @ observation["query"]
        return np.where(observation.get("action_mask", True), scores, -np.inf).argmax()

    assert (play(env, best, 100) == 5).all()


def test_nearest_to_marked_optimum():
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

    assert (play(env, nearest, 60) == env.episode_length).all()
    assert sizes == set(range(2, 17))


def test_node_features_without_edges_do_not_solve_poisson_graph():
    env = make("PoissonGraph-v0")
    for sign in (1, -1):  # flagged first, unflagged first
        worth = lambda o: o["action_mask"] * (2 + sign * o["graph"].nodes[:, 0])
        assert play(env, lambda o: worth(o).argmax(), 250).mean() < 0.4 * env.episode_length


def test_masked_and_outside_choices_earn_nothing():
    env = make("PoissonGraph-v0")
    observation, _ = env.reset(seed=0)
    for _ in range(200):
        forbidden = np.flatnonzero(observation["action_mask"] == 0)
        action = forbidden[0] if len(forbidden) else len(observation["action_mask"])
        observation, reward, *_ = env.step(action)
        assert reward == 0


@pytest.mark.parametrize(
    "env_id, key, num, least, mean, most",
    [
        ("PoissonGraph-v0", "action_mask", 20_000, (1, 2), (9, 11), (101, 200)),
        ("BestOfSet-v0", "set", 5_000, (1, 1), (6, 10), (33, 64)),
        ("MatchGoal-v0", "avail_actions", 5_000, (1, 1), (29, 32), (60, 60)),
    ],
)
def test_sizes_are_long_tailed(env_id, key, num, least, mean, most):
    env = make(env_id)
    sizes = [len(env.reset(seed=0)[0][key])]
    sizes += [len(env.step(0)[0][key]) for _ in range(num)]
    for found, (low, high) in zip((min(sizes), np.mean(sizes), max(sizes)), (least, mean, most)):
        assert low <= found <= high


# ---- PairNodes: what a chain and what independent heads can reach ----
def product_return(p, q, num_steps):
    """Exact return of independent heads with probabilities p and q of the nodes, [K] each."""
    return np.sum(p * q) + (num_steps - 1) * np.sum(p * (1 - p) * q)


def test_best_independent_return_by_brute_force():
    """On a grid of all p for 3 pairs; the return is linear in q, so the best q picks one node."""
    env = make("PairNodes-v0", num_pairs=3)
    ticks = np.arange(31) / 30
    pairs = [(a, b) for a, b in itertools.product(ticks, ticks) if a + b <= 1]
    of = lambda a, b, q: product_return(np.array([a, b, 1 - a - b]), q, env.episode_length)
    best = max(of(a, b, q) for a, b in pairs for q in np.eye(3))
    assert 0.999 * env.best_independent_return < best <= env.best_independent_return + 1e-9
    rng = np.random.default_rng(0)
    for _ in range(500):
        p, q = rng.dirichlet(np.full(6, 0.3)), rng.dirichlet(np.full(6, 0.3))
        assert product_return(p, q, 16) <= make("PairNodes-v0").best_independent_return


def test_pair_nodes_scores_of_played_policies():
    """A uniform chain, the best independent heads and a policy with memory reach the returns of the
    docstring. The observation is the same all episode, or independent heads could use it as a
    source of randomness."""
    env = make("PairNodes-v0")
    rng = np.random.default_rng(0)
    p = env.episode_length / (2 * (env.episode_length - 1))
    first = env.reset(seed=0)[0]
    assert all(repr(env.step((0, 0))[0]) == repr(first) for _ in range(env.episode_length))
    assert repr(env.reset()[0]) != repr(first)

    def chosen(pick, told=None):
        """A policy: the left node, and the right one that fits the node that was told, or it."""

        def choose(observation):
            lefts, nodes = np.flatnonzero(observation["action_mask"][:, 0]), observation["graph"][0]
            left = pick(lefts)
            shown = left if told is None else told(lefts)
            same = (nodes[:, :-2] == nodes[shown, :-2]).all(1) & (nodes[:, -1] == 1)
            return left, np.flatnonzero(same)[0]

        return choose

    first_of = lambda lefts: lefts[0]
    uniform = lambda o: tuple(rng.choice(np.flatnonzero(own)) for own in o["action_mask"].T)
    independent = chosen(lambda lefts: lefts[int(rng.random() >= p)], first_of)
    of = lambda policy, num: play(env, policy, num).mean()
    assert of(chosen(first_of), 5) == 1
    assert of(uniform, 1000) == pytest.approx(2.25, abs=0.2)
    assert of(chosen(rng.choice), 400) == pytest.approx(env.best_chain_return, abs=0.25)
    assert of(independent, 400) == pytest.approx(env.best_independent_return, abs=0.4)
    assert of(chosen(lambda lefts: lefts[env.num_steps % 2]), 5) == env.episode_length
    assert env.best_independent_return < env.best_chain_return / 3


# ---- StatelessCartPole ----
def test_cart_pole_without_velocities():
    """Or with velocities that stand apart, for a critic that sees them; the rest is the same."""
    env, full = make("StatelessCartPole-v1"), CartPoleEnv()
    apart = make("StatelessCartPole-v1", velocities=True)
    outcomes = [each.reset(seed=4) for each in (env, full, apart)]
    for action in (0, 1, 1, 0, 0, 0):
        (observation, *rest), (whole, *expected), (parts, *same) = outcomes
        assert observation.tolist() == whole[[0, 2]].tolist() and rest == expected == same
        assert parts["places"].tolist() == observation.tolist()
        assert parts["velocities"].tolist() == whole[[1, 3]].tolist()
        outcomes = [each.step(action) for each in (env, full, apart)]


@pytest.mark.parametrize("limit, expected", [(None, 500), (-1, 1000)])
def test_step_limit_can_be_changed_and_lifted(limit, expected):
    """It is reached by a policy whose velocities are differences of observations."""
    env_id = "cleanrl_graph.envs:StatelessCartPole-v1"
    env = gym.make(env_id, disable_env_checker=True, max_episode_steps=limit)
    observation, _ = env.reset(seed=0)
    num_steps, truncated, last = 0, False, observation
    while num_steps < 1000 and not truncated:
        place, angle = observation
        speed, turn = (observation - last) / 0.02
        last = observation
        action = int(angle + 0.5 * turn + 0.02 * place + 0.06 * speed > 0)
        observation, _, terminated, truncated, _ = env.step(action)
        num_steps += 1
        assert not terminated
    assert num_steps == expected and truncated == (limit != -1)


def test_cart_pole_without_memory_scores_low():
    assert 38 < play(make("StatelessCartPole-v1"), lambda o: int(o[1] > 0), 200).mean() < 45


# ---- Recall ----
@pytest.mark.parametrize("length, num_cues", [(0, 2), (10, 3)])
def test_recall_shows_the_cue_once(length, num_cues):
    env = make("Recall-v0", length=length, num_cues=num_cues)
    cues = []
    for episode in range(30):
        observation, _ = env.reset(seed=0 if episode == 0 else None)
        assert observation.sum() == 1 and observation[-1] == 0
        cues.append(observation.argmax())
        for step in range(length + 1):
            observation, reward, terminated, _, _ = env.step((cues[-1] + step) % num_cues)
            assert reward == 0 and not terminated
            assert not observation[:-1].any() and observation[-1] == (step == length)
        action = (cues[-1] + episode % 2) % num_cues
        observation, reward, terminated, _, _ = env.step(action)
        assert reward == (1 if episode % 2 == 0 else -1) and terminated and not observation.any()
    assert set(cues) == set(range(num_cues))


def test_recall_without_memory():
    score = play(make("Recall-v0", length=1, num_cues=4), lambda o: 0, 3000).mean()
    assert score == pytest.approx(2 / 4 - 1, abs=0.06)


def test_memory_length_is_recall_with_a_clock():
    env, flagged = make("MemoryLength-v0", length=3), make("Recall-v0", length=3)
    for seed in range(5):
        observations = [env.reset(seed=seed)[0]]
        expected = [flagged.reset(seed=seed)[0]]
        for action in (0, 1, 0, 1, 0):
            observation, *outcome = env.step(action)
            other, *others = flagged.step(action)
            assert outcome == others
            observations.append(observation)
            expected.append(other)
        observations, expected = np.array(observations), np.array(expected)
        assert np.array_equal(observations[:, :-1], expected[:, :-1])
        assert observations[:, -1] == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])


# ---- TMaze ----
def maze(policy, length=4, seed=0):
    """Observations, as what they show, and rewards of an episode; policy(goal, step) -> action."""
    env = make("TMaze-v0", length=length)
    observation, _ = env.reset(seed=seed)
    goal, seen, rewards, done = int(observation.argmax()), [], [], False
    while not done:
        assert observation.sum() == 1
        seen.append(int(observation.argmax()))
        observation, reward, done, _, _ = env.step(policy(goal, len(rewards)))
        rewards.append(reward)
    return goal, seen, rewards


def test_who_remembers_the_goal_of_the_maze_has_the_return_1():
    goals = set()
    for seed in range(10):
        right = lambda goal, step: 0 if step < 4 else 2 + goal
        goal, seen, rewards = maze(right, seed=seed)
        assert seen == [goal, 2, 2, 2, 3] and rewards == [0, 0, 0, 0, 1]
        _, _, rewards = maze(lambda goal, step: 0 if step < 4 else 3 - goal, seed=seed)
        assert rewards == [0] * 5
        goals.add(goal)
    assert goals == {0, 1}


def test_there_is_no_time_to_lose_in_the_maze():
    _, seen, rewards = maze(lambda goal, step: 1)
    assert seen[1:] == [2] * 4 and rewards == [-1 / 4] * 4 + [0]
    goal, seen, rewards = maze(lambda goal, step: (0, 0, 1, 0, 2 + goal)[step])
    assert seen == [goal, 2, 2, 2, 2] and rewards == [0, 0, -1 / 4, -1 / 4, 0]
    _, seen, rewards = maze(lambda goal, step: (0, 0, 3, 0, 0)[step])  # turns in the corridor
    assert rewards == [0, 0, -1 / 4, -1 / 4, 0]


# ---- LastGraphs ----
def value_of(observation):
    nodes = observation.nodes
    assert nodes[:, 0].sum() == 1
    return nodes[nodes[:, 0] == 1, 1][0]


@pytest.mark.parametrize("window", [2, 5])
def test_last_graphs_optimum_from_the_observations_alone(window):
    """Those before the first one are wrong."""
    env = make("LastGraphs-v0", window=window)
    memory = []

    def best(observation):
        if env.num_steps == 0:
            memory.clear()
        recent = memory[: window - 1]
        memory.insert(0, value_of(observation))
        assert not recent or np.abs(np.array(recent) - memory[0]).min() > MIN_GAP - 1e-6
        action = int(np.argmax(memory[:window]))
        assert action == env.best_action()
        return action

    assert (play(env, best, 30) == env.episode_length).all()


@pytest.mark.parametrize("window, best", [(3, 9.19), (5, 6.47)])
def test_last_graphs_scores_without_memory(window, best):
    """The docstring's table, by the vectorised simulation and by playing the policy it found."""
    env = make("LastGraphs-v0", window=window)
    score, actions = best_memoryless(window, num_episodes=20_000)
    assert score == pytest.approx(best, abs=0.05)
    found = play(env, lambda o: actions[int(value_of(o) * 99.99)], 1500).mean()
    assert found == pytest.approx(best, abs=0.25)
