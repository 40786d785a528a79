"""What is wrong with an environment, its data, a flag or a file is said in one sentence: where,
which value, what to do; what only looks wrong simply works. The cases are those of hostile.py, and
what tries.py does with them has its test here."""

import copy
import re
import textwrap
from functools import partial

import gymnasium as gym
import hostile
import numpy as np
import pytest
import tries
from gymnasium import spaces
from helpers import SmallEnv, make_envs, run, vector

from cleanrl_graph import ppo_graph_agents
from cleanrl_graph.envs import fitting

OURS = "cleanrl_graph.envs.wrappers"
IN_RUNS = {  # what the environments alone do not find, or not alone
    "actions: an entry that is only played",
    "observations: text space",
    "returns: mask of reset alone",
}
WALKED = [
    name
    for name, each in hostile.TRIES.items()
    if each.kind in ("observations", "returns", "raises")
    or (each.kind == "actions" and each.expected != "trains")
    if name not in IN_RUNS
]
IN_WORKERS = (  # a sentence of each place that finds one, and what a worker sends
    "observations: ids that are equal",
    "observations: a view of one buffer of all environments",
    "observations: none and 3,000 nodes in turn",
    "observations: a set of sets",
    "returns: reward None",
    "returns: reset: nothing",
    "raises: NoCopy",
    "raises: SystemExit",
    "raises: in its constructor",
)


def walk(each, num_workers):
    """Three episodes of a try's environments: the leaves, and each Step with a copy of it."""
    entries = each.kwargs if isinstance(each.kwargs, list) else [each.kwargs]
    entries = entries * 2 if len(entries) == 1 else entries
    name = f"{each.kind}: {each.name}"
    head = re.search(r"--action-head (\w+)", each.flags)
    flags = dict(action_head=head[1] if head else "auto")
    envs = make_envs(
        [partial(hostile.Hostile, name, **entry) for entry in entries], num_workers, **flags
    )
    steps = []
    try:
        for k in range(14):
            actions = [copy.deepcopy(envs.action_space.sample()) for _ in entries]
            steps.append(envs.step(actions) if k else envs.reset(1))
            steps[-1] = steps[-1], copy.deepcopy(steps[-1])
    finally:
        envs.close()
    return envs.leaves, steps


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setattr(hostile, "FOLDER", str(tmp_path))
    monkeypatch.setattr(fitting.SAID, "lines", set())


@pytest.mark.parametrize(
    "name, num_workers", [(name, 0) for name in WALKED] + [(name, 2) for name in IN_WORKERS]
)
def test_walk(name, num_workers, notes, capsys):
    """The sentence, without frames of a script; or what the environment returned, bit by bit."""
    each = hostile.TRIES[name]
    if each.expected == "trains":
        leaves, steps = walk(each, num_workers)
        printed = capsys.readouterr().err
        assert not each.is_compared or tries.unlike_noted(leaves, steps) is None
        assert len(re.findall(each.says, printed)) == 1 or not each.says
        infos = [info for step, _ in steps for _, info in step.infos]
        assert len(infos) >= 4 and (not each.says or set().union(*infos) == {"episode"})
        return
    with pytest.raises(ValueError) as error:
        walk(each, num_workers)
    assert re.search(each.expected, str(error.value), re.S), error.value
    assert "ppo_graph.py" not in str(error.value)


RUNS = IN_RUNS | {
    *("actions: parts per node", "actions: mostly no row"),
    "observations: nodes of one environment alone",
    *("process: SIGTERM", "process: a worker is killed", "process: a worker sleeps"),
    *("process: close() raises", "process: raises when played", "process: changes the folder"),
    "raises: SystemExit",
}


def is_fast(name, each):
    is_sentence = each.kind == "flags" and each.expected != "trains"
    return is_sentence or each.kind == "files" or name in RUNS


@pytest.mark.parametrize(
    "name",
    [
        name if is_fast(name, each) else pytest.param(name, marks=pytest.mark.slow)
        for name, each in hostile.TRIES.items()
    ],
)
def test_run(name, imported):
    """A process of its own that runs the script."""
    each = hostile.TRIES[name]
    row = tries.attempt(each, each.script)
    assert row.result == ("trains" if each.expected == "trains" else "sentence"), row


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """What a first training imports, so that the processes of tries need not."""
    run(tmp_path_factory.mktemp("runs"), env_id="CartPole-v1", checkpoint_every=1)


WRONG = {
    "silent": dict(accept=lambda env, action: False),
    "hang": dict(hooks={"step": hostile.wait()}, limit=1),
    "other": dict(hooks={"step": hostile.raises(KeyError("a"))}),
    "traceback": dict(before=lambda go: exec("import torch; del torch.cat")),
}


@pytest.mark.parametrize("result", WRONG)
def test_failures_are_seen(result, monkeypatch, imported):
    """A wrong action, no return, another exception, and an exception of a script."""
    each = hostile.Try("process", result, **WRONG[result])
    monkeypatch.setitem(hostile.TRIES, f"process: {result}", each)
    assert tries.attempt(each, each.script).result == result


# ---- Rewards of agents, and of objectives; other environments of their own ----
class Simple(SmallEnv):
    """Two numbers; episodes of 5 steps."""

    observation_space, action_space, terminates = vector(2), spaces.Discrete(2), True

    def observe(self):
        return np.array([self.t / 10, 0], np.float32)

    def reward(self, action):
        return 1.0


class Old(Simple):
    """Of the days before gymnasium."""

    def reset(self):
        return super().reset()[0]

    def step(self, action):
        obs, reward, ended, _, info = super().step(action)
        return obs, reward, ended, info


class Strict(Simple):
    def step(self, action):
        if type(action) is not int:
            raise AssertionError(f"action must be an integer: {action} is invalid")
        return super().step(action)


class Needy(Simple):
    def __init__(self, n_nodes):
        assert n_nodes > 0, "too few"


class Objectives(Simple):
    """A reward for each objective."""

    def step(self, action):
        obs, reward, *outcome = super().step(action)
        return obs, np.array([reward, 2 * reward]), *outcome


class Linear(gym.Wrapper):
    def step(self, action):
        obs, reward, *outcome = super().step(action)
        return obs, float(reward.sum()), *outcome


class Team(gym.Env):
    """Each agent is shown which of its two actions is right, and rewarded. `of` is the kind of
    observation, action, rewards and ends: tuple or dict. Agent 1 ends after 2 steps, all after
    3."""

    def __init__(self, of="tuple", lists_ends=True):
        self.names = [0, 1, 2] if of == "tuple" else list("abc")
        self.of, self.lists_ends = of, lists_ends
        kind = spaces.Tuple if of == "tuple" else spaces.Dict
        self.observation_space = kind(self.pack([vector(2)] * 3))
        self.action_space = kind(self.pack([spaces.Discrete(2)] * 3))

    def pack(self, values):
        return tuple(values) if self.of == "tuple" else dict(zip(self.names, values))

    def observe(self):
        self.right = self.np_random.integers(2, size=3)
        return self.pack(list(np.eye(2, dtype=np.float32)[self.right]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        chosen = [action.get(name) if self.of == "dict" else action[name] for name in self.names]
        rewards = self.pack([float(a == b) for a, b in zip(chosen, self.right)])
        ends = [self.t >= 3, self.t >= 2, self.t >= 3]
        over = self.pack(ends) if self.lists_ends else all(ends)
        return self.observe(), list(rewards) if self.of == "tuple" else rewards, over, False, {}


for kind in (Old, Strict, Needy, Objectives, Team):
    gym.register(f"{kind.__name__}-v0", entry_point=kind)


@pytest.mark.parametrize(
    "name, kwargs, sentence",
    [
        ("Team-v0", {}, f"reward is .*ppo_graph_agents.py.*--wrap {OURS}:MeanReward"),
        ("Old-v0", {}, "gym's old interface"),
        ("Strict-v0", {}, r"step\(np.int64\(\d\),\): AssertionError: action must be an int"),
        ("Strict-v0", {"nope": 1}, "--env-id Strict-v0 .*--env-kwargs.*: TypeError"),
        ("Needy-v0", {"n_nodes": -1}, "Needy-v0 .*AssertionError: too few"),
    ],
)
def test_advice(name, kwargs, sentence, tmp_path):
    """The flag, the script or the wrapper that an environment needs."""
    with pytest.raises((ValueError, gym.error.Error, OSError, SystemExit)) as error:
        run(tmp_path, env_id=name, env_kwargs=kwargs)
    assert re.search(sentence, str(error.value), re.S), error.value


@pytest.mark.parametrize("name", ["Team", "Objectives", "Strict", "Old"])
def test_advice_helps(name, tmp_path, monkeypatch):
    """A wrapper of --wrap, or the guide's around an old one; its rewards are what is logged."""
    text = (hostile.ROOT / "cleanrl_graph" / "README.md").read_text()
    code = text.partition("gym's old interface")[2].partition("```python")[2].partition("```")[0]
    names = {}
    exec(f"import gymnasium as gym\n{textwrap.dedent(code)}", names)
    wrapped = {"id": "Old-v0", "entry_point": lambda: names["NewInterface"](Old())}
    monkeypatch.setitem(gym.registry, "Old-v0", gym.envs.registration.EnvSpec(**wrapped))
    wraps = {"Team": f"{OURS}:MeanReward", "Objectives": f"{__name__}:Linear", "Old": ""}
    wraps |= {"Strict": f"{OURS}:PythonInts"}
    wrap = tuple(filter(None, [wraps[name]]))
    flags = dict(wrap=wrap, num_workers=2 if name == "Team" else 0, eval_episodes=2)
    result = run(tmp_path, env_id=f"{name}-v0", **flags)
    rows = [(row["return"], row["length"]) for row in result.rows]
    if name == "Team":
        assert all(0 <= total <= 3 and length == 3 for total, length in rows)
    else:
        total = 15.0 if name == "Objectives" else 5.0
        assert rows == [(total, 5)] * 2
        assert {value for _, value in result.scalars["charts/episodic_return"]} == {total}


@pytest.mark.parametrize("of, lists_ends", [("tuple", True), ("dict", False)])
def test_agents_become_a_set(of, lists_ends, tmp_path):
    """In the script of agents, by itself: they learn, and one that has ended is gone."""
    kwargs = {"of": of, "lists_ends": lists_ends}
    flags = dict(env_id="Team-v0", env_kwargs=kwargs, total_timesteps=1536, learning_rate=2e-2)
    flags |= dict(num_envs=8, num_steps=16, eval_episodes=20)
    result = run(tmp_path, ppo_graph_agents, **flags)
    assert np.mean([row["return"] for row in result.rows]) > 2.9
    rows = result.scalars["charts/rows/agents"][-1][1]
    assert rows == pytest.approx(8 / 3 if lists_ends else 3, abs=0.05)
