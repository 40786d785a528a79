"""Environments that draw from the global generators, or seed them, change nothing of what a script
draws: weights, actions and minibatches come from generators of its own."""

import importlib
import random

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import command, run, train_events
from minis import SCRIPTS, command_line

POISSON = "envs:PoissonGraph-v0"
CASES = {
    "graph": ("ppo_graph", dict(env_id=POISSON, eval_episodes=2, eval_samples=2)),
    "gtrxl": ("ppo_gtrxl", dict(env_id="CartPole-v1")),
    "reconstruct": ("ppo_graph_aux", dict(env_id=POISSON, aux="reconstruct")),
    "async": ("ppo_graph_async", dict(env_id=POISSON, max_lag=0)),
    "compiled": ("ppo_graph_compile", dict(env_id="CartPole-v1", compile_mode="default")),
}
MINIS = {"ppo_graph_mini": POISSON, "ppo_gtrxl_mini": "cleanrl_graph.envs:Recall-v0"}
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


@pytest.mark.parametrize(
    "name", [*list(CASES)[:-1], pytest.param("compiled", marks=pytest.mark.slow)]
)
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
