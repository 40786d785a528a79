"""Several ranks learn as one process with all their environments does, whatever each of them has,
and end together. Most are forked as torchrun starts them (processes.py), which saves imports."""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import helpers  # registers Random-v0
import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import train_events, weights
from processes import (
    SCRIPTS,
    Dies,
    begun_earlier,
    folder_of,
    newest,
    start_ranks,
    train,
    train_ranks,
)

from cleanrl_graph import ppo_graph
from cleanrl_graph.services import checkpoint, runs
from cleanrl_graph.services.plot import episodes_of

RUNNER = """
import os, sys, torch
sys.path[:0] = [{root!r}, {tests!r}]
torch.set_num_threads(1)
import helpers
from cleanrl_graph import ppo_graph as script, services
{patch}
services.main(script, 2)
"""
SMALL = "--no-cuda --hidden-dims 16 --eval-episodes 0 --save-model --gnn-dim 8 "


def torchrun(folder, flags, patch):
    """The finished process of ppo_graph.py under torchrun, which starts the ranks again if one is
    killed."""
    file = folder / "runner.py"
    root, tests = Path(ppo_graph.__file__).parents[1], Path(__file__).parents[1]
    file.write_text(RUNNER.format(root=str(root), tests=str(tests), patch=patch))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += f"--nproc-per-node 2 --max-restarts 2 {file} {SMALL} {flags}".split()
    env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as in the README
    more = dict(cwd=folder, capture_output=True, text=True, timeout=300)
    return subprocess.run(command, env=os.environ | env, **more)


MIXED = dict(env_id="Random-v0", env_kwargs={"observation": "mixed"}, norm_obs=True)
MIXED |= dict(num_steps=16, num_minibatches=1, update_epochs=1, total_timesteps=96)
MIXED |= dict(norm_adv=False, norm_vloss=1.0)


def greedy(monkeypatch, module):
    """The most probable categories are drawn."""
    monkeypatch.setattr(module.Categorical, "sample", lambda self, _: self.mode)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS[1:]]


@pytest.mark.parametrize("script", [SCRIPTS[0], *SLOW])
def test_two_ranks_equal_one_with_all_environments(script, tmp_path, monkeypatch):
    """The first update of 2 ranks x 3 environments is that of 1 rank x 6, and so are the statistics
    of observations and the variance of returns, which are those of all ranks; actions are the most
    probable ones."""
    greedy(monkeypatch, importlib.import_module(f"cleanrl_graph.{script}"))
    one = weights(train(tmp_path / "1", script, num_envs=6, **MIXED))
    assert train_ranks(tmp_path / "2", script, num_envs=3, **MIXED) == [0, 0]
    two = weights(folder_of(tmp_path / "2"))
    assert any("mean" in name for name in one) and list(one) == list(two)
    for name, value in one.items():
        assert torch.allclose(two[name], value, atol=1e-6, rtol=1e-6), name
    norms = [train_events(tmp_path / name)["losses/grad_norm"][0][1] for name in "12"]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)  # Adam hides a wrong scale


def test_what_ranks_ask_of_each_other(tmp_path):
    """The only tensors that are pickled are the weights at the start, which are on the CPU: one on
    a GPU would be opened there by all ranks. At the end all ranks meet and leave the group
    together, which NCCL needs."""

    def told(rank, name, call):
        def telling(*args, **kwargs):
            is_pickled = name == "all_gather_object" and b"_rebuild_tensor" in pickle.dumps(args[1])
            with open(tmp_path / f"calls{rank}", "a") as file:
                print("pickled" if is_pickled else name, file=file)
            return call(*args, **kwargs)

        return telling

    def patch(module):
        for name in ("all_gather_object", "all_reduce", "barrier", "destroy_process_group"):
            setattr(dist, name, told(module.RANK, name, getattr(dist, name)))

    flags = dict(env_id="Random-v0", norm_obs=True, checkpoint_every=0)
    assert train_ranks(tmp_path / "a", patch=patch, **flags) == [0, 0]
    for rank in (0, 1):
        calls = (tmp_path / f"calls{rank}").read_text().split()
        assert calls.count("pickled") == 1 and "pickled" not in calls[calls.index("all_reduce") :]
        assert calls[-2:] == ["barrier", "destroy_process_group"]


class Nothing(helpers.RandomEnv):
    """Rank 1 sees no element of its set."""

    def size(self, rng):
        return 0 if ppo_graph.RANK == 1 else 1 + super().size(rng)


gym.register("NothingOfRank1-v0", entry_point=Nothing)


@pytest.mark.parametrize("script", [SCRIPTS[0], *SLOW])
def test_a_rank_without_elements(script, tmp_path):
    """Networks of rows that a rank has not have gradients of zero there, and all ranks learn."""
    flags = dict(env_id="NothingOfRank1-v0", env_kwargs={"observation": "set"}, total_timesteps=96)
    assert train_ranks(tmp_path / "a", script, **flags) == [0, 0]


@pytest.mark.slow
def test_ranks_resume(tmp_path):
    """After kill -9 of both they go on bit by bit."""
    script = "ppo_lstm_sparse" if "ppo_lstm_sparse" in SCRIPTS else "ppo_graph"
    flags = dict(env_id="envs:GraphExplore-v0", num_envs=2, norm_obs=True, num_workers=2)
    flags |= dict(total_timesteps=192)
    assert train_ranks(tmp_path / "a", script, **flags) == [0, 0]
    at = Dies(torch.optim.Adam, "step", 15)
    assert train_ranks(tmp_path / "b", script, at, **flags) == [-9, -9]
    assert newest(tmp_path / "b") == 64
    begun_earlier(tmp_path / "b")
    assert train_ranks(tmp_path / "b", script, resume="auto", **flags) == [0, 0]
    one, two = weights(folder_of(tmp_path / "a")), weights(folder_of(tmp_path / "b"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    logs = [train_events(tmp_path / name) for name in "ab"]
    assert [{**log, "charts/SPS": 0} for log in logs] == [{**logs[0], "charts/SPS": 0}] * 2


def test_resume_with_another_number_of_ranks(tmp_path, capsys):
    """As many environments as before begin new episodes; all else goes on."""
    flags = dict(env_id="CartPole-v1", norm_obs=True, num_envs=2, checkpoint_every=1, resume="auto")
    place = tmp_path / "a"
    assert train_ranks(place, total_timesteps=96, **flags) == [0, 0]
    before = checkpoint.read(max(folder_of(place).glob("*.ckpt")))
    begun_earlier(place)
    folder = train(place, total_timesteps=128, **flags)  # one rank
    said = capsys.readouterr().err
    assert "ranks x environments are 1 x 4, they were 2 x 2; all begin new episodes" in said
    after = checkpoint.read(max(folder.glob("*.ckpt")))
    assert (before["global_step"], after["global_step"]) == (96, 128)
    numbers = [state["optimizer"]["state"][0]["step"] for state in (before, after)]
    assert numbers[1] > numbers[0] > 0
    counts = [value for name, value in after["model"].items() if name.endswith("count")]
    assert counts and all(value == 128 for value in counts)
    assert [step for step, _ in train_events(place)["losses/value_loss"]] == [32, 64, 96, 128]
    begun_earlier(place)
    assert train_ranks(place, total_timesteps=160, **flags) == [0, 0]
    assert "environments are 2 x 2, they were 1 x 4" in Path(f"{place}.0").read_text()
    assert newest(place) == 160


def test_signal_to_one_rank(tmp_path):
    """All end the same update, save and leave."""
    at = Dies("Envs", "step", 19, number=signal.SIGTERM)
    patch = lambda module: module.RANK == 1 and at(module)
    flags = dict(env_id="CartPole-v1", total_timesteps=480)
    assert train_ranks(tmp_path / "a", patch=patch, **flags) == [143, 143]
    assert newest(tmp_path / "a") == 3 * 48 and not list(tmp_path.glob("a/*/failed"))


def test_minutes_are_those_of_rank_0(tmp_path):
    """Where its clock is fast all ranks write a checkpoint."""

    class Clock:
        time = staticmethod(time.time)
        monotonic = staticmethod(lambda: 1e6 * time.monotonic())

    def patch(module):
        if module.RANK == 0:
            runs.time = Clock
        Dies("Envs", "step", 6 * 8 - 2)(module)

    flags = dict(env_id="CartPole-v1", checkpoint_every=100)
    assert train_ranks(tmp_path / "a", patch=patch, total_timesteps=288, **flags) == [-9, -9]
    assert newest(tmp_path / "a") == 2 * 144 - 48


def test_a_rank_that_fails_ends_the_others(tmp_path):
    """Each ends with a sentence, and there is a mark."""

    def burn(module):
        original = module.Envs.step
        steps = []

        def step(self, actions):
            steps.append(actions)
            if module.RANK == 1 and len(steps) == 20:
                raise module.UsageError("the bridge is out")
            return original(self, actions)

        module.Envs.step = step

    flags = dict(env_id="envs:StatelessCartPole-v1", total_timesteps=192)
    assert train_ranks(tmp_path / "a", patch=burn, **flags) == [1, 1]
    assert "the bridge is out" in Path(f"{tmp_path}/a.1").read_text()
    text = Path(f"{tmp_path}/a.0").read_text()
    assert "rank 0: another rank has ended and says why" in text and "Traceback" not in text, text
    assert newest(tmp_path / "a") == 96 and list(tmp_path.glob("a/*/failed"))


@pytest.mark.slow
def test_torchrun_starts_them_again(tmp_path):
    """`torchrun --max-restarts` with `--resume auto` survives a rank that is killed."""
    patch = f"""
import os, signal, time
import torch.utils.tensorboard as tensorboard
original = script.Envs.step
steps = []
def step(self, actions):
    steps.append(actions)
    if len(steps) == 40 and script.RANK == 1 and not os.path.exists("{tmp_path}/killed"):
        open("{tmp_path}/killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, actions)
script.Envs.step = step
"""
    flags = "--env-id CartPole-v1 --num-envs 2 --num-steps 8 --num-minibatches 1 --run-dir runs "
    flags += "--total-timesteps 320 --checkpoint-every 2 --resume auto"
    result = torchrun(tmp_path, flags, patch)
    assert result.returncode == 0 and (tmp_path / "killed").exists(), result.stderr
    log = train_events(tmp_path / "runs")
    assert [step for step, _ in log["losses/value_loss"]] == [32 * k for k in range(1, 11)]
    assert (folder_of(tmp_path / "runs") / "model.pt").exists()


@pytest.mark.slow
def test_two_ranks_learn(tmp_path):
    """Two ranks balance the pole."""
    flags = dict(env_id="CartPole-v1", total_timesteps=30720, num_envs=8, num_steps=64)
    flags |= dict(learning_rate=3e-3, hidden_dims=(64,), num_minibatches=4, update_epochs=4)
    processes = start_ranks(tmp_path / "a", **flags, checkpoint_every=100)
    for process in processes:
        process.join()
    returns = [ret for _, _, ret, _ in episodes_of(tmp_path / "a")]
    assert np.mean(returns[-20:]) > 100
