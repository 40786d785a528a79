"""What is wrong with an environment, its data, a flag or a file is said in one sentence: where,
which value, what to do; what only looks wrong simply works. The cases are those of hostile.py, and
what tries.py does with them has its test here."""

import copy
import importlib.metadata
import re
import textwrap
from functools import partial
from pathlib import Path

import gymnasium as gym
import hostile
import numpy as np
import pytest
import torch
import tries
from gymnasium import spaces
from helpers import ListEnv, command, make_envs, run, run_folder, vector

from cleanrl_graph import ppo_graph, ppo_graph_agents, ppo_gtrxl, ppo_lstm_sparse
from cleanrl_graph.envs import fitting
from cleanrl_graph.services import checkpoint

OURS = "cleanrl_graph.envs.wrappers"
IN_RUNS = {  # what the environments alone do not find, or not alone
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
    "observations: a key is missing",
    "observations: one buffer of all environments",
    "observations: none and 3,000 nodes in turn",
    "observations: a set of sets",
    "actions: a graph",
    "returns: reward None",
    "returns: reset: nothing",
    "returns: episode r nan",
    "raises: NoCopy",
    "raises: SystemExit",
    "raises: in its constructor",
)


def walk(each, num_workers):
    """Three episodes of the environments of a try. Returns its Envs' leaves, and each Step with a
    copy of it."""
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
    monkeypatch.setattr(fitting, "SAID", set())


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
        assert len(infos) >= 4 and (not each.says or set.union(*map(set, infos)) == {"episode"})
        return
    with pytest.raises(ValueError) as error:
        walk(each, num_workers)
    assert re.search(each.expected, str(error.value), re.S), error.value
    assert "ppo_graph.py" not in str(error.value)


RUNS = IN_RUNS | {
    "actions: a start below 0",
    "actions: one per node, stack=False",
    "observations: a view of a buffer",
    "observations: mask in a matrix",
    "process: SIGTERM",
    "process: a worker sleeps",
    "process: a worker is killed",
    "process: close() raises",
    "process: close() exits in a suite",
    "process: raises when played",
    "raises: SystemExit",
    "raises: in its constructor",
    "returns: info None",
}
SLOW = {"files: the diffs of the README", "files: a script alone"}  # other tests have them


def is_fast(each):
    name = f"{each.kind}: {each.name}"
    is_run = each.kind == "flags" and each.expected != "trains" or each.kind == "files"
    return name in RUNS or (is_run and name not in SLOW)


@pytest.mark.parametrize(
    "name",
    [
        name if is_fast(each) else pytest.param(name, marks=pytest.mark.slow)
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
    assert ppo_gtrxl and ppo_lstm_sparse
