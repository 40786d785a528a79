"""services/demos.py, demonstrations that are recorded into a file and read again."""

import json
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import MASK, ListEnv, make_envs, small_args, vector

from cleanrl_graph import ppo_graph_aux as script
from cleanrl_graph.envs import fitting, flexible_job_shop, job_shop
from cleanrl_graph.services import check, demos

DENSE = {"gear": spaces.Discrete(5, start=-2), "speed": vector(2, low=-np.inf, high=np.inf)}
GRAPH = {"g": spaces.Graph(vector(3), spaces.MultiDiscrete([4, 4]))}
ROW_MASK = {"action_mask": MASK}
ALL = DENSE | GRAPH | ROW_MASK


def envs_with(children, action_space=None, **flags):
    """Envs of the script with these observations and actions, which cannot be stepped."""
    make = lambda: ListEnv(spaces.Dict(children), [], action_space or spaces.Discrete(9))
    return make_envs([make], script=script, **flags)


class Growing(gym.Env):
    """A graph with one more node in each step, 2 to 4, in one array that is written again; action 0
    is masked."""

    def __init__(self, action_space=None, children=ALL):
        self.observation_space = spaces.Dict(children)
        self.action_space = action_space or spaces.Discrete(9)
        self.speed, self.total = np.zeros(2, np.float32), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self):
        num = self.t + 2
        self.speed[:] = self.total
        links = np.stack([np.arange(num), np.arange(num)[::-1]], 1)[1:]
        graph = spaces.GraphInstance(self.np_random.random((num, 3)), links % 4, links)
        obs = {"gear": self.t - 2, "speed": self.speed, "g": graph}
        obs["action_mask"] = np.arange(num) > 0
        return {name: obs[name] for name in self.observation_space}

    def step(self, action):
        self.t, self.total = self.t + 1, self.total + 1
        is_late = self.t == 3
        ends = is_late and self.total > 3, is_late and self.total == 3
        return self.observe(), self.t / 2, *ends, {}


def last_node(env, obs, rng):
    """The node that was added last."""
    return len(obs["g"].nodes) - 1


def recorded(policy=last_node, num_episodes=2, seed=3, **kwargs):
    """The arrays of a few episodes."""
    envs = make_envs([lambda: Growing(**kwargs)], script=script)
    return demos.record(envs, policy, num_episodes, seed)


def record_file(path, num_episodes=2, env_kwargs=None):
    """A file of `recorded`; an entry k of --env-kwargs begins with the total 100 k."""
    own = dict(demos=str(path), record=f"{__name__}:last_node", record_episodes=num_episodes)
    own |= dict(seed=3, env_id="Growing-v0", env_kwargs=env_kwargs or {"size": 3})

    def make(args, k):
        env = Growing()
        env.total = 100 * k
        return env

    demos.record_file(check.checked(script), make, small_args(script, **own))


def file_of(folder, data, change=lambda data: None):
    """The path of the data after `change`, in the format of the file."""
    data = {name: array.copy() for name, array in data.items()} | {"format": demos.FORMAT}
    change(data)
    path = str(folder / "demos.npz")
    np.savez(path, **data)
    return path


def load(path, envs):
    """(the observations, the actions) that the script reads from a file that fits the
    environment."""
    demos.check(path, envs)
    storage = script.Storage(envs.leaves, torch.device("cpu"))
    agent = SimpleNamespace(head=SimpleNamespace(space=envs.action_space))
    extras = script.Extras(agent, storage, SimpleNamespace(demos=path))
    return extras.demos.whole(), extras.actions


# ---- Recording ----
def test_every_entry_of_env_kwargs_is_played(tmp_path):
    """An episode of each in turn, seeded as in training: once."""
    record_file(tmp_path / "demos.npz", num_episodes=5, env_kwargs=[{}, {}])
    with np.load(tmp_path / "demos.npz") as file:
        first = file["values/speed"][::3, 0].tolist()
        nodes = file["values/g.nodes"]
    assert first == [0, 100, 3, 103, 6]
    for k in range(2):  # env k has seed 3 + k, and its next episode goes on from there
        rng = np.random.default_rng(3 + k)
        drawn = [rng.random((num, 3), np.float64).astype(np.float32) for num in (2, 3, 4, 5, 2)]
        np.testing.assert_array_equal(nodes[9 * k : 9 * k + 2], drawn[0])
        np.testing.assert_array_equal(nodes[18 + 9 * k : 18 + 9 * k + 2], drawn[-1])


def test_recorded_arrays():
    """Every step of the episodes in order, without padding, as it was when the policy saw it."""
    data = recorded()
    assert data["counts/g.nodes"].tolist() == data["counts/action_mask"].tolist() == [2, 3, 4] * 2
    assert data["counts/g.edges"].tolist() == [1, 2, 3] * 2 and "counts/gear" not in data
    assert data["values/g.nodes"].shape == (18, 3) and data["values/g.edge_links"].shape == (12, 2)
    assert data["values/speed"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert data["values/gear"].tolist() == [-2, -1, 0] * 2
    assert data["actions"].tolist() == [[1], [2], [3]] * 2 and data["actions"].dtype == np.int64
    assert data["rewards"].tolist() == [0.5, 1.0, 1.5] * 2 and data["rewards"].dtype == np.float32
    assert data["truncated"].tolist() == [False, False, True, False, False, False]
    assert data["terminated"].tolist() == [False, False, False, False, False, True]


def test_actions_come_back(tmp_path):
    """Columns follow the space, options are counted from 0. The environment is given what the
    policy says, and given it again by an agent that has cloned it, whatever numbers a script has
    for it: integers of all widths, and bounds that are equal."""
    wide = spaces.Box(np.array([0, -5, 7]), np.array([1000, 2**40, 7]), dtype=np.int64)
    narrow = spaces.Box(np.float32([2, -1]), np.float32([2, 1]))
    matrix = spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [-1, 5]])
    space = spaces.Dict(a=spaces.Tuple([wide, matrix]), b=spaces.Discrete(4, start=1), c=narrow)
    pair = np.array([999, 3, 7]), np.array([[2, 2], [-1, 6]])
    action = {"a": pair, "b": 2, "c": np.float32([2, 0.25])}
    given = []

    class Noting(Growing):
        def step(self, action):
            parts = *action["a"], action["b"], action["c"]
            given.append(np.concatenate(list(map(np.ravel, parts))))
            return super().step(action)

    def envs_of():
        make = lambda: Noting(action_space=space, children=DENSE)
        return make_envs([lambda: fitting.fit(make())], script=script)

    data = demos.record(envs_of(), lambda *_: action, 1, 0)
    assert data["actions"].dtype == np.float64  # as a part is a Box
    assert data["actions"][:, 3:8].tolist() == [[1, 2, 0, 1, 1]] * 3
    envs = envs_of()
    _, actions = load(file_of(tmp_path, data), envs)
    envs.reset(0)
    rows = {script.STEP: actions[:1].numpy()}
    envs.step(script.to_env_actions(envs.action_space, rows, script.STEP, None))
    assert np.array_equal(given, [[999, 3, 7, 2, 2, -1, 6, 2, 2, 0.25]] * 4)


def test_actions_that_cannot_be_recorded_or_read(tmp_path):
    with pytest.raises(SystemExit, match="0 episodes of demonstrations: at least 1 is needed"):
        recorded(num_episodes=0)
    space = spaces.Sequence(spaces.Discrete(2))
    with pytest.raises(SystemExit, match=r"actions in Sequence\(Discrete\(2\).*cannot be recorded"):
        recorded(lambda *_: (0, 1), action_space=space, children=GRAPH)
    path = file_of(tmp_path, recorded(children=GRAPH))
    with pytest.raises(SystemExit, match="--demos .*Sequence of actions, .*, cannot be read"):
        demos.check(path, envs_with(GRAPH, space))


# ---- The file ----
def test_file_comes_back(tmp_path):
    """Rows of each step, whatever the order of the leaves; the flags of the environment."""
    data, envs = recorded(), envs_with(ALL)
    path = str(tmp_path / "demos.npz")
    record_file(path)
    flat, actions = load(path, envs)
    counts = {"": [1] * 6, "g.nodes": [2, 3, 4] * 2, "action_mask": [2, 3, 4] * 2}
    counts["g.edge_links"] = [1, 2, 3] * 2
    assert {group: num.tolist() for group, num in flat.counts.items()} == counts
    assert actions.tolist() == [[1], [2], [3]] * 2
    with np.load(path, allow_pickle=False) as file:
        assert str(file["env_id"]) == "Growing-v0" and str(file["format"]) == demos.FORMAT
        assert json.loads(str(file["env_kwargs"])) == {"size": 3}
        assert all(np.array_equal(file[name], array) for name, array in data.items())
    load(path, envs_with(ALL, spaces.Discrete(3)))  # there may be more rows than where it is read
    backwards = envs.leaves[::-1]
    observations, _ = demos.read(path, backwards)
    for leaf, rows in zip(backwards, zip(*observations, strict=True), strict=True):
        assert np.array_equal(np.concatenate(rows), data[f"values/{leaf.path}"])


def put(name, index, value):
    return lambda data: data[name].__setitem__(index, value)


def change(name, function):
    return lambda data: data.update({name: function(data[name])})


def roll(name):
    return change(name, lambda array: np.roll(array, 1))


def more_leaves(data):
    data["values/more"] = data["actions"]


MISFITS = [
    (change("format", lambda _: "other"), "its format is other, this script reads cleanrl_graph-d"),
    (more_leaves, r"it has the leaves \[.*'more'.*\], the environment \['action"),
    (put("counts/g.nodes", 0, 3), "leaf 'g.nodes': counts of 6 steps and 19 rows where there are"),
    (roll("counts/action_mask"), "step 0, leaf 'action_mask': 4 rows where 'g.nodes' has 2"),
    (put("values/g.nodes", (5, 1), np.nan), "step 2, leaf 'g.nodes': value nan in row 0"),
    (put("actions", (3, 0), 2), r"step 3: part 0 of the action, \[2\], is out of range"),
    (put("actions", (4, 0), 0), r"step 4: part 0 of the action, \[0\], is masked"),
]


@pytest.mark.parametrize("change, sentence", MISFITS)
def test_files_that_do_not_fit(change, sentence, tmp_path):
    """What does not fit the environment is named, with the file and the step."""
    path = file_of(tmp_path, recorded(), change)
    with pytest.raises(SystemExit, match=f"--demos {path}: {sentence}"):
        demos.check(path, envs_with(ALL))


def test_files_that_are_none(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    for name in ("text.npz", "missing.npz"):
        words = f"--demos {tmp_path / name}: not a file of demonstrations: "
        with pytest.raises(SystemExit, match=words):
            demos.check(str(tmp_path / name), envs_with(DENSE))


def test_mask_that_depends_on_the_choice_before(tmp_path):
    """With --autoregressive it has an entry for each pair of rows."""
    data = recorded()
    sizes = data["counts/action_mask"]
    pairs = [np.roll(np.eye(num, dtype=np.int8), 1, 1) for num in sizes]  # i, then i + 1
    data["values/action_mask.0"] = np.ones_like(data.pop("values/action_mask"))
    data["counts/action_mask.0"] = data.pop("counts/action_mask")
    data["values/action_mask.1"] = np.concatenate([pair.ravel() for pair in pairs])
    data["counts/action_mask.1"] = sizes**2
    data["actions"] = np.array([[1, 2 % num] for num in sizes])
    masks = {"action_mask": spaces.Tuple([MASK] * 2)}
    flags = dict(autoregressive=True, action_head="nodes")
    envs = envs_with(ALL | masks, spaces.Tuple([spaces.Discrete(9)] * 2), **flags)
    load(file_of(tmp_path, data), envs)
    path = file_of(tmp_path, data, put("actions", 4, [1, 0]))
    with pytest.raises(SystemExit, match=r"step 4: part 1 of the action, \[0\], is masked"):
        demos.check(path, envs)


# ---- Policies ----
def test_policies_by_name(tmp_path, monkeypatch):
    """A module and a name in it; what is wrong inside the module is shown as it is. `envs.NAME` is
    a module of one's own where there is one, without __init__.py, too, and else ours."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "envs").mkdir()
    (tmp_path / "my_rules.py").write_text("limit = 3\n")
    (tmp_path / "my_broken.py").write_text("import no_such_thing_at_all\n")
    assert demos.find_policy("envs.job_shop:mwkr") is job_shop.mwkr
    for name in ("my_rules:second", "my_rules:limit", "nowhere:first", ""):
        words = f"policy {name}: there is no such function; module:name is needed"
        with pytest.raises(SystemExit, match=words):
            demos.find_policy(name)
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        demos.find_policy("my_broken:first")
    (tmp_path / "envs" / "job_shop.py").write_text("def mwkr(env, obs, rng):\n    return 7\n")
    for name in ("envs", "envs.job_shop"):
        sys.modules.pop(name, None)
    assert demos.find_policy("envs.job_shop:mwkr")(None, None, None) == 7
    assert demos.find_policy("envs.flexible_job_shop:mwkr") is flexible_job_shop.mwkr
    for name in ("envs", "envs.job_shop", "my_rules"):
        sys.modules.pop(name)
