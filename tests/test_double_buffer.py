"""Environments in two halves, of which one is stepped while the policy serves the other."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import small_args
from test_main import BASE

FLAGS = {
    "ppo_graph": {}, "ppo_framestack": {"obs_shifts": "-3:0", "action_shifts": "-2:-1", "reward_shifts": "-2:-1"},
    "ppo_lstm_sparse": {"prev_action": True, "prev_reward": True, "lstm_dim": 8},
    "ppo_gtrxl": {"prev_action": True, "prev_reward": True, "dim": 16, "num_heads": 2, "memory_length": 5},
}


def weights(script, folder, **kwargs):
    """(model, scalars of every update) of a run in which nothing is random but the environments."""
    logged = []
    original = script.Logger.update
    script.Logger.update = lambda self, step, scalars: logged.append(dict(scalars)) or original(self, step, scalars)
    try:
        script.main(small_args(script, run_dir=str(folder), save_model=True, num_envs=4, num_steps=10, num_workers=2,
                               total_timesteps=160, norm_obs=True, num_minibatches=1, **kwargs))
    finally:
        script.Logger.update = original
    (path,) = Path(folder).glob("*/model.pt")
    return torch.load(path, weights_only=True)["model"], logged


@pytest.mark.parametrize("observation", ["mixed", "graph_edges", "image_hwc"])
@pytest.mark.parametrize("name", BASE)
def test_halves_equal_the_whole(name, observation, tmp_path, monkeypatch):
    """S2: the halves see the steps, memories, truncated episodes and statistics that all environments together see, the
    ratio is 1, and the weights end within rounding of those without halves."""
    script = importlib.import_module(name)
    monkeypatch.setattr(script, "gumbel_like", torch.zeros_like)
    flags = {"env_id": "Random-v0", "env_kwargs": {"observation": observation}} | FLAGS[name]
    one, first = weights(script, tmp_path / "one", **flags)
    two, second = weights(script, tmp_path / "two", double_buffer=True, **flags)
    for key in one:
        torch.testing.assert_close(one[key], two[key], atol=2e-5, rtol=2e-5, msg=lambda text, key=key: f"{key}: {text}")
    assert all(scalars["debug/collection_mismatch"] < 1e-5 for scalars in second)
    for a, b in zip(first, second):
        assert a["charts/obs_bytes_per_step"] == b["charts/obs_bytes_per_step"]
        assert a["losses/value_loss"] == pytest.approx(b["losses/value_loss"], rel=1e-3)


@pytest.mark.parametrize("name", BASE)
def test_resumes_in_halves(name, tmp_path):
    """X3: a checkpoint of two halves continues with the same bits."""
    script = importlib.import_module(name)
    flags = {"env_id": "envs:Recall-v0", "env_kwargs": {"length": 4}, "double_buffer": True, "checkpoint_every": 2,
             "num_workers": 2, "num_envs": 4, "save_model": True, "anneal_lr": False} | FLAGS[name]
    script.main(small_args(script, run_dir=str(tmp_path / "whole"), total_timesteps=128, **flags))
    script.main(small_args(script, run_dir=str(tmp_path / "parts"), total_timesteps=64, **flags))
    script.main(small_args(script, run_dir=str(tmp_path / "parts"), total_timesteps=128, resume="auto", **flags))
    one, two = (torch.load(next((tmp_path / run).glob("*/model.pt")), weights_only=True)["model"]
                for run in ("whole", "parts"))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("flags", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2, "num_envs": 3}])
def test_halves_that_are_none(flags, tmp_path):
    """S2: without two workers and an even number of environments there are no two halves."""
    script = importlib.import_module("ppo_graph")
    with pytest.raises(ValueError, match="--double-buffer needs"):
        script.main(small_args(env_id="CartPole-v1", run_dir=str(tmp_path), double_buffer=True, **flags))


def test_workers_step_together():
    """S2: `send` returns before the workers have stepped, and a lane's answer does not wait for the other lane."""
    script = importlib.import_module("ppo_graph")
    envs = script.WorkerEnvs([lambda: script.make_env("CartPole-v1", {})] * 6, 3, num_lanes=2)
    try:
        step = envs.reset(0)
        assert [envs.span(lane) for lane in (0, 1)] == [slice(0, 3), slice(3, 6)]
        assert len(step.reward) == 6 and [len(step.reward) for step in envs.last_steps] == [3, 3]
        envs.send([0] * 3, 1)
        envs.send([1] * 3, 0)
        second, first = envs.receive(1), envs.receive(0)
        plain = script.Envs([lambda: script.make_env("CartPole-v1", {})] * 6)
        plain.reset(0)
        expected = plain.step([1] * 3 + [0] * 3)
        assert np.array_equal(np.concatenate([*first.parts[0], *second.parts[0]]), expected.parts[0][0])
    finally:
        envs.close()
