"""What the pages in cleanrl_graph/docs/ say is so: their links lead to the lines that they show,
each whole script has a page with its flags, and the list of logged scalars is that of real runs."""

import importlib
import json
import re
from dataclasses import fields
from functools import cache

import doc_lines
import gymnasium as gym
import numpy as np
import pytest
import run_notebook
from gymnasium import spaces
from helpers import SmallEnv, command, run, small_args, train_events, vector

from cleanrl_graph import ppo_graph, services

DOCS = doc_lines.DOCS
WHOLE = sorted(
    path.stem for path in DOCS.parent.glob("ppo_*.py") if not path.stem.endswith("_mini")
)
MINIS = sorted(path.stem for path in DOCS.parent.glob("ppo_*_mini.py"))


# ---- Links to lines, a page for each script ----
def test_links_lead_to_their_lines():
    """`python tests/doc_lines.py --write` mends numbers."""
    assert doc_lines.compare() == []


def page_of(name):
    return (DOCS / f"{re.sub('^ppo_(graph_)?', '', name)}.md").read_text()


@pytest.mark.parametrize("name", WHOLE)
def test_each_script_has_a_page(name):
    """It links to the script and to its short file, if there is one, has numbered details with
    lines of the script, and names all flags that ppo_graph.py lacks."""
    text = page_of(name)
    assert f"(../{name}.py)" in text
    if f"{name}_mini" in MINIS:
        assert f"(../{name}_mini.py)" in text
    details = re.findall(r"^\d\. (.*?)(?=^\d\. |^$)", text, re.M | re.S)
    assert len(details) > 5 and len(re.findall(rf"\.\./{name}\.py#L", text)) > 4
    ours = {field.name for field in fields(ppo_graph.Args)}
    own = {field.name for field in fields(importlib.import_module(f"cleanrl_graph.{name}").Args)}
    flags = {f"--{flag.replace('_', '-')}" for flag in own - ours}
    assert flags <= set(re.findall(r"--[a-z][a-z-]+[a-z]", text))


# ---- The list of logged scalars ----
NAME = r"my_\w+|task_\d|cost|best_known|is_success"  # what the environment of these tests calls it


class Own(SmallEnv):
    """A graph of two nodes, which have ids. The action is a node, numbers, or one for each node.
    Episodes have a group, and a number of their own. One that is `still` ends by a large number:
    not while a new policy acts greedily."""

    actions = {"node": spaces.Discrete(2), "numbers": vector(2)}
    actions["each"] = spaces.Sequence(spaces.Discrete(2))
    terminates = True

    def __init__(self, action="node", still=False, size=2):
        rows = lambda space: spaces.Sequence(space, stack=True)
        own = {"graph": spaces.Graph(vector(1), None), "node_ids": rows(spaces.Discrete(9))}
        own |= {"action_mask": rows(spaces.MultiBinary(1))} if action == "node" else {}
        self.observation_space, self.action_space = spaces.Dict(own), self.actions[action]
        self.still, self.length = still, 10**9 if still else 5

    def observe(self):
        graph = spaces.GraphInstance(np.ones((2, 1), np.float32), None, np.array([[0, 1], [1, 0]]))
        obs = {"graph": graph, "node_ids": np.arange(2), "action_mask": np.ones((2, 1), np.int8)}
        return {name: obs[name] for name in self.observation_space}

    def step(self, action):
        obs, reward, ends, *result, info = super().step(action)
        info["rewards"] = [1.0, 0.0]
        ends |= self.still and abs(action).max() > 0.5
        if ends:
            report = {"cost": 2.0, "best_known": 1.0, "my_cost": 1.0}
            info |= {"group": "my_group", "eval": report, "is_success": True}
            info["metrics"] = {"my_number": 1.0}
        return obs, reward, bool(ends), *result, info


gym.register("DocsOwn-v0", Own)
gym.register("DocsNumbers-v0", Own, kwargs={"action": "numbers"})
gym.register("DocsEach-v0", Own, kwargs={"action": "each"})
gym.register("DocsStill-v0", Own, kwargs={"action": "numbers", "still": True})


def first_action(env, obs, rng):
    """A demonstrator."""
    return np.ones(2, np.float32) if isinstance(env.action_space, spaces.Box) else 0


def runs_of(name):
    """The flags of the short trainings that log all that a whole script can."""
    env = "DocsEach-v0" if name == "ppo_graph_agents" else "DocsOwn-v0"
    flags = dict(env_id=env, env_kwargs=[{}, {"size": 2}])
    if name == "ppo_graph":
        flags |= {"eval_every": 1, "eval_episodes": 2}
        still = flags | {"env_id": "DocsStill-v0", "eval_max_steps": 20}
        return [flags, flags | {"eval_max_steps": 3}, still]
    if name != "ppo_graph_aux":
        return [flags]
    more = [{"aux": "reconstruct"}, {"aux": "predict"}]
    more += [{"demos": True}, {"demos": True, "env_id": "DocsNumbers-v0"}]
    return [flags | own for own in more]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Script -> the scalars that its short trainings logged."""

    @cache
    def of(name):
        script = importlib.import_module(f"cleanrl_graph.{name}")
        folder = tmp_path_factory.mktemp(name)
        tags = set()
        if name in MINIS:
            graphs = "graph" in name or "sparse" in name
            words = "--total-timesteps=128 --num-envs=2 --num-steps=16".split()
            words += ["--num-minibatches=2", "--no-cuda"]
            words += [f"--env-id={'DocsOwn-v0' if graphs else 'CartPole-v1'}"]
            code, _, error = command(*words, script=script, cwd=folder)
            assert code == 0, error
            return set(train_events(folder / "runs"))
        for i, flags in enumerate(runs_of(name)):
            if flags.pop("demos", False):
                flags["demos"] = str(folder / f"{i}.npz")
                record = dict(record=f"{__name__}:first_action", record_episodes=2)
                services.run(script, small_args(script, **flags, **record))
            tags |= set(run(folder / str(i), script, **flags).scalars)
        return tags

    return of


def listed():
    """Pattern -> the words in brackets after it, of all names in the list."""
    text = (DOCS / "scalars.md").read_text()
    found = {}
    for cell in re.findall(r"^\| (`.*?) \|", text, re.M):
        names, _, words = cell.partition(" (")
        for name in re.findall(r"`([^`]+)`", names):
            pattern = name.replace("GROUP", r"[\w.]+").replace("NAME", f"({NAME})")
            found[pattern] = words
    return found


def matches(patterns, names):
    return {name for name in names if any(re.fullmatch(each, name) for each in patterns)}


@pytest.mark.parametrize("name", WHOLE + MINIS)
def test_the_list_has_what_a_run_logs(name, logged):
    """All of it; and what is marked as one script's is logged by no other one."""
    patterns = {
        pattern
        for pattern, words in listed().items()
        if ".py" not in words or f"`{name}.py`" in words
    }
    assert logged(name) - matches(patterns, logged(name)) == set()


def test_a_run_logs_what_the_list_has(logged):
    """Each name of it is logged by some script, and by the one that is named beside it."""
    everything = set().union(*map(logged, WHOLE + MINIS))
    for pattern, words in listed().items():
        (script,) = re.findall(r"`(ppo_\w+)\.py`", words) or [None]
        assert matches([pattern], logged(script) if script else everything), pattern


# ---- The notebook ----
def notebook_of():
    cells = run_notebook.code_cells(json.loads(run_notebook.NOTEBOOK.read_text()))
    return cells, ["".join(cell["source"]) for cell in cells]


@pytest.mark.parametrize("steps", [2048, pytest.param(60_000, marks=pytest.mark.slow)])
def test_the_notebook_runs(steps, tmp_path, monkeypatch):
    """Its cells, one after the other; what was trained in full is better than the rule."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(gym.registry, "Salesman-v0", raising=False)
    cells, sources = notebook_of()
    assert sum(source.count("total_timesteps=60_000") for source in sources) == 1
    names = {"__name__": "__main__"}
    sources = [source.replace("60_000", str(steps)) for source in sources]
    if steps < 60_000:  # play fewer tours
        sources = [
            source.replace("range(100)", "range(10)").replace("reward / 100", "reward / 10")
            for source in sources
        ]
    found = list(run_notebook.execute(sources, names))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for (text, pictures), cell in zip(found, cells):
        assert [each["output_type"] for each in run_notebook.outputs_of(text, pictures)] == [
            each["output_type"] for each in cell["outputs"]
        ]
    assert found[0][0] == "".join(cells[0]["outputs"][0]["text"])  # seeded
    for num, (ours, rule) in names["lengths"].items():
        assert 0.1 * num < ours < num and (steps < 60_000 or num > 10 or ours < rule)
