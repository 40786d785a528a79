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
from processes import full_disk

from cleanrl_graph import ppo_graph_aux as script
from cleanrl_graph.envs import fitting, flexible_job_shop, job_shop
from cleanrl_graph.services import check, demos

DENSE = {"gear": spaces.Discrete(5, start=-2), "speed": vector(2, low=-np.inf, high=np.inf)}
GRAPH = {"g": spaces.Graph(vector(3), spaces.MultiDiscrete([4, 4]))}
ROW_MASK = {"action_mask": MASK}
AVAIL = {"avail_actions": spaces.Sequence(vector(2), stack=True)}
ALL = DENSE | GRAPH | ROW_MASK


def envs_with(children, action_space=None, **flags):
    """Envs of the script with these observations and actions, which cannot be stepped."""
    make = lambda: ListEnv(spaces.Dict(children), [], action_space or spaces.Discrete(9))
    return make_envs([make], script=script, **flags)


class Growing(gym.Env):
    """A graph with one more node in each step, 2 to 4, in one array that is written again; action 0
    is masked."""

    def __init__(self, action_space=None, bad_step=None, children=ALL):
        self.observation_space = spaces.Dict(children)
        self.action_space = action_space or spaces.Discrete(9)
        self.bad_step, self.speed, self.total = bad_step, np.zeros(2, np.float32), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self):
        num = self.t + 2
        self.speed[:] = np.nan if self.total == self.bad_step else self.total
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


@pytest.mark.parametrize(
    "group, mask, expected",
    [
        (None, [[1, 0, 0, 0], [0, 1, 1, 0]], [[True, False], [False, False]]),
        ("nodes", [[0], [1], [0], [0]], [[True], [False]]),
    ],
)
def test_a_mask_that_allows_nothing_forbids_nothing(group, mask, expected):
    """Of a choice and of fixed options; elsewhere it forbids what is 0."""
    entries = slice(0, 1 if group else 4)
    part = script.Part("action", script.STEP, slice(0, 1), group, 2, 2, "action_mask", entries)
    chosen = np.array([[0], [1]]) if group else np.array([[1, 1], [1, 0]])
    rows = np.array([2, 2]) if group else None
    num = rows if group else np.array([1, 1])
    masked = demos.is_masked(part, chosen, rows, np.array(mask), num, chosen[:, 0])
    assert masked.tolist() == expected


# ---- Recording ----
def test_every_entry_of_env_kwargs_is_played(tmp_path):
    """An episode of each in turn, seeded as in training."""
    record_file(tmp_path / "demos.npz", num_episodes=5, env_kwargs=[{}, {}])
    with np.load(tmp_path / "demos.npz") as file:
        first = file["values/speed"][::3, 0].tolist()
        nodes = file["values/g.nodes"]
    assert first == [0, 100, 3, 103, 6]
    for k in range(2):  # env k has seed 3 + k
        expected = np.random.default_rng(3 + k).random((2, 3), np.float64).astype(np.float32)
        np.testing.assert_array_equal(nodes[9 * k : 9 * k + 2], expected)


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


def test_what_a_policy_sees():
    """The bare environment: a rule looks inside. What does not fit the environments' own check is
    named with the step, and nothing is asked of the policy there."""
    env, found = gym.wrappers.TimeLimit(job_shop.JobShopEnv(jobs=[2, 3], machines=[2, 3]), 99), []

    def policy(bare, obs, rng):
        assert bare is env.unwrapped
        found.append(job_shop.mwkr(bare, obs, rng))
        return found[-1]

    data = demos.record(make_envs([lambda: env], script=script), policy, 2, 0)
    assert data["actions"].tolist() == [[a] for a in found] and data["terminated"].sum() == 2
    found.clear()
    with pytest.raises(check.UsageError, match="env 0, leaf 'speed', step 4: value nan"):
        recorded(lambda *_: found.append(0) or 1, bad_step=4)
    assert len(found) == 4


def test_seed():
    """It fixes what the environment and the policy draw, over all episodes, which are not the
    same."""
    policy = lambda env, obs, rng: int(rng.integers(9))
    a, b = recorded(policy), recorded(policy)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(*np.split(a["values/g.nodes"], 2))
    other = recorded(policy, seed=4)
    assert not np.array_equal(a["actions"], other["actions"])
    assert not np.array_equal(a["values/g.nodes"], other["values/g.nodes"])


MATRIX = spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [-1, 5]])
INNER = spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1)])
OUTER = spaces.Dict(b=INNER, a=spaces.Discrete(4, start=1))


@pytest.mark.parametrize(
    "space, action, columns",
    [
        (spaces.Discrete(3, start=5), 6, [1]),
        (MATRIX, np.array([[2, 2], [-1, 6]]), [1, 2, 0, 1]),
        (OUTER, {"a": 2, "b": (1, np.array([0.5]))}, [1, 0.5, 1]),
    ],
)
def test_columns_of_actions(space, action, columns):
    """In the order of the space, options counted from 0; integers, or floats where a part is a
    Box."""
    data = recorded(lambda *_: action, action_space=space, children=DENSE)
    assert data["actions"].tolist() == [columns] * 6
    has_box = any(isinstance(column, float) for column in columns)
    assert data["actions"].dtype == (np.float64 if has_box else np.int64)


MIXED_WIDTHS = spaces.Box(np.array([0, -5, 7]), np.array([1000, 2**40, 7]), dtype=np.int64)


@pytest.mark.parametrize(
    "space, action",
    [
        (MIXED_WIDTHS, [999, 3, 7]),
        (spaces.Box(np.float32([2, -1]), np.float32([2, 1])), [2, 0.25]),
        (spaces.Tuple([spaces.Box(0, 500, (), np.int16), spaces.Discrete(3)]), (20, 2)),
    ],
)
def test_boxes_come_back(space, action, tmp_path):
    """The environment is given what the policy says, and given it again by an agent that has cloned
    it, whatever numbers a script has for it."""
    given = []

    class Noting(Growing):
        def step(self, action):
            given.append(action)
            return super().step(action)

    def envs_of():
        make = lambda: Noting(action_space=space, children=DENSE)
        return make_envs([lambda: fitting.fit(make())], script=script)

    path = file_of(tmp_path, demos.record(envs_of(), lambda *_: action, 1, 0))
    envs = envs_of()
    _, actions = load(path, envs)
    assert actions.isfinite().all()
    envs.reset(0)
    envs.step(
        script.to_env_actions(
            envs.action_space, {script.STEP: actions[:1].numpy()}, script.STEP, None
        )
    )
    assert len(given) == 4
    for own in given:
        assert np.array_equal(np.concatenate(list(map(np.ravel, own))), np.ravel(action))


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
    backwards = envs.leaves[::-1]
    observations, _ = demos.read(path, backwards)
    for leaf, rows in zip(backwards, zip(*observations, strict=True), strict=True):
        assert np.array_equal(np.concatenate(rows), data[f"values/{leaf.path}"])


def test_file_that_cannot_be_written(tmp_path):
    """An error, and what was there before stays."""
    with pytest.raises(SystemExit, match="cannot write .*missing.*Errno"):
        record_file(tmp_path / "missing" / "demos.npz")
    path = str(tmp_path / "demos.npz")
    record_file(path)
    words = f"cannot write {path}: .*Errno"
    with full_disk(1000), pytest.raises(SystemExit, match=words):
        record_file(path)
    assert [found.name for found in tmp_path.iterdir()] == ["demos.npz"]
    load(path, envs_with(ALL))


def put(name, index, value):
    return lambda data: data[name].__setitem__(index, value)


def drop(name):
    return lambda data: data.pop(name)


def change(name, function):
    return lambda data: data.update({name: function(data[name])})


def roll(name):
    return change(name, lambda array: np.roll(array, 1))


def more_leaves(data):
    data["values/more"] = data["actions"]


NODES, LINKS = "leaf 'g.nodes'", "leaf 'g.edge_links'"
COUNTS = f"{NODES}: counts of 6 steps and"
SHAPE = r"where \[steps, 1\] is needed"
SHAPES = (  # of a category, of rows
    r"shape \(\) where dtype int64, shape \(\) is declared",
    r"shape \(2, 2\) where dtype float32, shape \('rows', 3\) is declared",
)
GEAR = "step 0, leaf 'gear'"
MISFITS = [
    (change("format", lambda _: "other"), "its format is other, this script reads cleanrl_graph-d"),
    (more_leaves, r"it has the leaves \[.*'more'.*\], the environment \['action"),
    (change("values/gear", lambda x: x.astype(float)), rf"{GEAR}: dtype float64, {SHAPES[0]}"),
    (change("values/g.nodes", lambda x: x[:, :2]), f"step 0, {NODES}: dtype float32, {SHAPES[1]}"),
    (drop("actions"), "it has no actions"),
    (put("counts/g.nodes", 0, 3), f"{COUNTS} 19 rows where there are 6 steps and 18 rows"),
    (roll("counts/action_mask"), "step 0, leaf 'action_mask': 4 rows where 'g.nodes' has 2"),
    (put("values/g.nodes", (5, 1), np.nan), f"step 2, {NODES}: value nan in row 0"),
    (put("values/g.edge_links", (1, 0), 3), f"step 1, {LINKS}: value 3 in row 0 of a graph with 3"),
    (put("values/g.edges", (11, 1), 4), "step 5, leaf 'g.edges': value 4 in row 2"),
    (put("values/gear", 3, 3), "step 3, leaf 'gear': value 3"),
    (put("actions", (3, 0), 2), r"step 3: part 0 of the action, \[2\], is out of range"),
    (put("actions", (0, 0), -1), r"step 0: part 0 of the action, \[-1\], is out of range"),
    (put("actions", (4, 0), 0), r"step 4: part 0 of the action, \[0\], is masked"),
    (change("actions", lambda x: x[:, :0]), rf"actions of shape \(6, 0\) {SHAPE}"),
    (change("actions", lambda x: x + 0.5), r"step 0: part 0 of the action, \[1.5\], is out of ran"),
]


@pytest.mark.parametrize("change, sentence", MISFITS)
def test_files_that_do_not_fit(change, sentence, tmp_path):
    """What does not fit the environment is named, with the file and the step."""
    path = file_of(tmp_path, recorded(), change)
    with pytest.raises(SystemExit, match=f"--demos {path}: {sentence}"):
        demos.check(path, envs_with(ALL))


def test_files_that_are_none(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name in ("text.npz", "array.npy", "missing.npz", "."):
        words = f"--demos {tmp_path / name}: not a file of demonstrations: "
        with pytest.raises(SystemExit, match=words):
            demos.check(str(tmp_path / name), envs_with(DENSE))


COMPOSITE = spaces.Tuple(
    [spaces.Discrete(3), spaces.MultiBinary(2), spaces.Discrete(2), vector(1, low=-9, high=9)]
)
OPTIONS = {"action_mask": spaces.MultiBinary(5)}  # services add two entries for each bit


@pytest.mark.parametrize(
    "action, mask, problem",
    [
        ([2, 0, 1, 1, -7.5], [0, 0, 1, 0, 1], None),
        ([2, 0, 1, 1, 0.0], [1, 1, 0, 1, 1], r"part 0 of the action, \[2.0\], is masked"),
        ([0, 0, 2, 1, 0.0], [1, 1, 1, 1, 1], r"part 1 of .* \[0.0, 2.0\], is out of range"),
        ([0, 0, 1, 1, np.nan], [1, 1, 1, 1, 1], r"part 3 of the action, \[nan\], is out of range"),
    ],
)
def test_composite_actions(action, mask, problem, tmp_path):
    """Each part has its range, and its entries of a dense mask; one Box makes all columns
    float32. They are scaled to those of the policy."""
    data = recorded()
    data = {name: data[name] for name in ("values/gear", "values/speed")}
    data["values/action_mask"] = np.ones((6, 9), np.int8)
    data["actions"] = np.zeros((6, 5), np.float32)
    data["actions"][3] = action
    data["values/action_mask"][3] = [*mask[:3], 1, 1, 1, 1, *mask[3:]]
    path, envs = file_of(tmp_path, data), envs_with(DENSE | OPTIONS, COMPOSITE)
    if problem is None:
        _, actions = load(path, envs)
        *options, number = actions[3].tolist()
        assert actions.dtype == torch.float32 and options == action[:-1]
        assert number == pytest.approx(action[-1] / 9)
    else:
        with pytest.raises(SystemExit, match=f"step 3: {problem}"):
            demos.check(path, envs)


@pytest.mark.parametrize(
    "head, children, num",
    [
        ("nodes", GRAPH, 2),
        ("auto", GRAPH | AVAIL, 3),
        ("edges", GRAPH | AVAIL, 1),
    ],
)
def test_rows_that_are_chosen(head, children, num, tmp_path):
    """An action is one of the rows of its part's group."""
    data, envs = recorded(), envs_with(children, action_head=head)
    data["values/avail_actions"] = np.zeros((18, 2), np.float32)
    data["counts/avail_actions"] = np.full(6, 3)
    data["values/action_mask"][:] = 1
    paths = [leaf.path for leaf in envs.leaves]
    for name in list(data):
        if "/" in name and name.split("/")[1] not in paths:
            del data[name]
    for action in range(4):
        data["actions"][:] = 0
        data["actions"][0] = action
        path = file_of(tmp_path, data)
        if action < num:
            assert load(path, envs)[1][0] == action
        else:
            with pytest.raises(SystemExit, match="step 0: part 0 .* is out of range"):
                demos.check(path, envs)


@pytest.mark.parametrize("columns", [1, 2])
def test_masks_of_two_parts(columns, tmp_path):
    """Two choices among the same rows, whose mask has a number per row, or one for each part."""
    data = recorded()
    mask = data["values/action_mask"]
    legal, wrong = [1, 1], [(2, [0, 1], 0), (4, [1, 0], 1)]  # (step, action, part)
    children = ALL
    if columns == 2:
        mask = np.stack([mask, 1 - mask], 1)
        legal, wrong = [1, 0], [(2, [0, 0], 0), (4, [1, 1], 1)]
        both = spaces.Sequence(spaces.Box(0, 1, (2,), np.int8), stack=True)
        children = DENSE | GRAPH | {"action_mask": both}
    data |= {"values/action_mask": mask, "actions": np.array([legal] * 6)}
    envs = envs_with(children, spaces.Tuple([spaces.Discrete(9)] * 2))
    load(file_of(tmp_path, data), envs)
    for step, action, part in wrong:
        path = file_of(tmp_path, data, put("actions", step, action))
        words = f"step {step}: part {part} of the action, .*, is masked"
        with pytest.raises(SystemExit, match=words):
            demos.check(path, envs)


# ---- Policies ----
def test_policies_by_name(tmp_path, monkeypatch):
    """A module and a name in it; what is wrong inside the module is shown as it is. `envs.NAME` is
    a module of one's own where there is one, without __init__.py, too, and else ours."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "envs").mkdir()
    text = "def {}(env, obs, rng):\n    return 7\n\nlimit = 3\n"
    (tmp_path / "my_rules.py").write_text(text.format("first"))
    (tmp_path / "my_broken.py").write_text("import no_such_thing_at_all\n")
    assert demos.find_policy("my_rules:first")(None, None, None) == 7
    assert demos.find_policy("cleanrl_graph.envs.job_shop:mwkr") is job_shop.mwkr
    assert demos.find_policy("envs.job_shop:mwkr") is job_shop.mwkr
    for name in ("my_rules:second", "my_rules:limit", "my_rules", "nowhere:first", ""):
        words = f"policy {name}: there is no such function; module:name is needed"
        with pytest.raises(SystemExit, match=words):
            demos.find_policy(name)
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        demos.find_policy("my_broken:first")
    (tmp_path / "envs" / "job_shop.py").write_text(text.format("mwkr"))
    own = ("envs", "envs.job_shop", "my_rules")
    for name in own[:2]:
        sys.modules.pop(name, None)
    assert demos.find_policy("envs.job_shop:mwkr")(None, None, None) == 7
    assert demos.find_policy("envs.flexible_job_shop:mwkr") is flexible_job_shop.mwkr
    for name in own:
        sys.modules.pop(name)
