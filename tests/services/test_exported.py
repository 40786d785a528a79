"""The program that services.export writes beside a policy: it plays as load_policy does."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import run, run_folder

import cleanrl_graph
from cleanrl_graph.services import export
from cleanrl_graph.services.policy import load_policy

ROOT = Path(cleanrl_graph.__file__).parents[1]


def trained(tmp_path, name, **flags):
    """The model.pt of a run of two updates."""
    script = importlib.import_module(f"cleanrl_graph.{name}")
    run(tmp_path, script, save_model=True, **flags)
    return run_folder(tmp_path) / "model.pt"


def command_of(folder):
    """What the program of an export in a folder of one's own prints, and its exit code."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    where = dict(cwd=folder, env=env, text=True, capture_output=True)
    return subprocess.run([sys.executable, "mine.py"], **where)


def same(ours, theirs):
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, tuple):
        return isinstance(ours, tuple) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return np.allclose(ours, theirs, atol=2e-4)


KINDS = {
    "composite": (
        "ppo_graph",
        dict(env_id="Random-v0", env_kwargs={"observation": "mixed", "action": "mixed"}),
    ),
    "rows": ("ppo_graph", dict(env_id="envs:Assign-v0")),
    "memory": ("ppo_lstm_sparse", dict(env_id="envs:GraphExplore-v0", prev_reward=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_acts_as_load_policy_does(kind, tmp_path):
    """Over two episodes, of which the second begins without a memory of the first."""
    name, flags = KINDS[kind]
    path = trained(tmp_path, name, **flags)
    export.export(str(path), str(tmp_path / "mine.pt2"))
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ours, theirs = module.Policy(), load_policy(path)
    env = theirs.make_env()
    for seed in range(2):
        obs, _ = env.reset(seed=seed)
        ours.reset()
        theirs.reset()
        reward = 0.0
        for _ in range(8):
            action = theirs(obs, reward)
            own = ours(obs, reward)
            assert same(own, action) and own in env.action_space
            obs, reward, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                break


@pytest.mark.slow
def test_its_command_plays(tmp_path):
    """Ten episodes, in a folder of one's own."""
    path = trained(tmp_path, "ppo_graph", env_id="CartPole-v1")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    where = dict(cwd=tmp_path, env=env, text=True, capture_output=True, check=True)
    words = [sys.executable, "-m", "cleanrl_graph.services.export", str(path), "mine.pt2"]
    assert "python mine.py plays it" in subprocess.run(words, **where).stdout
    played = command_of(tmp_path).stdout
    assert len(re.findall(r"^episode \d: return [1-9]", played, re.M)) == 10


@pytest.mark.slow
def test_its_command_plays_no_other_environment(tmp_path):
    """--wrap has made other observations of those that the environment returns."""
    path = trained(tmp_path, "ppo_graph", env_id="CartPole-v1", wrap=("z:skill:3",))
    export.export(str(path), str(tmp_path / "mine.pt2"))
    played = command_of(tmp_path)
    assert played.returncode == 1
    assert "observation_space: the environment has Box" in played.stderr
