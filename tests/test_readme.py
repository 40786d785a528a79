"""What the README shows under "Change a script" works: its diffs apply to the scripts, and its environment trains (P9,
S6)."""

import importlib.util
import re
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import small_args
from torch_geometric import nn as pyg

ROOT = Path(__file__).parents[1]
SECTION = (ROOT / "README.md").read_text().split("## Change a script")[1].split("\n## ")[0]
SCRIPTS = ["ppo_graph", "ppo_framestack", "ppo_lstm_sparse", "ppo_gtrxl"]


def fences(kind):
    """The blocks of a kind, by the bold words before them."""
    found = {}
    for title, text in re.findall(r"\*\*(.+?)\*\*(.*?)(?=\n[^\n`]*\*\*|\Z)", SECTION, re.S):
        found[title] = re.findall(rf"```{kind}\n(.*?)```", text, re.S)
    return found


def apply(text, diff):
    """`text` after a diff without line numbers, whose lines must occur exactly once."""
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
    assert text.count(old) == 1, old
    return text.replace(old, new)


def changed(tmp_path, script, title):
    """The script after the README's diffs under that title, as a module."""
    text = (ROOT / "cleanrl_graph" / f"{script}.py").read_text()
    diffs = fences("diff")[title]
    assert diffs
    for diff in diffs:
        text = apply(text, diff)
    path = tmp_path / f"changed_{script}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(module, tmp_path, **flags):
    """The logged scalars of each update of a short training."""
    logs, original = [], module.Logger.update
    module.Logger.update = lambda self, step, scalars: (logs.append(dict(scalars)), original(self, step, scalars))[1]
    try:
        module.main(small_args(module, run_dir=str(tmp_path / "runs"), **flags))
    finally:
        module.Logger.update = original
    assert logs[0]["debug/collection_mismatch"] < 1e-5
    assert all(np.isfinite(value) for entry in logs for value in entry.values())
    return logs


class Target(gym.Env):
    """Hit the target that the observation shows: the reward is minus the squared distance."""

    observation_space, action_space = spaces.Box(-2, 2, (2,)), spaces.Box(-2, 2, (2,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.target = self.np_random.uniform(-2, 2, 2).astype(np.float32)
        return self.target, {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.target, -float(((action - self.target) ** 2).sum()), True, False, {}


gym.register("Target-v0", entry_point=Target)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_gnn_layer(tmp_path, script):
    module = changed(tmp_path, script, "a message passing layer")
    layer = module.make_conv("gcn", 8, 3, "sum")
    assert isinstance(layer, pyg.GCNConv)
    train(module, tmp_path, env_id="envs:PoissonGraph-v0", gnn="gcn")
    assert isinstance(module.make_conv("sage", 8, 3, "sum"), pyg.SAGEConv)  # the others are as they were


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_action_head(tmp_path, script):
    module = changed(tmp_path, script, "An action head")
    train(module, tmp_path, env_id="Target-v0")


def test_the_action_head_learns(tmp_path):
    module = changed(tmp_path, "ppo_graph", "An action head")
    rows = module.main(module.Args(
        env_id="Target-v0", run_dir=str(tmp_path), hidden_dims=(32,), num_envs=16, num_steps=32, learning_rate=3e-3,
        total_timesteps=24_576, ent_coef=0.0, eval_episodes=50, cuda=False))
    assert np.mean([row["return"] for row in rows]) > -0.3  # 8/3 for the centre


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_loss(tmp_path, monkeypatch, script):
    module, base = changed(tmp_path, script, "A term of the loss"), __import__(script)
    losses = {module: [], base: []}
    for mod, found in losses.items():
        original = mod.ppo_loss

        def noted(*args, original=original, found=found):
            loss, logs = original(*args)
            found.append((loss.item(), logs["losses/approx_kl"].item()))
            return loss, logs

        monkeypatch.setattr(mod, "ppo_loss", noted)
        train(mod, tmp_path, env_id="CartPole-v1", learning_rate=1e-2, num_minibatches=1)
    (first, kl), (second, second_kl) = losses[module][:2]  # two epochs of the same minibatch
    assert abs(kl) < 1e-6 and abs(first - losses[base][0][0]) < 1e-6
    assert second_kl > 1e-4 and second - losses[base][1][0] == pytest.approx(second_kl, abs=1e-6)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_environment(tmp_path, monkeypatch, script):
    (code,) = fences("python")["An environment"]
    (tmp_path / "routes.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    train(__import__(script), tmp_path, env_id="routes:Routes-v0", env_kwargs={"most": 6})
    sys.modules.pop("routes")


def test_the_environment_is_the_travelling_salesman(tmp_path, monkeypatch):
    (code,) = fences("python")["An environment"]
    (tmp_path / "routes.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = gym.make("routes:Routes-v0", most=6)
    sys.modules.pop("routes")
    obs, _ = env.reset(seed=3)
    cities, total, done, visited = obs["graph"].nodes[:, :2], 0.0, False, [0]
    while not done:
        visited.append(int(np.flatnonzero(obs["action_mask"])[-1]))
        obs, reward, done, _, _ = env.step(visited[-1])
        total += reward
    assert sorted(visited) == list(range(len(cities)))
    tour = cities[[*visited, 0]]
    assert total == pytest.approx(-np.linalg.norm(np.diff(tour, axis=0), axis=1).sum(), abs=1e-5)
    assert torch.from_numpy(obs["graph"].edges).isfinite().all()
