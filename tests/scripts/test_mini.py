"""The four short scripts learn, act as they train, run alone in any folder, and are alike where
they are alike. test_mini_updates.py has what they compute, test_virtual_cuda.py that they do so on
CUDA."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import MY_ENV, command, run_folder, train_events, vector
from minis import GRAPHS, NAMES, SCRIPTS, VECTORS, command_line, execute

from cleanrl_graph import ppo_graph_mini

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


def mismatch_of(events) -> float:
    return max(value for _, value in events["debug/collection_mismatch"])


# ---- They learn ----
LEARNED = {  # steps, and what the first and the last episodes reach
    "ppo_graph_mini": (8192, 6, 13),  # 4.4 at random, 16 is best
    "ppo_lstm_sparse_mini": (12288, 0.27, 0.35),  # 0.225 by a random walk
    "ppo_gtrxl_mini": (20480, 0.3, 0.6),  # 0 at random and without memory, 1 is best
    "ppo_framestack_mini": (24576, 30, 70),  # 22 at random, 41 without memory
}


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "ppo_graph_mini"]


@pytest.mark.parametrize("name", ["ppo_graph_mini", *OTHERS])
def test_it_learns(name, tmp_path):
    """A fraction of the steps is enough to be far from random. In each update the first ratio is 1
    up to rounding."""
    num_steps, first, last = LEARNED[name]
    events, _ = run(name, tmp_path, total_timesteps=num_steps)
    returns = returns_of(events)
    assert np.mean(returns[:50]) < first
    assert np.mean(returns[-50:]) > last
    assert 0 <= mismatch_of(events) <= 1e-5


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
    assert 0 <= mismatch_of(events) <= 1e-5


# ---- What a run prints and logs ----
def env_id_of(name, kind="") -> str:
    return f"MiniGraphs{kind}-v0" if name in GRAPHS else f"MiniVectors{kind}-v0"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_prints(name, tmp_path):
    """A line per update, with the mean of the last 100 returns."""
    events, text = run(name, tmp_path, env_id=env_id_of(name), **SHORT)
    lines = [line for line in text.splitlines() if line.startswith("global_step=")]
    assert len(lines) == 2
    found = re.fullmatch(r"global_step=64, mean of (\d+) returns=(\S+), SPS=\d+", lines[-1])
    returns = returns_of(events)
    assert int(found[1]) == len(returns) < 100
    assert float(found[2]) == pytest.approx(np.mean(returns), abs=6e-4)


@pytest.mark.parametrize("name", NAMES)
def test_before_the_first_episode_has_ended(name, tmp_path):
    flags = SHORT | {"env_id": env_id_of(name, "-endless"), "total_timesteps": 32}
    events, text = run(name, tmp_path, **flags)
    assert "mean of 0 returns=nan" in text
    assert "charts/episodic_return" not in events


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
def changed(monkeypatch, name, change):
    """Graphs whose observations are changed by `change`."""
    from minis import Graphs

    observe = Graphs.observe

    def observe_changed(self, at_limit):
        obs = observe(self, at_limit)
        change(obs)
        return obs

    monkeypatch.setattr(Graphs, "observe", observe_changed)
    return SHORT | {"env_id": "MiniGraphs-v0", "cuda": False}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_mask_without_an_option(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = changed(monkeypatch, name, lambda obs: obs["action_mask"].fill(0))
    with pytest.raises(AssertionError, match="step 0 of a rollout allows no node"):
        execute(SCRIPTS[name], **flags)


@pytest.mark.parametrize("wrong", [2**32, -1])
def test_node_ids_out_of_range(wrong, tmp_path, monkeypatch):
    """They would be those of nodes in other episodes."""
    monkeypatch.chdir(tmp_path)
    flags = changed(
        monkeypatch,
        "ppo_lstm_sparse_mini",
        lambda obs: obs.update(node_ids=np.where(obs["node_ids"] == 3, wrong, obs["node_ids"])),
    )
    with pytest.raises(AssertionError, match=r"node_ids are from 0 to 2\*\*32 - 1, not"):
        execute(SCRIPTS["ppo_lstm_sparse_mini"], **flags)


def test_keys_that_are_not_seen(tmp_path):
    """One line names them; where the agent sees all there is none."""
    line = "keys of the observation that the agent does not see: node_ids\n"
    flags = SHORT | {"env_id": "MiniGraphs-v0"}
    _, text = run("ppo_graph_mini", tmp_path / "graph", **flags)
    assert text.count("does not see") == 1 and line in text
    _, text = run("ppo_lstm_sparse_mini", tmp_path / "lstm", **flags)
    assert "does not see" not in text


# ---- Ragged batches ----
def test_graphs_without_nodes():
    """The last observation of an episode may have none, as the last graph of a batch, too."""
    script = ppo_graph_mini
    space = spaces.Graph(vector(3), vector(2))
    agent = script.Agent(space, script.Args())
    nodes = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    links = np.array([[0, 1], [2, 3]])
    graph = spaces.GraphInstance(nodes, np.ones((2, 2), np.float32), links)
    some = {"graph": graph, "action_mask": np.ones(4, np.int8)}
    graph = spaces.GraphInstance(nodes[:0], None, None)
    none = {"graph": graph, "action_mask": np.ones(0, np.int8)}

    def value(*chosen):
        batch = script.to_batch(script.collate(chosen, space), space, torch.device("cpu"))
        return agent.get_value(batch)

    both, swapped, alone, empty = value(some, none), value(none, some), value(some), value(none)
    torch.testing.assert_close(both, torch.cat([alone, empty]))
    torch.testing.assert_close(swapped, torch.cat([empty, alone]))


def test_select():
    """As a list of arrays is indexed; there may be none of a graph, and an index twice."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(n, 2)) for n in (3, 0, 1, 4, 0, 2)]
    for idx in ([2, 0], [5, 4, 1, 3, 3], [1], [1, 4], list(range(6))):
        found = ppo_graph_mini.select(ppo_graph_mini.ragged(arrays), np.array(idx))
        expected = ppo_graph_mini.ragged([arrays[i] for i in idx])
        assert torch.equal(found.rows, expected.rows)
        assert found.num.tolist() == expected.num.tolist()


# ---- They run alone ----
VECTOR_ENV = '''
import gymnasium as gym, numpy as np

class Env(gym.Env):
    """Choose the side of the number."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def observe(self):
        self.x = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.x

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        reward, self.t = float(action == (self.x[0] > 0)), self.t + 1
        return self.observe(), reward, False, self.t == 5, {}

gym.register("Mine-v0", entry_point=Env)
'''
IDS_ENV = """
class WithIds(Env):
    observation_space = gym.spaces.Dict(
        Env.observation_space.spaces,
        node_ids=gym.spaces.Sequence(gym.spaces.Box(0, 99, (), np.int64), stack=True))

    def observe(self):
        obs = super().observe()
        return obs | {"node_ids": self.np_random.permutation(100)[:len(self.x)]}

gym.registry.pop("Mine-v0")
gym.register("Mine-v0", entry_point=WithIds)
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def write_env(name, path):
    """A user's own module, which is not imported where the package is."""
    text = VECTOR_ENV if name in VECTORS else MY_ENV
    text += IDS_ENV if name == "ppo_lstm_sparse_mini" else ""
    path.write_text(f"import sys\nassert 'cleanrl_graph' not in sys.modules\n{text}")


def start(script, *flags, cwd) -> Path:
    """The run folder of a script that trains for 32 steps of each of two environments, in a process
    of its own."""
    words = [sys.executable, str(script), *command_line(SHORT | {"cuda": False}), *flags]
    done = subprocess.run(words, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    returns = train_events(cwd / "runs")["charts/episodic_return"]
    assert len(returns) == 12  # an episode of each ends every 5 steps
    return run_folder(cwd / "runs")


@pytest.mark.parametrize("name", NAMES)
def test_alone(name, tmp_path):
    """Without the package it finds a module beside it, and keeps its weights."""
    copied = tmp_path / "copied"
    copied.mkdir()
    write_env(name, copied / "my_env.py")
    script = shutil.copy(SCRIPTS[name].__file__, copied)
    folder = start(script, "--env-id=my_env:Mine-v0", cwd=tmp_path)
    assert folder.name.startswith(f"Mine-v0__{name}__1__")
    weights = torch.load(folder / "weights.pt", weights_only=True)
    assert all(values.isfinite().all() for values in weights.values())
    assert weights["critic.0.weight"].ndim == 2


@pytest.mark.parametrize("name", NAMES)
def test_own_module_with_the_name_of_ours(name, tmp_path):
    """In the current folder `envs` is the user's, although the script is beside ours."""
    write_env(name, tmp_path / "envs.py")
    start(SCRIPTS[name].__file__, "--env-id=envs:Mine-v0", cwd=tmp_path)


# ---- They are short and alike ----
def source(name) -> str:
    return Path(SCRIPTS[name].__file__).read_text()


def described(name) -> dict[str, str]:
    """Field of Args -> its docstring."""
    body = ast.parse(inspect.getsource(SCRIPTS[name].Args)).body[0].body
    return {
        field.target.id: text.value.value for field, text in zip(body[::2], body[1::2], strict=True)
    }


@pytest.mark.parametrize("name", NAMES)
def test_lines(name):
    """At most 380. They share no blocks and import nothing of the project."""
    text = source(name)
    assert text.count("\n") <= 380
    assert "# --- shared:" not in text
    assert not re.findall(r"^ *(?:from|import) .*cleanrl_graph", text, re.M)


def test_flags_are_described_alike():
    """By the same words, after which a script may say more."""
    fields = [described(name) for name in NAMES]
    for key in set.union(*map(set, fields)):
        texts = sorted((each[key] for each in fields if key in each), key=len)
        assert all(text.startswith(texts[0]) for text in texts), key


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
