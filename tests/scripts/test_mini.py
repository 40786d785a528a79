"""ppo_graph_mini.py learns, is the algorithm of ppo_graph.py for every kind of graph, and finds
environments where it is and where it was copied alone."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import MASK, MY_ENV, command, train_events, vector
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cleanrl_graph import ppo_graph, ppo_graph_mini
from cleanrl_graph.envs.toy import LinkGraph

SCRIPT = Path(ppo_graph_mini.__file__)
EDGES = {"none": None, "vectors": vector(2), "kinds": spaces.Discrete(3, start=-1)}


class Graphs(gym.Env):
    """A graph of 1 to 6 nodes at every step, now and then without edges. The reward is the first
    feature of the chosen node. Episodes of 3 to 6 steps, of which every other is truncated. Nodes
    are views of one array, which is written anew at every step."""

    def __init__(self, edges):
        graph = LinkGraph(vector(3), EDGES[edges])
        self.observation_space = spaces.Dict(graph=graph, action_mask=MASK)
        self.action_space = spaces.Discrete(6)
        self.nodes = np.zeros((6, 3), np.float32)

    def observe(self):
        rng = self.np_random
        n = rng.integers(1, 7)
        self.nodes[:n] = rng.normal(size=(n, 3))
        self.mask = rng.random(n) < 0.7
        self.mask[rng.integers(n)] = True
        links = edges = None
        if rng.random() < 0.8:
            links = rng.integers(0, n, (2 * n, 2))
            space = self.observation_space["graph"].edge_space
            edges = space and np.array([space.sample() for _ in links])
        graph = spaces.GraphInstance(self.nodes[:n], edges, links)
        return {"graph": graph, "action_mask": self.mask.astype(np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None and self.observation_space["graph"].edge_space:
            self.observation_space["graph"].edge_space.seed(seed)
        self.left = self.np_random.integers(3, 7)
        self.truncates = self.np_random.random() < 0.5
        return self.observe(), {}

    def step(self, action):
        assert self.mask[action] and isinstance(action, np.int64)
        reward = float(self.nodes[action, 0])
        self.left -= 1
        ended = self.left == 0
        return self.observe(), reward, ended and not self.truncates, ended and self.truncates, {}


class Column(Graphs):
    """Its mask is [nodes, 1]."""

    def observe(self):
        obs = super().observe()
        return obs | {"action_mask": obs["action_mask"][:, None]}


for name in EDGES:
    gym.register(f"Graphs-{name}-v0", entry_point=Graphs, kwargs={"edges": name})
gym.register("Graphs-column-v0", entry_point=Column, kwargs={"edges": "none"})


def run(*flags, cwd) -> str:
    """What the script prints."""
    code, text, errors = command("--no-cuda", *flags, script=ppo_graph_mini, cwd=cwd)
    assert code == 0, errors
    return text


def returns_in(text) -> list[float]:
    return [float(ret) for ret in re.findall(r"episodic_return=(\S+)", text)]


# ---- It learns ----
def test_it_learns(tmp_path):
    """A quarter of the steps is enough to be far from random, which is 4.4 of 16."""
    returns = returns_in(run("--total-timesteps", 8192, cwd=tmp_path))
    assert np.mean(returns[:50]) < 6
    assert np.mean(returns[-50:]) > 13


def test_small_runs(tmp_path):
    """The advantage of a single step is not normalised: its deviation would be nan. A mask of
    [nodes, 1] is that of [nodes], as a Sequence of MultiBinary(1) has it. Of two minibatches of
    which one has no clipped ratio, the other nearly clipped ones alone, the mean is logged."""
    for name, flags in {
        "none": "--num-envs 2 --num-steps 2 --num-minibatches 4 --total-timesteps 8",
        "column": "--num-envs 4 --num-steps 16 --num-minibatches 1 --total-timesteps 64 "
        "--update-epochs 2 --clip-coef 1e-4",
    }.items():
        (tmp_path / name).mkdir()
        text = run("--env-id", f"Graphs-{name}-v0", *flags.split(), cwd=tmp_path / name)
        (path,) = tmp_path.glob(f"{name}/runs/*/weights.pt")
        assert all(values.isfinite().all() for values in torch.load(path).values())
    assert len(returns_in(text)) > 8
    ((_, clipfrac),) = train_events(tmp_path / "column" / "runs")["losses/clipfrac"]
    assert 0.3 < clipfrac <= 0.5


@pytest.mark.slow
def test_it_solves_the_default_task(tmp_path):
    """With the default flags; 16 is best."""
    returns = returns_in(run(cwd=tmp_path))
    assert np.mean(returns[-100:]) >= 15.5


# ---- It is ppo_graph.py ----
class Stopped(Exception):
    """The optimizer was to make its first step."""


def test_graphs_without_nodes():
    """The last observation of an episode may have none, as the last graph of a batch, too."""
    space = spaces.Graph(vector(3), vector(2))
    agent = ppo_graph_mini.Agent(space, ppo_graph_mini.Args())
    nodes = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    links = np.array([[0, 1], [2, 3]])
    graph = spaces.GraphInstance(nodes, np.ones((2, 2), np.float32), links)
    some = {"graph": graph, "action_mask": np.ones(4, np.int8)}
    graph = spaces.GraphInstance(nodes[:0], None, None)
    none = {"graph": graph, "action_mask": np.ones(0, np.int8)}
    value = lambda *chosen: agent.get_value(ppo_graph_mini.collate(chosen, space))
    both, swapped, alone, empty = value(some, none), value(none, some), value(some), value(none)
    torch.testing.assert_close(both, torch.cat([alone, empty]))
    torch.testing.assert_close(swapped, torch.cat([empty, alone]))


def names_at_first_step(path, start) -> dict:
    """The local names of the script at `path` at the optimizer's first step."""

    def stop(*_):
        raise Stopped

    hook = register_optimizer_step_pre_hook(stop)
    try:
        with pytest.raises(Stopped) as info:
            start()
    finally:
        hook.remove()
    frames = [entry.frame for entry in info.traceback if Path(entry.path) == path]
    return dict(frames[-1].f_locals)


def name_in_ppo_graph(name) -> str:
    """The name that a parameter of the small script's agent has in the other one."""
    if name.startswith(("embed", "convs", "norms")):
        return f"encoder.nets.leaf/graph/nodes.{name}"
    if name.startswith(("key", "score")):
        return f"head.heads.0.{name}"
    return name.replace("actor.2", "head.heads.0.output")


SIZES = {"num_envs": 3, "num_steps": 32, "gnn_dim": 8, "gnn_layers": 2, "num_minibatches": 1}
FLAGS = SIZES | {"total_timesteps": 96, "gamma": 0.9, "gae_lambda": 0.8, "max_grad_norm": 1e9}


@pytest.mark.parametrize("edges", EDGES)
def test_first_update(edges, tmp_path, monkeypatch):
    """From the same weights and actions, losses and gradients of both scripts are equal."""
    env_id = f"Graphs-{edges}-v0"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items()]
    flags += [f"--env-id={env_id}", "--no-clip-vloss"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags, "--no-cuda"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = compile(SCRIPT.read_text(), str(SCRIPT), "exec")
    names = {"__name__": "__main__", "__file__": str(SCRIPT)}
    small = names_at_first_step(SCRIPT, partial(exec, source, names))
    parameters = {name_in_ppo_graph(name): p for name, p in small["agent"].named_parameters()}

    class SameAgent(ppo_graph.Agent):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            assert parameters.keys() == dict(self.named_parameters()).keys()
            self.load_state_dict(parameters, strict=False)

    actions = iter(small["actions"][..., None])
    monkeypatch.setattr(ppo_graph, "Agent", SameAgent)
    monkeypatch.setattr(ppo_graph.Choice, "sample", lambda self: next(actions), raising=False)
    more = dict(hidden_dims=(8,), clip_vloss=False, cuda=False, run_dir="other")
    args = ppo_graph.Args(**FLAGS, env_id=env_id, **more)
    large = names_at_first_step(Path(ppo_graph.__file__), partial(ppo_graph.main, args))

    assert small["dones"].sum() > 10 and small["rewards"].std() > 0.1
    for name, there in {
        "logprobs": "log_probs",
        "values": "values",
        "advantages": "advantages",
    }.items():
        expected = torch.as_tensor(large[there]).flatten()
        torch.testing.assert_close(small[name].flatten(), expected, rtol=0, atol=1e-5)
    minibatch = {"newlogprob": "new_log_prob", "entropy": "entropy", "newvalue": "new_value"}
    small_order = np.argsort(small["mb"])
    large_order = np.argsort(large["mb"])
    for name, name_there in minibatch.items():
        found = small[name][small_order]
        torch.testing.assert_close(found, large[name_there][large_order], rtol=0, atol=1e-5)
    for name in ("pg_loss", "v_loss", "entropy_loss", "loss"):
        torch.testing.assert_close(small[name], large[name], rtol=0, atol=1e-5)
    for name, parameter in large["agent"].named_parameters():
        found = parameters[name].grad
        torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-5, msg=name)


# ---- Where it finds environments ----
OWN_ENV = f"import sys\nassert 'cleanrl_graph' not in sys.modules\n{MY_ENV}"
SHORT = ["--total-timesteps=64", "--num-envs=2", "--num-steps=16", "--no-cuda"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def start(script, *flags, cwd):
    """The finished process of a script that trains for 32 steps of each of two environments."""
    command = [sys.executable, str(script), *SHORT, *flags]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(returns_in(done.stdout)) == 12  # an episode of each ends every 5 steps


def test_alone(tmp_path):
    """Without the package it finds a module beside it, and keeps a model."""
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "my_env.py").write_text(OWN_ENV)
    script = shutil.copy(SCRIPT, copied)
    start(script, "--env-id=my_env:Mine-v0", cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("Mine-v0__ppo_graph_mini__1__")
    assert torch.load(folder / "weights.pt", weights_only=True)["embed.weight"].shape == (64, 1)


def test_own_module_with_the_name_of_ours(tmp_path):
    """In the current folder `envs` is the user's, although the script is beside ours."""
    (tmp_path / "envs.py").write_text(OWN_ENV)
    start(SCRIPT, "--env-id=envs:Mine-v0", cwd=tmp_path)
