"""envs/wrappers.py: hidden entries, a z per episode, relative positions, wrappers of one's own."""

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from cleanrl_graph.envs.wrappers import wrap, wrap_all

Error = gym.error.Error


class Probe(gym.Env):
    """Observes [number of resets, steps in this episode, a random number, step before 10]; the
    reward is random, too. An episode has `length` steps. `kind`: "vector", or "dict" for key "x"
    beside an action_mask."""

    action_space = spaces.Discrete(2)

    def __init__(self, length=3, truncates=False, kind="vector", info=None):
        self.length, self.truncates, self.kind, self.info = length, truncates, kind, info
        self.resets = 0
        space = spaces.Box(np.zeros(4, np.float32), np.array([99, 9, 1, 0], np.float32))
        if kind == "dict":
            space = spaces.Dict(x=space, action_mask=spaces.MultiBinary(2))
        self.observation_space = space

    def observe(self):
        x = np.array([self.resets, self.t, self.np_random.random(), self.t - 10], np.float32)
        return x if self.kind == "vector" else {"x": x, "action_mask": np.ones(2, np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options, self.t, self.resets = options, 0, self.resets + 1
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        end = self.t == self.length
        ends = end and not self.truncates, end and self.truncates
        return self.observe(), self.np_random.random(), *ends, self.info


def play(env, num_steps, seed):
    """The observations, without the last ones of episodes."""
    observations = [env.reset(seed=seed)[0]]
    for _ in range(num_steps):
        obs, _, terminated, truncated, _ = env.step(1)
        observations.append(env.reset()[0] if terminated or truncated else obs)
    return observations


# ---- Wrappers that learn ----
@pytest.mark.parametrize("around", [lambda env: env, gym.wrappers.OrderEnforcing])
def test_statistics_of_copies(around):
    """NormalizeObservation is refused wherever it is, but not where it has stopped to learn."""
    env = gym.wrappers.NormalizeObservation(Probe())
    with pytest.raises(Error, match="NormalizeObservation learns: .*give --norm-obs instead"):
        wrap_all(around(env), ())
    env.update_running_mean = False
    wrap_all(around(env), ())
    wrap_all(around(gym.wrappers.NormalizeReward(Probe())), ())


# ---- hide ----
def test_hidden_entries():
    """Values and bounds alike lack the entries."""
    env, full = wrap(Probe(), "hide:1, 3"), Probe()
    assert env.observation_space == spaces.Box(np.float32([0, 0]), np.float32([99, 1]))
    seen = zip(play(env, 9, seed=3), play(full, 9, seed=3))
    assert all(obs.tolist() == whole[[0, 2]].tolist() for obs, whole in seen)


def test_hidden_keys():
    """Space and observations lack them; what should be a dict and is none stays as it is."""
    env = wrap(Probe(kind="dict"), "hide:action_mask")
    assert list(env.observation_space) == ["x"]
    assert env.reset()[0].keys() == env.step(0)[0].keys() == {"x"}
    env.unwrapped.observe = lambda: None
    assert env.reset()[0] is None
    with pytest.raises(Error, match="^--wrap hide:x,y: .*, or keys of a Dict; it is Dict"):
        wrap(Probe(kind="dict"), "hide:x,y")


# ---- z ----
@pytest.mark.parametrize("kind", ["vector", "dict"])
@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("info", [None, {"group": "a", "eval": {"cost": 1}}])
def test_z_of_an_episode(info, truncates, kind):
    """It is in the options of reset, beside others, and in the space and the observation, whose
    other keys stay; where the episode ends, and there only, info names the skill or the third of
    the first number."""
    for spec, name in (("z:skill:4", str), ("z:uniform:2", lambda z: int(3 * z[0]))):
        inner = Probe(kind=kind, truncates=truncates, info=info)
        env, groups, options = wrap(inner, spec), set(), {"other": 1}
        keys = {"obs"} if kind == "vector" else {"x", "action_mask"}
        assert env.observation_space.keys() == {"z"} | keys
        for _ in range(30):
            obs, _ = env.reset(seed=None if groups else 1, options=options)
            assert inner.options["z"] is env.z and inner.options.keys() - {"z"} == options.keys()
            ends, options = [], {}
            while not any(ends):
                assert obs.keys() == {"z"} | keys and np.array_equal(obs["z"], env.z)
                obs, _, *ends, after = env.step(0)
                assert any(ends) or after == info
            assert obs["z"] in env.observation_space["z"] and np.array_equal(obs["z"], env.z)
            assert after == {**(info or {}), "group": f"z_{name(env.z)}"}
            groups.add(after["group"])
        assert groups == {f"z_{k}" for k in range(4 if "skill" in spec else 3)}


def test_z_follows_the_seed_and_leaves_the_environments_numbers():
    for spec in ("z:skill:1000", "z:uniform:1"):
        runs = [play(wrap(Probe(), spec), 30, seed) for seed in (5, 5, 6)]
        z = [[float(np.ravel(obs["z"])[0]) for obs in run] for run in runs]
        assert z[0] == z[1] != z[2] and len(set(z[0])) == 11
        assert np.array_equal([obs["obs"] for obs in runs[0]], play(Probe(), 30, 5))
        unseeded = [wrap(Probe(), spec).reset()[0]["z"] for _ in range(2)]
        assert unseeded[0] != unseeded[1]


def test_z_that_is_asked_for():
    """A trained agent is shown the skill that its user wants."""
    for spec, z in (("z:skill:4", 2), ("z:skill:4", 0), ("z:uniform:2", [0.5, 1.0])):
        env = wrap(Probe(), spec)
        obs, _ = env.reset(seed=1, options={"z": z})
        assert np.array_equal(obs["z"], z) and obs["z"] in env.observation_space["z"]
        assert env.step(0)[0]["z"] is env.unwrapped.options["z"]


# ---- Relative positions ----
class Field(gym.Env):
    """A car [x, y, angle], mines [x, y] in an inner Dict, a map of trees, a target that is a
    vector, a picture and a list; `named`: whether columns have names."""

    action_space = spaces.Discrete(2)

    def __init__(self, named=False, cars=1, stack=True):
        whole, many = spaces.Box(0, 100, (2,), np.int64), dict(stack=stack)
        inner = {"mines": spaces.Sequence(whole, **many), "image": spaces.Box(0, 1, (9, 9))}
        self.cars, self.stack = cars, stack
        self.observation_space = spaces.Dict(
            car=spaces.Sequence(spaces.Box(-np.inf, np.inf, (3,)), **many),
            inner=spaces.Dict(inner),
            map=spaces.Graph(spaces.Box(0, 9, (3,)), spaces.Box(0, 1, (1,))),
            target=spaces.Box(-9, 9, (3,)),
            count=spaces.Discrete(3),
            action_mask=spaces.Sequence(spaces.Box(0, 1, (2,), np.int8), stack=True),
        )
        if named:
            self.feature_names = {"car": ["x", "y", "angle"], "inner.mines": ["x", "y"]}
            self.feature_names |= {"target": ["mass", "x", "y"]}

    def observe(self):
        car = np.array([[2, 1, np.pi / 2], [4, 1, 0]], np.float32)[: self.cars]
        mines = np.array([[2, 4], [5, 1]])
        links = np.array([[0, 1]])
        trees = spaces.GraphInstance(np.eye(2, 3, dtype=np.float32), np.ones((1, 1), "f"), links)
        if not self.stack:
            car, mines = tuple(car), tuple(mines)
        return {
            "car": car,
            "inner": {"mines": mines, "image": np.zeros((9, 9), np.float32)},
            "map": trees,
            "target": np.array([7, 3, 2], np.float32),
            "count": 1,
            "action_mask": np.ones((2, 2), np.int8),
        }

    def reset(self, *, seed=None, options=None):
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 0.0, False, False, {}


@pytest.mark.parametrize("stack", [True, False])
def test_relative_positions(stack):
    """Those of all sets, from the first car's place; all else stays as it is."""
    env = wrap(Field(cars=2, stack=stack), "relative:car:0,1")
    for obs in (env.reset()[0], env.step(0)[0]):
        assert obs in env.observation_space
        mines, car = np.array(obs["inner"]["mines"]), np.array(obs["car"])
        assert mines.tolist() == [[0, 3], [3, 0]] and mines.dtype == np.float64
        assert car == pytest.approx(np.array([[2, 1, np.pi / 2], [2, 0, 0]]))
        assert obs["map"].nodes.tolist() == [[-1, -1, 0], [-2, 0, 0]]
        assert obs["map"].edges.tolist() == [[1]] and obs["count"] == 1
        assert obs["action_mask"].all() and obs["target"].tolist() == [7, 3, 2]
    space = env.observation_space
    assert space["map"].node_space.low.tolist() == [-np.inf, -np.inf, 0]
    assert space["inner"]["mines"].feature_space.dtype == np.float64
    assert space["target"] == Field().observation_space["target"]


def test_turned_positions():
    """The car looks along y: what is there is ahead, what is to the right has a negative second
    coordinate. Where columns have names these decide, also for vectors."""
    env = wrap(Field(named=True), "relative:car:x,y:angle")
    obs = env.reset()[0]
    assert obs["inner"]["mines"] == pytest.approx(np.array([[3, 0], [0, -3]]), abs=1e-6)
    assert obs["target"] == pytest.approx(np.array([7, 1, -1]), abs=1e-6)
    assert obs["map"].nodes.tolist() == np.eye(2, 3).tolist()  # its columns have numbers
    turned = wrap(Field(), "relative:car:0,1:2").reset()[0]
    assert turned["inner"]["mines"] == pytest.approx(obs["inner"]["mines"])


@pytest.mark.parametrize(
    "spec, words",
    [
        ("relative:car:0", "relative:SET:X,Y or relative:SET:X,Y:DIRECTION is needed"),
        ("relative:truck:0,1", r"must be columns of the set, graph or vector 'truck'; .*'car'"),
    ],
)
def test_positions_that_are_not_there(spec, words):
    with pytest.raises(Error, match=f"^--wrap {spec}: .*{words}"):
        wrap(Field(), spec)


# ---- Wrappers of one's own ----
MODULE = """
import gymnasium as gym

class Scaled(gym.RewardWrapper):
    def __init__(self, env, *arguments):
        super().__init__(env)
        self.arguments = arguments

    def reward(self, reward):
        return self.arguments[0] * reward

nothing = lambda env: print("done")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "inner.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "text, arguments",
    [
        ("", ()),
        (':{"a": [1, 2], "b": "c:d"}:true', ({"a": [1, 2], "b": "c:d"}, True)),
        (":tcp://host:3x", ("tcp", "//host", "3x")),
    ],
)
def test_own_wrappers(text, arguments, module):
    """One's own callable changes the environment. Arguments are JSON where they can be read so,
    else text."""
    env = Probe()
    found = wrap(env, f"own_package.inner:Scaled{text}")
    assert found.env is env and found.arguments == arguments
    limited = wrap(env, "gymnasium.wrappers:TimeLimit:2")
    limited.reset()
    assert [limited.step(0)[3] for _ in range(2)] == [False, True]


CALLABLE = "own_package.inner:"


@pytest.mark.parametrize(
    "spec, words",
    [
        ("skills", "there is no such wrapper; the forms are hide:1,3 hide:key z:skill:4"),
        ("hide:4", r"numbers from 0 on .*; it is Box\("),
        ("z:skill:0", "z:skill:K or z:uniform:D with a number of"),
        ("skill:4", "No module named 'skill'; the forms are hide"),
        (f"{CALLABLE}other", "has no attribute 'other'"),
        (f"{CALLABLE}nothing", "it must return a gymnasium environment, and returned None"),
    ],
)
def test_wrappers_that_cannot_be_used(module, spec, words):
    with pytest.raises(Error, match=f"^--wrap {spec}: .*{words}"):
        wrap(Probe(), spec)


def test_several_in_the_order_given():
    env = wrap_all(Probe(), ("hide:1,2,3", "z:skill:2"))
    assert env.reset()[0].keys() == {"obs", "z"} and env.observation_space["obs"].shape == (1,)
    with pytest.raises(Error, match="--wrap hide:0: .* it is Dict"):
        wrap(env, "hide:0")


# ---- All ----
@pytest.mark.parametrize("specs", ["hide:3 z:skill:9", "own_package.inner:Scaled:3"])
def test_pickled_copies_go_on_alike(specs, module):
    """In the middle of an episode and through its end, with the z that follow."""
    env = Probe(length=3)
    for spec in specs.split():
        env = wrap(env, spec)
    play(env, 4, 0)
    copy = cloudpickle.loads(cloudpickle.dumps(env))
    for _ in range(20):
        rows = [e.step(0) for e in (env, copy)]
        rows += [e.reset() for e in (env, copy)] if rows[0][2] else []
        for row, other in zip(rows[::2], rows[1::2]):
            np.testing.assert_equal(row, other)
