"""The four short scripts learn, act as they train, run alone in any folder, and are alike where
they are alike. test_mini_updates.py has what they compute, test_virtual_cuda.py that they do so on
CUDA."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import MY_ENV, command, run_folder, train_events
from minis import GRAPHS, NAMES, SCRIPTS, VECTORS, Graphs, command_line, execute

SHORT = {"total_timesteps": 64, "num_envs": 2, "num_steps": 16, "num_minibatches": 2}


def run(name, folder, **flags) -> tuple[dict, str]:
    """(tag -> [(step, value)], what is printed) of a run in a new folder."""
    folder.mkdir(exist_ok=True)
    flags = command_line({"cuda": False} | flags)
    code, text, errors = command(*flags, script=SCRIPTS[name], cwd=folder)
    assert code == 0, errors
    return train_events(folder / "runs"), text


def returns_of(events) -> list[float]:
    return [value for _, value in events["charts/episodic_return"]]


# ---- They learn ----
LEARNED = {  # steps, and what the first and the last episodes reach
    "ppo_graph_mini": (4096, 6, 9),  # 4.4 at random, 16 is best
    "ppo_lstm_sparse_mini": (12288, 0.27, 0.35),  # 0.225 by a random walk
    "ppo_gtrxl_mini": (20480, 0.3, 0.6),  # 0 at random and without memory, 1 is best
    "ppo_framestack_mini": (24576, 30, 70),  # 22 at random, 41 without memory
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name, tmp_path):
    """A fraction of the steps is enough to be far from random. In each update the first ratio is 1
    up to rounding."""
    num_steps, first, last = LEARNED[name]
    events, _ = run(name, tmp_path, total_timesteps=num_steps)
    returns = returns_of(events)
    assert np.mean(returns[:50]) < first and np.mean(returns[-50:]) > last
    assert 0 <= max(value for _, value in events["debug/collection_mismatch"]) <= 1e-5


SOLVED = {  # flags, and what the last 100 episodes reach
    "ppo_graph_mini": ({}, 15.5),
    "ppo_lstm_sparse_mini": ({"total_timesteps": 131072}, 0.7),  # of 250,000
    "ppo_gtrxl_mini": ({}, 0.95),
    "ppo_framestack_mini": ({}, 400),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_solves_its_task(name, tmp_path):
    """With the default flags but for the steps of one."""
    flags, expected = SOLVED[name]
    events, _ = run(name, tmp_path, **flags)
    assert np.mean(returns_of(events)[-100:]) >= expected


# ---- What a run prints and logs ----
def test_what_a_run_prints(tmp_path):
    """A line per update, with the mean of the last 100 returns, also before the first episode has
    ended. One names the keys that the agent does not see; where it sees all there is none."""
    flags = SHORT | {"env_id": "MiniGraphs-v0", "gnn_dim": 8}
    events, text = run("ppo_graph_mini", tmp_path / "graph", **flags | {"total_timesteps": 480})
    lines = [line for line in text.splitlines() if line.startswith("global_step=")]
    assert len(lines) == 15
    found = re.fullmatch(r"global_step=480, mean of 100 returns=(\S+), SPS=\d+", lines[-1])
    returns = returns_of(events)
    assert len(returns) > 100
    assert float(found[1]) == pytest.approx(np.mean(returns[-100:]), abs=6e-4)
    assert "keys of the observation that the agent does not see: node_ids\n" in text
    _, text = run("ppo_lstm_sparse_mini", tmp_path / "lstm", **flags)
    assert "does not see" not in text
    endless = {"env_id": "MiniVectors-endless-v0", "total_timesteps": 32, "dim": 8}
    events, text = run("ppo_gtrxl_mini", tmp_path / "endless", **SHORT | endless)
    assert "mean of 0 returns=nan" in text and "charts/episodic_return" not in events


def test_small_runs(tmp_path):
    """The advantage of a single step is not normalised: its deviation would be nan. A mask of
    [nodes, 1] is that of [nodes], as a Sequence of MultiBinary(1) has it. Of two minibatches of
    which one has no clipped ratio, the other nearly clipped ones alone, the mean is logged."""
    flags = {"num_steps": 2, "num_minibatches": 4, "total_timesteps": 8, "num_envs": 2}
    run("ppo_graph_mini", tmp_path / "one", env_id="MiniGraphs-none-v0", **flags)
    flags = {"num_envs": 4, "num_steps": 16, "num_minibatches": 1, "total_timesteps": 64}
    flags |= {"update_epochs": 2, "clip_coef": 1e-4, "env_id": "MiniGraphs-column-v0"}
    events, _ = run("ppo_graph_mini", tmp_path / "column", **flags)
    ((_, clipfrac),) = events["losses/clipfrac"]
    assert 0.3 < clipfrac <= 0.5
    for path in tmp_path.glob("*/runs/*/weights.pt"):
        assert all(values.isfinite().all() for values in torch.load(path).values())


# ---- Bad observations ----
def replaced_id(wrong):
    """Changes an id to one that would be that of a node in another episode."""
    return lambda obs: obs.update(node_ids=np.where(obs["node_ids"] == 3, wrong, obs["node_ids"]))


BAD = [  # script, what changes an observation of MiniGraphs-v0, what the error says
    (
        "ppo_graph_mini",
        lambda obs: obs["action_mask"].fill(0),
        "step 0 of a rollout allows no node",
    ),
    ("ppo_lstm_sparse_mini", lambda obs: obs["action_mask"].fill(0), "step 0 .* allows no node"),
    ("ppo_lstm_sparse_mini", replaced_id(2**32), r"node_ids are from 0 to 2\*\*32 - 1, not"),
]


@pytest.mark.parametrize("name, change, sentence", BAD)
def test_bad_observations(name, change, sentence, tmp_path, monkeypatch):
    observe = Graphs.observe

    def observe_changed(self, at_limit):
        obs = observe(self, at_limit)
        change(obs)
        return obs

    monkeypatch.setattr(Graphs, "observe", observe_changed)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=sentence):
        execute(SCRIPTS[name], **SHORT, env_id="MiniGraphs-v0", cuda=False)


# ---- They run alone ----


def train_alone(name, script, env_id, monkeypatch):
    """The run folder of a script that trains in the current folder as a command does, where there
    is no package."""
    monkeypatch.setitem(sys.modules, "cleanrl_graph", None)
    execute(SimpleNamespace(__file__=str(script)), env_id=env_id, cuda=False, **SHORT)
    folder = run_folder("runs")
    assert folder.name.startswith(f"{env_id.split(':')[-1]}__{Path(script).stem}__1__")
    assert train_events("runs")["charts/episodic_return"]
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_alone(name, tmp_path, monkeypatch):
    """Copied elsewhere it trains, and keeps its weights."""
    monkeypatch.chdir(tmp_path)
    script = shutil.copy(SCRIPTS[name].__file__, tmp_path)
    env_id = "MiniGraphs-v0" if name in GRAPHS else "MiniVectors-v0"
    folder = train_alone(name, script, env_id, monkeypatch)
    weights = torch.load(folder / "weights.pt", weights_only=True)
    assert all(values.isfinite().all() for values in weights.values())
    assert weights["critic.0.weight"].ndim == 2


@pytest.mark.parametrize("module, is_beside", [("my_env", True), ("envs", False)])
def test_own_module(module, is_beside, tmp_path, monkeypatch):
    """A copied script finds one beside it; where the script is beside ours, `envs` in the current
    folder is the user's. All scripts have the lines that do so (BLOCKS)."""
    name, folder = "ppo_graph_mini", tmp_path / "copied"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    script = shutil.copy(SCRIPTS[name].__file__, folder) if is_beside else SCRIPTS[name].__file__
    file = (folder if is_beside else tmp_path) / f"{module}.py"
    file.write_text(MY_ENV)
    monkeypatch.delitem(sys.modules, module, raising=False)
    train_alone(name, script, f"{module}:Mine-v0", monkeypatch)
    assert sys.modules.pop(module).__file__ == str(file)
    gym.registry.pop("Mine-v0")


# ---- They are alike ----
def source(name) -> str:
    return Path(SCRIPTS[name].__file__).read_text()


BLOCKS = [  # first line, first line that is not part of it, the scripts that have it
    ("def layer_init(", "\n\n\n", NAMES),
    (
        "        advantages = torch.zeros_like(rewards)\n",
        "            next_value = values[t]\n",
        NAMES,
    ),
    ("                logratio = newlogprob", "                optimizer.step()\n", NAMES),
    ("        approx_kl = (ratio - 1", '        writer.add_scalar("charts/SPS"', NAMES),
    ('        writer.add_scalar("losses/value_loss"', "    writer.close()\n", NAMES),
    ("    folder = sys.path[0]\n", "    envs = [gym.wrappers", NAMES),
    ("def to_tensor(", "\n\n\n", VECTORS),
    ("        logits = logits.masked_fill(", "        logprob = logprobs[", GRAPHS),
]


@pytest.mark.parametrize("first, last, names", BLOCKS, ids=[block[0].strip() for block in BLOCKS])
def test_blocks_that_are_alike(first, last, names):
    found = set()
    for name in names:
        (_, rest) = source(name).split(first)  # it is there once
        found.add(rest[: rest.index(last)])
    assert len(found) == 1
