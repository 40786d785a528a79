"""The memory tasks: known optima with memory, known scores without, exact seeding."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from cleanrl_graph.envs.memory import MIN_GAP, best_memoryless

ENVS = [
    ("StatelessCartPole-v1", {}),
    ("Recall-v0", {}),
    ("Recall-v0", {"length": 0, "num_cues": 3}),
    ("LastGraphs-v0", {}),
    ("LastGraphs-v0", {"window": 5, "episode_length": 3, "edges_per_node": 0}),
]


def make(env_id, **kwargs):
    return gym.make(f"cleanrl_graph.envs:{env_id}", disable_env_checker=True, **kwargs).unwrapped


def play(env, choose, num_episodes, seed=0):
    """The returns of episodes of the policy choose(observation)."""
    returns = []
    for episode in range(num_episodes):
        observation, _ = env.reset(seed=seed if episode == 0 else None)
        total, done = 0.0, False
        while not done:
            observation, reward, terminated, truncated, _ = env.step(choose(observation))
            total += reward
            done = terminated or truncated
        returns.append(total)
    return np.array(returns)


def flat(observation):
    if isinstance(observation, np.ndarray):
        return observation.dtype.str, observation.tobytes()
    return observation.nodes.tobytes(), observation.edge_links.tobytes()


def trace(env, observation, num_steps):
    rng = np.random.default_rng(5)
    out = [flat(observation)]
    for _ in range(num_steps):
        observation, reward, terminated, _, _ = env.step(rng.integers(env.action_space.n))
        out += [flat(observation), reward, terminated]
        if terminated:
            out.append(flat(env.reset()[0]))
    return out


@pytest.mark.parametrize("env_id, kwargs", ENVS)
def test_spaces_contain_observations(env_id, kwargs):
    env = make(env_id, **kwargs)
    rng = np.random.default_rng(0)
    observation, _ = env.reset(seed=3)
    for _ in range(100):
        assert observation in env.observation_space
        observation, reward, terminated, truncated, info = env.step(
            rng.integers(env.action_space.n)
        )
        assert (
            isinstance(reward, float)
            and terminated in (True, False)
            and truncated is False
            and info == {}
        )
        if terminated:
            assert observation in env.observation_space
            observation, _ = env.reset()


@pytest.mark.parametrize("env_id, kwargs", ENVS)
def test_seed_fixes_everything(env_id, kwargs):
    used, fresh = make(env_id, **kwargs), make(env_id, **kwargs)
    trace(used, used.reset(seed=1)[0], 37)
    first = trace(used, used.reset(seed=7)[0], 300)
    assert first == trace(fresh, fresh.reset(seed=7)[0], 300)
    assert first != trace(fresh, fresh.reset(seed=8)[0], 300)


@pytest.mark.filterwarnings("ignore:.*not in the possible render_modes")
@pytest.mark.parametrize(
    "env_id, kwargs, words",
    [
        ("StatelessCartPole-v1", {"render_mode": "ansi"}, "render_mode"),
        ("Recall-v0", {"length": -1}, "length -1"),
        ("Recall-v0", {"num_cues": 1}, "num_cues 1"),
        ("LastGraphs-v0", {"window": 6}, "window 6"),
        ("LastGraphs-v0", {"episode_length": 0}, "episode_length 0"),
        ("LastGraphs-v0", {"weights": (0.5, 0.5)}, "sum to 1"),
    ],
)
def test_bad_arguments_say_what_is_wrong(env_id, kwargs, words):
    with pytest.raises(ValueError, match=words):
        make(env_id, **kwargs)


# StatelessCartPole


def test_cart_pole_without_velocities():
    env, full = make("StatelessCartPole-v1"), CartPoleEnv()
    observation, whole = env.reset(seed=4)[0], full.reset(seed=4)[0]
    for action in (0, 1, 1, 0, 0, 0):
        assert observation.shape == (2,) and observation.tolist() == whole[[0, 2]].tolist()
        (observation, *outcome), (whole, *expected) = env.step(action), full.step(action)
        assert outcome == expected


def test_cart_pole_whose_velocities_stand_apart():
    """For a critic that sees them; the rest is the same."""
    env, plain = make("StatelessCartPole-v1", velocities=True), make("StatelessCartPole-v1")
    full = CartPoleEnv()
    observation, whole = env.reset(seed=4)[0], full.reset(seed=4)[0]
    places = plain.reset(seed=4)[0]
    for action in (0, 1, 1, 0):
        assert observation in env.observation_space
        assert observation["places"].tolist() == places.tolist()
        assert observation["velocities"].tolist() == whole[[1, 3]].tolist()
        observation, places = env.step(action)[0], plain.step(action)[0]
        whole = full.step(action)[0]


class Balance:
    """Balances with velocities from differences: the second observation on, all that is needed."""

    def __init__(self):
        self.last = None

    def __call__(self, observation):
        velocity = (observation - (observation if self.last is None else self.last)) / 0.02
        self.last = observation
        return int(
            observation[1] + 0.5 * velocity[1] + 0.02 * observation[0] + 0.06 * velocity[0] > 0
        )


@pytest.mark.parametrize("limit, expected", [(None, 500), (30, 30), (-1, 1000)])
def test_step_limit_can_be_changed_and_lifted(limit, expected):
    env = gym.make(
        "cleanrl_graph.envs:StatelessCartPole-v1", disable_env_checker=True, max_episode_steps=limit
    )
    balance = Balance()
    observation, _ = env.reset(seed=0)
    num_steps, truncated = 0, False
    while num_steps < 1000 and not truncated:
        observation, _, terminated, truncated, _ = env.step(balance(observation))
        num_steps += 1
        assert not terminated
    assert num_steps == expected and truncated == (limit != -1)


def test_cart_pole_without_memory_scores_low():
    assert 38 < play(make("StatelessCartPole-v1"), lambda o: int(o[1] > 0), 200).mean() < 45


# Recall


@pytest.mark.parametrize("length, num_cues", [(0, 2), (10, 2), (50, 3)])
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


@pytest.mark.parametrize("num_cues", [2, 4])
def test_recall_without_memory(num_cues):
    rng = np.random.default_rng(0)
    for choose in (lambda o: 0, lambda o: rng.integers(num_cues)):
        score = play(make("Recall-v0", length=1, num_cues=num_cues), choose, 3000).mean()
        assert score == pytest.approx(2 / num_cues - 1, abs=0.06)


# LastGraphs


def value_of(observation):
    nodes = observation.nodes
    assert nodes[:, 0].sum() == 1
    return nodes[nodes[:, 0] == 1, 1][0]


@pytest.mark.parametrize("window", [2, 3, 5])
def test_last_graphs_optimum_from_the_observations_alone(window):
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


@pytest.mark.parametrize(
    "window, best, uniform", [(2, 12.55, 8.0), (3, 9.19, 5.33), (4, 7.48, 4.0), (5, 6.47, 3.2)]
)
def test_last_graphs_scores_without_memory(window, best, uniform):
    """The table of the docstring, by the vectorised simulation and by playing the policy that it
    found."""
    env = make("LastGraphs-v0", window=window)
    score, actions = best_memoryless(window, num_episodes=20_000)
    assert score == pytest.approx(best, abs=0.05)
    assert play(env, lambda o: actions[int(value_of(o) * 99.99)], 1500).mean() == pytest.approx(
        best, abs=0.25
    )
    rng = np.random.default_rng(0)
    assert play(env, lambda o: rng.integers(window), 500).mean() == pytest.approx(uniform, abs=0.35)


def test_last_graphs_before_the_first_are_wrong():
    env = make("LastGraphs-v0")
    for _ in range(20):
        env.reset()
        assert env.best_action() == 0
        env.step(0)
        assert env.best_action() in (0, 1)


def test_last_graphs_sizes_and_unmarked_values():
    env = make("LastGraphs-v0", episode_length=5000)
    observation, _ = env.reset(seed=0)
    sizes, others = [], []
    for _ in range(5000):
        sizes.append(len(observation.nodes))
        others.append(observation.nodes[observation.nodes[:, 0] == 0, 1])
        assert len(observation.edge_links) == 2 * sizes[-1]
        observation, *_ = env.step(0)
    assert 8.5 < np.mean(sizes) < 11.5 and min(sizes) <= 2 and 80 < max(sizes) <= 200
    assert np.concatenate(others).mean() == pytest.approx(0.5, abs=0.01)
