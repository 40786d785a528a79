"""Environments that draw from the global generators, or seed them, change nothing of what a script
draws: weights, actions and minibatches come from generators of its own."""

import importlib
import random
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import command, run, run_folder, train_events
from minis import SCRIPTS, command_line

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import checkpoint
from cleanrl_graph.services.process import default_generator

POISSON = "envs:PoissonGraph-v0"
CASES = {
    "graph": ("ppo_graph", dict(env_id=POISSON, eval_episodes=2, eval_samples=2)),
    "numbers": ("ppo_graph", dict(env_id="Pendulum-v1")),
    "framestack": ("ppo_framestack", dict(env_id="CartPole-v1")),
    "lstm": ("ppo_lstm_sparse", dict(env_id="envs:GraphExplore-v0")),
    "gtrxl": ("ppo_gtrxl", dict(env_id="CartPole-v1")),
    "reconstruct": ("ppo_graph_aux", dict(env_id=POISSON, aux="reconstruct")),
    "agents": ("ppo_graph_agents", dict(env_id="envs:Crowd-v0")),
    "async": ("ppo_graph_async", dict(env_id=POISSON, max_lag=0)),
    "not compiled": ("ppo_graph_compile", dict(env_id="CartPole-v1")),
    "compiled": ("ppo_graph_compile", dict(env_id="CartPole-v1", compile_mode="default")),
}
SLOW = {"compiled"}
MINIS = {
    "ppo_graph_mini": POISSON,
    "ppo_lstm_sparse_mini": "envs:GraphExplore-v0",
    "ppo_gtrxl_mini": "cleanrl_graph.envs:Recall-v0",
    "ppo_framestack_mini": "cleanrl_graph.envs:StatelessCartPole-v1",
}
SHORT = dict(total_timesteps=64, num_envs=2, num_steps=16, num_minibatches=2, cuda=False)


def seed_everything():
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


@pytest.fixture
def seeding(monkeypatch):
    """A function that makes the environments of an id seed all global generators whenever they are
    made, reset or stepped."""

    def patch(env_id):
        kind = type(gym.make(f"cleanrl_graph.envs:{env_id.split(':')[-1]}").unwrapped)
        for name in ("__init__", "reset", "step"):
            method = getattr(kind, name)

            def seeds(*args, method=method, **kwargs):
                result = method(*args, **kwargs)
                seed_everything()
                return result

            monkeypatch.setattr(kind, name, seeds)

    return patch


def without_rate(scalars):
    """Nor the number of compilations, of which the second run in a process needs others."""
    left = ("charts/SPS", "charts/compilations")
    return {tag: values for tag, values in scalars.items() if tag not in left}


NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_environments_that_seed(name, seeding, tmp_path):
    """Losses, episodes and the table of sampled episodes are bit for bit the same."""
    script, flags = CASES[name]
    script = importlib.import_module(f"cleanrl_graph.{script}")
    one = run(tmp_path / "a", script, **flags)
    seeding(flags["env_id"])
    two = run(tmp_path / "b", script, **flags)
    assert len(one.scalars["losses/policy_loss"]) == 2
    assert without_rate(one.scalars) == without_rate(two.scalars)
    assert one.rows == two.rows


@pytest.mark.parametrize("name", MINIS)
def test_environments_that_seed_in_short_scripts(name, seeding, tmp_path):
    found = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        flags = command_line(SHORT | {"env_id": MINIS[name]})
        code, _, errors = command(*flags, script=SCRIPTS[name], cwd=tmp_path / folder)
        assert code == 0, errors
        found.append(without_rate(train_events(tmp_path / folder / "runs")))
        seeding(MINIS[name]) if folder == "a" else None
    assert len(found[0]["losses/policy_loss"]) == 2
    assert found[0] == found[1]


def test_a_script_alone(seeding, tmp_path):
    """Weights and a sampled episode, too, without services."""
    args = dict(env_id="CartPole-v1", num_envs=2, num_steps=8, total_timesteps=32)
    weights = []
    for folder in ("a", "b"):
        args["run_dir"] = str(tmp_path / folder)
        parsed = ppo_graph.Args(**args, cuda=False, eval_episodes=0, save_model=True)
        ppo_graph.main(parsed)
        path = run_folder(tmp_path / folder) / "model.pt"
        weights.append(torch.load(path, weights_only=True)["model"])
        seeding("CartPole-v1") if folder == "a" else None
    for name, values in weights[0].items():
        assert torch.equal(values, weights[1][name]), name


def test_samples_are_those_of_torch():
    """Gaussian draws what torch's Normal would from the same state."""
    loc, scale = torch.randn(5, 3), torch.rand(5, 3)
    torch.manual_seed(3)
    generator = default_generator(loc.device).clone_state()
    wanted = torch.distributions.Normal(loc, scale).sample()
    assert torch.equal(ppo_graph.Gaussian(loc, scale).sample(generator), wanted)
    assert not torch.equal(ppo_graph.Gaussian(loc, scale).sample(generator), wanted)


def test_checkpoints_of_before():
    """Without the state of a generator in them the actions go on from torch's."""
    generator = torch.Generator()
    agent = SimpleNamespace(head=SimpleNamespace(generator=generator))
    torch.manual_seed(5)
    checkpoint.restore_generator(agent, None)
    assert torch.equal(generator.get_state(), torch.get_rng_state())
    state = torch.Generator().manual_seed(6).get_state()
    checkpoint.restore_generator(agent, state)
    assert torch.equal(generator.get_state(), state)


def test_resume(seeding, tmp_path):
    """The state of the generator is in a checkpoint: a run that goes on from one draws the same
    actions as the run that was not stopped."""
    seeding("CartPole-v1")
    flags = dict(env_id="CartPole-v1", checkpoint_every=1, total_timesteps=96)
    whole = run(tmp_path / "a", **flags)
    run(tmp_path / "b", **flags)
    (last,) = (tmp_path / "b").glob("*/checkpoint_*96.ckpt")
    last.unlink()
    again = run(tmp_path / "b", resume=str(last.parent), **flags)
    assert len(whole.scalars["losses/policy_loss"]) == 4
    for tag in ("losses/policy_loss", "losses/entropy"):
        assert again.scalars[tag][-1] == whole.scalars[tag][-1]
