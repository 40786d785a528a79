"""PettingZoo-v0: the rows are the agents that live, with ids of their own, actions and rewards are
theirs, and who is truncated is handed over. On parallel environments written here and, where mpe2
is installed, on its own."""

import sys
import types

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import mismatch, run, vector

from cleanrl_graph.envs.petting_zoo import PettingZooEnv


class Arena:
    """A parallel environment that follows a script. `steps[t]` is what step t does: the agents that
    are there afterwards, and who is terminated or truncated in it. Agent k observes (10 * episode +
    t, k, ...) and earns k + action."""

    possible_agents = ["archer_0", "archer_1", "knight_0", "knight_1"]
    metadata = {"render_modes": ["rgb_array"], "render_fps": 7, "name": "arena"}

    def __init__(self, steps=(), first=None, lists_agents=True, render_mode=None, **spaces_of):
        self.steps, self.render_mode, self.spaces_of = steps, render_mode, spaces_of
        self.names = list(self.possible_agents)
        if not lists_agents:
            self.possible_agents = None
        self.first = first or self.names
        self.seeds, self.actions, self.infos, self.episode = [], [], {}, 0

    def observation_space(self, agent):
        return self.spaces_of.get(agent.split("_")[0], (vector(3, high=np.inf), None))[0]

    def action_space(self, agent):
        return self.spaces_of.get(agent.split("_")[0], (None, spaces.Discrete(3)))[1]

    def observe(self, agent):
        space = self.observation_space(agent)
        if space.shape is None:
            return None
        obs = np.zeros(space.shape, space.dtype)
        obs.flat[:2] = self.t, self.names.index(agent)
        return obs

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.t, self.agents = 0, list(self.first)
        return {agent: self.observe(agent) for agent in self.agents}, self.infos

    def step(self, actions):
        assert list(actions) == self.agents or set(actions) == set(self.agents)
        self.actions.append(actions)
        agents, terminated, truncated = self.steps[self.t]
        self.t += 1
        seen = dict.fromkeys([*self.agents, *agents])
        earned = lambda agent: self.names.index(agent) + float(actions[agent])
        rewards = {agent: earned(agent) for agent in reversed(self.agents)}  # not in their order
        ends = [{agent: agent in who for agent in self.agents} for who in (terminated, truncated)]
        self.agents = list(agents)
        return {agent: self.observe(agent) for agent in seen}, rewards, *ends, {}

    def render(self):
        return np.full((4, 4, 3), self.t, np.uint8)

    def close(self):
        pass


A0, A1, K0, K1 = Arena.possible_agents


@pytest.fixture(autouse=True)
def arena(monkeypatch):
    """A module of environments and functions, as somebody else's would be."""
    module = types.ModuleType("arena")
    module.parallel_env = Arena
    module.ring, module.masked, module.chance = ring, Masked, Chance
    monkeypatch.setitem(sys.modules, "arena", module)


def make(**kwargs):
    return PettingZooEnv(**{"env": "arena"} | kwargs)


def act(env, *actions):
    """(observation, info["rewards"], reward, terminated, truncated); it fits the space."""
    obs, reward, terminated, truncated, info = env.step(actions)
    assert obs in env.observation_space
    assert info["rewards"].mean() == reward
    return obs, info["rewards"].tolist(), terminated, truncated


def ring(env, observations):
    """Each agent is linked to the next, with the sum of what they observe first."""
    num = len(observations)
    links = np.stack([np.arange(num), np.roll(np.arange(num), -1)], 1)
    values = np.array([obs[0] for obs in observations.values()])
    return links, np.stack([values[links].sum(1), np.full(num, env.t)], 1)


# ---- Agents that end, appear and come back ----
def test_agents_that_end():
    """Rows are the living agents; who acted is rewarded; actions reach their agents."""
    env = make(steps=[([A0, K0, K1], [A1], []), ([A0, K1], [], [K0]), ([], [A0, K1], [])])
    obs, info = env.reset(seed=5)
    assert env.parallel_env.seeds == [None, 5] and info == {}
    assert obs in env.observation_space and obs["node_ids"].tolist() == [0, 1, 2, 3]
    assert obs["agents"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 3, 0]]
    obs, rewards, *ends = act(env, 1, 2, 0, 1)
    assert env.parallel_env.actions[-1] == {A0: 1, A1: 2, K0: 0, K1: 1}
    assert rewards == [1, 3, 2, 4] and ends == [False, False]
    assert obs["node_ids"].tolist() == [0, 2, 3] and obs["agents"][:, 1].tolist() == [0, 2, 3]
    obs, rewards, *ends = act(env, 0, 0, 2)
    assert rewards == [0, 2, 5] and ends == [False, False]
    assert obs["node_ids"].tolist() == [0, 3]
    obs, rewards, *ends = act(env, 1, 1)
    assert rewards == [1, 4] and ends == [True, False]
    assert obs["agents"].shape == (0, 3) and obs["node_ids"].shape == (0,)
    assert env.reset()[0]["node_ids"].tolist() == [0, 1, 2, 3]


def test_agents_that_come_back():
    """Each life in an episode has an id of its own, and rows stay in the order of the list."""
    steps = [([A1], [A0], []), ([A1, A0, K0], [], []), ([A1], [A0, K0], []), ([A0, A1], [], [])]
    env = make(steps=steps, first=[A0, A1])
    assert env.reset()[0]["node_ids"].tolist() == [0, 1]
    assert act(env, 0, 0)[0]["node_ids"].tolist() == [1]
    obs, rewards, *_ = act(env, 0)
    assert rewards == [1]  # of the agent that acted
    assert obs["node_ids"].tolist() == [4, 1, 2] and obs["agents"][:, 1].tolist() == [0, 1, 2]
    assert act(env, 0, 0, 0)[0]["node_ids"].tolist() == [1]
    assert act(env, 0)[0]["node_ids"].tolist() == [8, 1]
    assert env.reset()[0]["node_ids"].tolist() == [0, 1]


def test_without_possible_agents():
    """Ids count the agents as they appear."""
    env = make(lists_agents=False, first=[K0, A0], steps=[([A0, K1], [K0], []), ([K0, A0], [], [])])
    obs, _ = env.reset()
    assert obs["node_ids"].tolist() == [0, 1] and obs["agents"][:, 1].tolist() == [2, 0]
    assert act(env, 0, 0)[0]["node_ids"].tolist() == [1, 2]
    assert act(env, 0, 0)[0]["node_ids"].tolist() == [3, 1]


@pytest.mark.parametrize(
    "terminated, truncated, ids",
    [
        ([], [A0, A1, K0, K1], [0, 1, 2, 3]),
        ([K0], [A0, A1, K1], [0, 1, 3]),
        ([A0, A1, K0, K1], [A0, A1, K0, K1], []),
        ([], [], []),
    ],
)
def test_the_whole_environment_is_truncated(terminated, truncated, ids):
    """The last observation has those that were truncated, whose values are bootstrapped."""
    env = make(steps=[([], terminated, truncated)], graph="complete")
    env.reset()
    obs, _, *ends = act(env, 0, 0, 0, 0)
    assert ends == [not ids, bool(ids)]
    assert obs["node_ids"].tolist() == ids and obs["graph"].nodes[:, 0].tolist() == [1] * len(ids)


@pytest.mark.parametrize("graph", [None, "complete"])
def test_one_agent_is_truncated(graph):
    """Its id and its last row, beside those of the others that acted, are handed over."""
    env = make(steps=[([A0, K1], [A1], [K0]), ([A0], [K1], [])], graph=graph)
    env.reset()
    obs, _, *ends, info = env.step([0] * 4)
    assert obs["node_ids"].tolist() == [0, 3] and ends == [False, False]
    last = info["last_observation"]
    assert info["truncated"].tolist() == [2] and last in env.observation_space
    rows = last["graph"].nodes if graph else last["agents"]
    assert last["node_ids"].tolist() == [0, 2, 3] and rows[:, :2].tolist() == [
        [1, 0],
        [1, 2],
        [1, 3],
    ]
    *_, info = env.step([0, 0])
    assert set(info) == {"rewards"}  # who is terminated is not


# ---- Kinds of agents ----
def test_kinds_with_other_lengths_and_actions():
    """Padded, one-hot kind at the end; a mask for the kind with fewer actions."""
    archer = vector(2, high=9), spaces.Discrete(2)
    env = make(knight=(vector(4, high=9), spaces.Discrete(4)), archer=archer)
    obs, _ = env.reset()
    assert obs in env.observation_space and env.action_space == spaces.Sequence(spaces.Discrete(4))
    rows = [[0, k, 0, 0, *([1, 0] if k < 2 else [0, 1])] for k in range(4)]
    assert obs["agents"].tolist() == rows
    assert obs["action_mask"].tolist() == [[1, 1, 0, 0]] * 2 + [[1] * 4] * 2


# ---- Masks ----
class Masked(Arena):
    """PettingZoo's Dict of an observation and a mask."""

    def observation_space(self, agent):
        mask = spaces.Box(0, 1, (3,), np.int8)
        return spaces.Dict(observation=super().observation_space(agent), action_mask=mask)

    def observe(self, agent):
        obs = np.array([self.t, self.names.index(agent), 0], np.float32)
        mask = np.array([self.t == 0, agent == A0, 0], np.int8)
        return {"observation": obs, "action_mask": mask}


def test_masks_in_observations():
    """They are no part of the rows; where an agent is truncated it may have nothing to choose."""
    env = make(env="arena:masked", steps=[([], [], [A0, K0])])
    obs, _ = env.reset()
    assert obs in env.observation_space and obs["agents"].shape == (4, 3)
    assert obs["action_mask"].tolist() == [[1, 1, 0]] + [[1, 0, 0]] * 3
    obs, *_ = act(env, 0, 0, 0, 0)
    assert obs["action_mask"].tolist() == [[0, 1, 0], [1, 1, 1]]


def test_masks_in_infos(monkeypatch):
    """An agent without one may do everything."""
    infos = {A1: {"action_mask": np.array([0, 1, 0])}, K0: {}}
    monkeypatch.setattr(Arena, "infos", property(lambda _: infos, lambda *_: None), raising=False)
    env = make()
    obs, _ = env.reset()
    assert obs in env.observation_space
    assert obs["action_mask"].tolist() == [[1, 1, 1], [0, 1, 0], [1, 1, 1], [1, 1, 1]]
    infos[A1] = {"action_mask": np.ones(2)}
    with pytest.raises(gym.error.Error, match="'archer_1': action_mask has 2 entries for Discrete"):
        env.reset()


# ---- Graphs ----
def test_complete():
    env = make(steps=[([K0], [A0, A1, K1], []), ([], [], [])], graph="complete")
    obs, _ = env.reset()
    assert obs in env.observation_space and list(obs) == ["node_ids", "graph"]
    assert obs["graph"].nodes[:, 1].tolist() == [0, 1, 2, 3] and obs["graph"].edges is None
    pairs = {(a, b) for a in range(4) for b in range(4) if a != b}
    assert set(map(tuple, obs["graph"].edge_links.tolist())) == pairs
    obs, *_ = act(env, 0, 0, 0, 0)
    assert obs["graph"].nodes.tolist() == [[1, 2, 0]] and obs["graph"].edge_links.shape == (0, 2)


def test_a_function_of_ones_own():
    """Links and their features; it is given the rows' observations and the environment."""
    env = make(steps=[([A0, K0, K1], [A1], []), ([], [], [])], graph="arena:ring")
    assert env.observation_space["graph"].edge_space.shape == (2,)
    env.reset()
    obs, *_ = act(env, 0, 0, 0, 0)
    assert obs["graph"].edge_links.tolist() == [[0, 1], [1, 2], [2, 0]]
    assert obs["graph"].edges.tolist() == [[2, 1]] * 3
    obs, _, terminated, _ = act(env, 0, 0, 0)
    assert terminated and obs["graph"].edges.shape == (0, 2)


# ---- Names, rendering, mistakes ----
@pytest.mark.parametrize(
    "kwargs, said",
    [
        ({"env": "no_zoo_at_all.x_v1"}, "no module no_zoo_at_all; .* pip install no_zoo_at_all"),
        ({"env": "arena:nothing"}, "arena has no function nothing"),
        ({"graph": "all"}, "graph is 'all'; complete or module:function is needed"),
    ],
)
def test_wrong_names(kwargs, said):
    with pytest.raises(gym.error.Error, match=said):
        make(**kwargs)


def test_mistakes_of_environments_and_callers(monkeypatch):
    env = make()
    env.reset()
    with pytest.raises(gym.error.Error, match="2 actions where 4 are needed.*'archer_0'"):
        env.step([0, 0])
    monkeypatch.setattr(Arena, "observe", lambda self, agent: np.zeros(5))
    with pytest.raises(gym.error.Error, match=r"'archer_0': .* shape \(5,\) where \(3,\)"):
        make().reset()


# ---- Agents that end by chance ----
class Chance(Arena):
    """An agent has one chance in ten to end in each of at most 20 steps; archers see more."""

    def __init__(self, **kwargs):
        see = {"archer": (vector(4, high=99), spaces.Discrete(3))}
        super().__init__(**see, **kwargs)

    def reset(self, seed=None, options=None):
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed or 0)
        left, self.steps = self.names, []
        for t in range(20):
            ended = [agent for agent in left if self.rng.random() < 0.1]
            cut = left if t == 19 else []
            left = [agent for agent in left if agent not in ended]
            self.steps.append(([] if cut else left, ended, cut))
        return super().reset(seed)


def play(env, seed, steps, rng):
    """What each step gave."""
    results = []
    obs, _ = env.reset(seed=seed)
    for _ in range(steps):
        actions = rng.integers(3, size=len(obs["node_ids"]))
        before = obs["node_ids"]
        obs, _, terminated, truncated, info = env.step(actions)
        assert obs in env.observation_space and len(info["rewards"]) == len(before)
        assert set(obs["node_ids"]) <= set(before)  # nobody comes back
        results.append((repr(obs), info["rewards"].tolist(), terminated, truncated))
        if terminated or truncated:
            obs, _ = env.reset()
    return results


@pytest.mark.parametrize("graph", [None, "complete"])
def test_chance(graph):
    """Episodes are the same again with the same seed, a copy goes on as its original, and numbers
    of rows fall."""
    env = make(env="arena:chance", graph=graph)
    first = play(env, 3, 60, np.random.default_rng(1))
    again = play(make(env="arena:chance", graph=graph), 3, 60, np.random.default_rng(1))
    assert first == again
    sizes = {len(rewards) for _, rewards, *_ in first}
    assert len(sizes) >= 3 and any(terminated for *_, terminated, _ in first)
    env.reset()
    copy = cloudpickle.loads(cloudpickle.dumps(env))
    for _ in range(3):
        actions = [1] * len(env.ids)
        assert repr(env.step(actions)) == repr(copy.step(actions))


def test_training(tmp_path):
    """A joint action of all agents, with their mean reward."""
    kwargs = {"env": "arena:chance", "graph": "complete"}
    flags = dict(env_id="cleanrl_graph.envs:PettingZoo-v0", env_kwargs=kwargs)
    result = run(tmp_path, **flags, num_steps=30, total_timesteps=180)
    assert "charts/episodic_return" in result.scalars
    assert mismatch(result) < 1e-5


# ---- Environments of MPE2 ----
@pytest.fixture
def mpe2():
    reason = "mpe2 is not installed: pip install -r benchmark/requirements-multi-agent.txt"
    return pytest.importorskip("mpe2", reason=reason)


@pytest.mark.parametrize("graph", [None, "complete"])
def test_simple_spread(mpe2, graph):
    """All is as of the environment that is stepped itself."""
    from mpe2 import simple_spread_v3

    theirs = simple_spread_v3.parallel_env(N=4, max_cycles=9)
    env = make(env="mpe2.simple_spread_v3", N=4, max_cycles=9, graph=graph)
    rng = np.random.default_rng(0)
    for seed in (4, 5):
        expected, _ = theirs.reset(seed=seed)
        obs, _ = env.reset(seed=seed)
        for t in range(9):
            rows = obs["graph"].nodes if graph else obs["agents"]
            assert np.array_equal(rows, np.stack(list(expected.values())))
            actions = rng.integers(5, size=4)
            obs, reward, terminated, truncated, info = env.step(actions)
            assert obs in env.observation_space and obs["node_ids"].tolist() == [0, 1, 2, 3]
            expected, rewards, *_ = theirs.step(dict(zip(theirs.possible_agents, actions)))
            assert info["rewards"].tolist() == list(rewards.values())
            assert reward == np.mean(list(rewards.values()))
            assert (terminated, truncated) == (False, t == 8)
