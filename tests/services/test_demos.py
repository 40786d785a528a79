"""utils/demos.py, demonstrations that are recorded into a file and read again."""

import json
import resource
import sys
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from cleanrl_graph.envs import flexible_job_shop, job_shop
from cleanrl_graph.utils import demos


class Part(NamedTuple):
    """As the scripts have it."""

    kind: str
    size: int
    columns: slice
    group: str | None
    mask: str | None
    entries: slice


def parts(*kinds, group="g.nodes"):
    """Parts of these (kind, size), one after the other, choices from the group, with entries of
    "action_mask"."""
    found, column, entry = [], 0, 0
    for kind, size in kinds:
        width, entries = (
            size if kind in ("bits", "normal") else 1,
            {"categorical": size, "choice": 1}.get(kind, 0),
        )
        found.append(
            Part(
                kind,
                size,
                slice(column, column + width),
                group if kind == "choice" else None,
                "action_mask" if entries else None,
                slice(entry, entry + entries),
            )
        )
        column, entry = column + width, entry + entries
    return found


def leaf(path, kind, shape, dtype, group=None, space=None, get=None):
    return SimpleNamespace(
        path=path,
        kind=kind,
        shape=shape,
        dtype=np.dtype(dtype),
        group=group,
        nodes="g.nodes" if kind == "links" else None,
        space=space or SimpleNamespace(dtype=np.dtype(dtype)),
        get=get or (lambda obs: obs[path]),
    )


DENSE = [
    leaf("gear", "discrete", (), np.int64, space=spaces.Discrete(5, start=-2)),
    leaf("speed", "vector", (2,), np.float32),
]
GRAPH = [
    leaf("g.nodes", "vector", (3,), np.float32, "g.nodes", get=lambda obs: obs["g"].nodes),
    leaf(
        "g.edge_links", "links", (2,), np.int32, "g.edge_links", get=lambda obs: obs["g"].edge_links
    ),
    leaf(
        "g.edges",
        "discrete",
        (2,),
        np.int64,
        "g.edge_links",
        spaces.MultiDiscrete([4, 4]),
        lambda obs: obs["g"].edges,
    ),
]
ROW_MASK = leaf("action_mask", "vector", (), np.int8, "g.nodes")


class FakeEnvs:
    """What `record` uses of the scripts' Envs."""

    def __init__(self, env, leaves):
        self.envs, self.leaves, self.num_steps = [env], leaves, 0

    def read(self, i, obs):
        return [np.asarray(leaf.get(obs), leaf.dtype) for leaf in self.leaves]

    def collate(self, observations, envs):
        values, counts = [], {}
        for leaf, arrays in zip(self.leaves, zip(*observations, strict=True), strict=True):
            values.append(np.concatenate(arrays) if leaf.group else np.stack(arrays))
            if leaf.group:
                counts[leaf.group] = np.array([len(array) for array in arrays])
            if not np.isfinite(values[-1]).all():
                raise ValueError(
                    f"env {list(envs)[0]}, leaf '{leaf.path}', step {self.num_steps}: not finite"
                )
        return SimpleNamespace(values=values, counts=counts)


class Growing(gym.Env):
    """A graph with one more node in each step, 2 to 4, in one array that is written again; action 0
    is masked."""

    def __init__(self, action_space=None, bad_step=None):
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
        return {
            "gear": self.t - 2,
            "speed": self.speed,
            "g": graph,
            "action_mask": np.arange(num) > 0,
        }

    def step(self, action):
        self.t, self.total = self.t + 1, self.total + 1
        return (
            self.observe(),
            self.t / 2,
            self.t == 3 and self.total > 3,
            self.t == 3 and self.total == 3,
            {},
        )


def last_node(env, obs, rng):
    """The node that was added last."""
    return len(obs["g"].nodes) - 1


def recorded(policy=last_node, leaves=(*DENSE, *GRAPH, ROW_MASK), num_episodes=2, **kwargs):
    """(arrays, environment)"""
    env = Growing(**kwargs)
    return demos.record(FakeEnvs(env, list(leaves)), policy, num_episodes, 3), env


def file_of(folder, data, change=lambda data: None):
    """The path of the data after `change`, in the format of the file."""
    demos.save(path := str(folder / "demos.npz"), data, "Growing-v0", {"size": 3})
    with np.load(path) as file:
        data = dict(file)
    change(data)
    np.savez(path, **data)
    return path


# ---- Recording ----
def test_recorded_arrays():
    """Every step of the episodes in order, without padding, as it was when the policy saw it."""
    data, _ = recorded()
    assert data["counts/g.nodes"].tolist() == data["counts/action_mask"].tolist() == [2, 3, 4] * 2
    assert data["counts/g.edges"].tolist() == [1, 2, 3] * 2 and "counts/gear" not in data
    assert data["values/g.nodes"].shape == (18, 3) and data["values/g.edge_links"].shape == (12, 2)
    assert (
        data["values/speed"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
        and data["values/gear"].tolist() == [-2, -1, 0] * 2
    )
    assert data["actions"].tolist() == [[1], [2], [3]] * 2 and data["actions"].dtype == np.int64
    assert data["rewards"].tolist() == [0.5, 1.0, 1.5] * 2 and data["rewards"].dtype == np.float32
    assert data["truncated"].tolist() == [False, False, True, False, False, False]
    assert data["terminated"].tolist() == [False, False, False, False, False, True]


def test_outcomes_as_arrays():
    """Rewards and ends that are arrays of one number, as the scripts take them, are recorded."""
    env = Growing()
    step = env.step

    def with_arrays(action):
        obs, reward, terminated, truncated, info = step(action)
        return obs, reward, np.array([terminated]), np.array(truncated), info

    env.step = with_arrays
    data = demos.record(FakeEnvs(env, [*DENSE, *GRAPH, ROW_MASK]), last_node, 2, 3)
    expected, _ = recorded()
    for name in ("rewards", "terminated", "truncated"):
        assert np.array_equal(data[name], expected[name]), name


def test_seed():
    """It fixes what the environment and the policy draw, over all episodes, which are not the
    same."""
    policy = lambda env, obs, rng: int(rng.integers(9))
    (a, _), (b, env) = recorded(policy), recorded(policy)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(*np.split(a["values/g.nodes"], 2))
    other = demos.record(FakeEnvs(env, [*DENSE, *GRAPH, ROW_MASK]), policy, 2, 4)
    assert not np.array_equal(a["actions"], other["actions"])
    assert not np.array_equal(a["values/g.nodes"], other["values/g.nodes"])


def test_policy_sees_the_bare_environment():
    """A rule looks inside; the actions of MWKR are those of the rule."""
    env, found = gym.wrappers.TimeLimit(job_shop.JobShopEnv(jobs=[2, 3], machines=[2, 3]), 99), []
    leaves = [leaf("times", "vector", (), np.float32, get=lambda obs: 0.0)]

    def policy(bare, obs, rng):
        assert bare is env.unwrapped
        found.append(job_shop.mwkr(bare, obs, rng))
        return found[-1]

    data = demos.record(FakeEnvs(env, leaves), policy, 2, 0)
    assert data["actions"].tolist() == [[a] for a in found] and data["terminated"].sum() == 2


def test_observation_that_does_not_fit():
    """The environments' own check names the step; nothing is asked of the policy there."""
    seen = []
    with pytest.raises(ValueError, match="leaf 'speed', step 4"):
        recorded(lambda *_: seen.append(0) or 1, bad_step=4)
    assert len(seen) == 4


@pytest.mark.parametrize(
    "space, action, columns",
    [
        (spaces.Discrete(3, start=5), 6, [1]),
        (
            spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [-1, 5]]),
            np.array([[2, 2], [-1, 6]]),
            [1, 2, 0, 1],
        ),
        (spaces.MultiBinary(2), np.array([0, 1], np.int8), [0, 1]),
        (spaces.Box(-1, 1, (2, 1)), np.array([[0.5], [-0.25]]), [0.5, -0.25]),
        (
            spaces.Dict(
                b=spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1)]),
                a=spaces.Discrete(4, start=1),
            ),
            {"a": 2, "b": (1, np.array([0.5]))},
            [1, 0.5, 1],
        ),
    ],
)
def test_columns_of_actions(space, action, columns):
    """In the order of the space, options counted from 0; integers, or floats where a part is a
    Box."""
    data, _ = recorded(lambda *_: action, action_space=space)
    assert data["actions"].tolist() == [columns] * 6
    assert data["actions"].dtype == (
        np.float32 if any(isinstance(column, float) for column in columns) else np.int64
    )


def test_what_cannot_be_recorded():
    with pytest.raises(SystemExit, match="0 episodes of demonstrations: at least 1 is needed"):
        recorded(num_episodes=0)
    with pytest.raises(SystemExit, match=r"actions in Sequence\(Discrete\(2\).*cannot be recorded"):
        recorded(lambda *_: (0, 1), action_space=spaces.Sequence(spaces.Discrete(2)))


# ---- The file ----
def test_file_comes_back(tmp_path):
    """Observations in the order of the leaves, rows of each step, and actions."""
    data, _ = recorded()
    path = file_of(tmp_path, data)
    leaves = [ROW_MASK, *GRAPH, *DENSE]
    values, counts, actions = demos.load(path, leaves, parts(("choice", 9)))
    for leaf, found in zip(leaves, values, strict=True):
        assert np.array_equal(found, data[f"values/{leaf.path}"]) and found.dtype == leaf.dtype
    assert {group: num.tolist() for group, num in counts.items()} == {
        "g.nodes": [2, 3, 4] * 2,
        "g.edge_links": [1, 2, 3] * 2,
    }
    assert actions.tolist() == [[1], [2], [3]] * 2 and actions.dtype == np.int64
    with np.load(path, allow_pickle=False) as file:
        assert str(file["env_id"]) == "Growing-v0" and json.loads(str(file["env_kwargs"])) == {
            "size": 3
        }
        assert str(file["format"]) == "cleanrl_graph-demos-1"


def test_links_of_older_files(tmp_path):
    """They were int64."""
    data, _ = recorded()
    links, leaves = data["values/g.edge_links"], [ROW_MASK, *GRAPH, *DENSE]
    path = file_of(tmp_path, data | {"values/g.edge_links": links.astype(np.int64)})
    found, _, _ = demos.load(path, leaves, parts(("choice", 9)))
    (values,) = (values for leaf, values in zip(leaves, found) if leaf.kind == "links")
    assert np.array_equal(values, links) and values.dtype == links.dtype == np.int32


def test_file_that_cannot_be_written(tmp_path):
    """An error, and what was there before stays."""
    data, _ = recorded()
    with pytest.raises(SystemExit, match="cannot write .*missing.*Errno"):
        demos.save(str(tmp_path / "missing" / "demos.npz"), data, "", {})
    path = file_of(tmp_path, data)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        with pytest.raises(SystemExit, match=f"cannot write {path}: .*Errno"):
            demos.save(path, data, "", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [found.name for found in tmp_path.iterdir()] == ["demos.npz"]
    demos.load(path, [*DENSE, *GRAPH, ROW_MASK], parts(("choice", 9)))


def put(name, index, value):
    return lambda data: data[name].__setitem__(index, value)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            lambda d: d.update(format="other"),
            "its format is other, this script reads cleanrl_graph-demos-1",
        ),
        (lambda d: d.pop("format"), "its format is None"),
        (
            lambda d: d.update({"values/more": d["actions"]}),
            r"it has the leaves \[.*'more'.*\], the environment \['action",
        ),
        (lambda d: d.pop("values/gear"), r"it has the leaves .*, the environment \[.*'gear'"),
        (
            lambda d: d.update({"values/speed": d["values/speed"].astype(float)}),
            r"leaf 'speed': dtype float64, shape \(2,\) where the environment has dtype float32, "
            r"shape \(2,\)",
        ),
        (
            lambda d: d.update({"values/g.nodes": d["values/g.nodes"][:, :2]}),
            r"leaf 'g.nodes': dtype float32, shape \('rows', 2\) where the environment has dtype "
            r"float32, shape \('rows', ",
        ),
        (lambda d: d.pop("counts/g.nodes"), r"leaf 'g.nodes': dtype float32, shape \(3,\) where"),
        (
            lambda d: d.update({"counts/g.nodes": d["counts/g.nodes"][1:]}),
            "leaf 'g.nodes': counts of 5 steps and 16 rows",
        ),
        (
            put("counts/g.nodes", 0, 3),
            "leaf 'g.nodes': counts of 6 steps and 19 rows where there are 6 steps and 18 rows",
        ),
        (
            put("counts/g.nodes", slice(2), (-1, 6)),
            "leaf 'g.nodes': counts of 6 steps and 18 rows where",
        ),
        (
            lambda d: d.update(
                {name: d[name][:0] for name in d if "/" in name or name == "actions"}
            ),
            r"actions of shape \(0, 1\) where \[steps, 1\] is needed",
        ),
        (
            lambda d: d.update({"counts/action_mask": np.roll(d["counts/action_mask"], 1)}),
            "leaf 'action_mask': its counts are not those of the other leaves of 'g.nodes'",
        ),
        (
            put("values/g.nodes", (5, 1), np.nan),
            "step 2, leaf 'g.nodes': value nan is out of range",
        ),
        (put("values/speed", (4, 0), np.inf), "step 4, leaf 'speed': value inf is out of range"),
        (
            put("values/g.edge_links", (1, 0), 3),
            "step 1, leaf 'g.edge_links': value 3 is out of range",
        ),
        (
            put("values/g.edge_links", (0, 1), -1),
            "step 0, leaf 'g.edge_links': value -1 is out of range",
        ),
        (put("values/g.edges", (11, 1), 4), "step 5, leaf 'g.edges': value 4 is out of range"),
        (put("values/gear", 3, 3), "step 3, leaf 'gear': value 3 is out of range"),
        (put("values/gear", 0, -3), "step 0, leaf 'gear': value -3 is out of range"),
        (put("actions", (3, 0), 2), r"step 3: part 0 of the action, \[2\], is out of range"),
        (put("actions", (0, 0), -1), r"step 0: part 0 of the action, \[-1\], is out of range"),
        (put("actions", (4, 0), 0), r"step 4: part 0 of the action, \[0\], is masked"),
        (
            lambda d: d.update(actions=d["actions"][:, :0]),
            r"actions of shape \(6, 0\) where \[steps, 1\] is needed",
        ),
        (
            lambda d: d.update(actions=d["actions"][:, 0]),
            r"actions of shape \(6,\) where \[steps, 1\] is needed",
        ),
        (
            lambda d: d.update(actions=d["actions"] + 0.5),
            r"step 0: part 0 of the action, \[1.5\], is out of range",
        ),
    ],
)
def test_files_that_do_not_fit(change, sentence, tmp_path):
    """What does not fit the environment is named, with the file and the step."""
    path = file_of(tmp_path, recorded()[0], change)
    with pytest.raises(SystemExit, match=f"--demos {path}: {sentence}"):
        demos.load(path, [*DENSE, *GRAPH, ROW_MASK], parts(("choice", 9)))


def test_files_that_are_none(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name in ("text.npz", "array.npy", "missing.npz", "."):
        with pytest.raises(
            SystemExit, match=f"--demos {tmp_path / name}: not a file of demonstrations: "
        ):
            demos.load(str(tmp_path / name), DENSE, parts(("categorical", 2)))


COMPOSITE = parts(("categorical", 3), ("bits", 2), ("categorical", 2), ("normal", 1))
OPTIONS = leaf("action_mask", "vector", (5,), np.int8)


@pytest.mark.parametrize(
    "action, mask, problem",
    [
        ([2, 0, 1, 1, -7.5], [0, 0, 1, 0, 1], None),
        ([2, 0, 1, 1, 0.0], [1, 1, 0, 1, 1], r"part 0 of the action, \[2.0\], is masked"),
        ([2, 0, 1, 1, 0.0], [1, 1, 1, 1, 0], r"part 2 of the action, \[1.0\], is masked"),
        ([3, 0, 1, 1, 0.0], [1, 1, 1, 1, 1], r"part 0 of the action, \[3.0\], is out of range"),
        (
            [0, 0, 2, 1, 0.0],
            [1, 1, 1, 1, 1],
            r"part 1 of the action, \[0.0, 2.0\], is out of range",
        ),
        ([0, 0, 1, 1, np.nan], [1, 1, 1, 1, 1], r"part 3 of the action, \[nan\], is out of range"),
    ],
)
def test_composite_actions(action, mask, problem, tmp_path):
    """Each part has its range, and its entries of a dense mask; one Box makes all columns
    float32."""
    data, _ = recorded()
    data = {
        "values/gear": data["values/gear"],
        "values/speed": data["values/speed"],
        "values/action_mask": np.ones((6, 5), np.int8),
        "actions": np.zeros((6, 5), np.float32),
    }
    data["actions"][3], data["values/action_mask"][3] = action, mask
    path = file_of(tmp_path, data)
    if problem is None:
        _, _, actions = demos.load(path, [*DENSE, OPTIONS], COMPOSITE)
        assert actions.dtype == np.float32 and actions[3].tolist() == action
    else:
        with pytest.raises(SystemExit, match=f"step 3: {problem}"):
            demos.load(path, [*DENSE, OPTIONS], COMPOSITE)


AVAIL = leaf("avail_actions", "vector", (2,), np.float32, "avail_actions")


@pytest.mark.parametrize(
    "group, leaves, num",
    [
        ("g.nodes", [*GRAPH[::-1]], 2),
        ("avail_actions", [*GRAPH, AVAIL], 3),
        ("g.nodes", [AVAIL, *GRAPH, ROW_MASK], 2),
        ("g.edge_links", [*GRAPH, AVAIL], 1),
    ],
)
def test_rows_that_are_chosen(group, leaves, num, tmp_path):
    """An action is one of the rows of its part's group."""
    data, _ = recorded()
    data |= {
        "values/avail_actions": np.zeros((18, 2), np.float32),
        "counts/avail_actions": np.full(6, 3),
    }
    data["values/action_mask"][:] = 1
    paths = [leaf.path for leaf in leaves]
    for name in list(data):
        if "/" in name and name.split("/")[1] not in paths:
            del data[name]
    (part,) = parts(("choice", 9), group=group)
    if part.mask not in paths:
        part = part._replace(mask=None)
    for action in range(4):
        data["actions"][:] = 0
        data["actions"][0] = action
        path = file_of(tmp_path, data)
        if action < num:
            assert demos.load(path, leaves, [part])[2][0] == action
        else:
            with pytest.raises(SystemExit, match="step 0: part 0 .* is out of range"):
                demos.load(path, leaves, [part])


def test_mask_with_a_column_per_part(tmp_path):
    """Two choices among the same rows, each with its own column of the mask."""
    data, _ = recorded()
    mask = np.stack([data["values/action_mask"], 1 - data["values/action_mask"]], 1)
    data |= {"values/action_mask": mask, "actions": np.array([[1, 0]] * 6)}
    leaves = [*DENSE, *GRAPH, leaf("action_mask", "vector", (2,), np.int8, "g.nodes")]
    demos.load(file_of(tmp_path, data), leaves, parts(("choice", 9), ("choice", 9)))
    for step, action, part in ((2, [0, 0], 0), (4, [1, 1], 1)):
        path = file_of(tmp_path, data, put("actions", step, action))
        with pytest.raises(
            SystemExit, match=f"step {step}: part {part} of the action, .*, is masked"
        ):
            demos.load(path, leaves, parts(("choice", 9), ("choice", 9)))


# ---- Policies ----
def test_policies_by_name(tmp_path, monkeypatch):
    """A module and a name in it; what is wrong inside the module is shown as it is."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rules.py").write_text("def first(env, obs, rng):\n    return 0\n\nlimit = 3\n")
    (tmp_path / "my_broken.py").write_text("import no_such_thing_at_all\n")
    (tmp_path / "my_failing.py").write_text("raise ValueError('not today')\n")
    assert demos.find_policy("my_rules:first")(None, None, None) == 0
    assert demos.find_policy("cleanrl_graph.envs.job_shop:mwkr") is job_shop.mwkr
    assert demos.find_policy("envs.job_shop:mwkr") is job_shop.mwkr
    for name in (
        "my_rules:second",
        "my_rules:limit",
        "my_rules",
        "my_rules.sub:first",
        "nowhere:first",
        "envs.nowhere:first",
        ":first",
        "",
    ):
        with pytest.raises(
            SystemExit, match=f"policy {name}: there is no such function; module:name is needed"
        ):
            demos.find_policy(name)
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        demos.find_policy("my_broken:first")
    with pytest.raises(ValueError, match="not today"):
        demos.find_policy("my_failing:first")
    sys.modules.pop("my_rules")


def test_policies_of_ones_own_envs(tmp_path, monkeypatch):
    """`envs.NAME` is a module of one's own where there is one, also in a folder without
    __init__.py, and else ours."""
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "job_shop.py").write_text("def mwkr(env, obs, rng):\n    return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("envs", None)
    assert demos.find_policy("envs.job_shop:mwkr")(None, None, None) == 7
    assert demos.find_policy("envs.flexible_job_shop:mwkr") is flexible_job_shop.mwkr
    for module in ("envs", "envs.job_shop"):
        sys.modules.pop(module)
