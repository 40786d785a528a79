"""Several processes under torchrun learn as one process with all their environments does."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_main import BASE, SCRIPT

GREEDY = """
import sys, torch
sys.path[:0] = [{scripts!r}, {tests!r}]
torch.set_num_threads(1)
import helpers, tyro, {name} as script
{patch}
script.main(tyro.cli(script.Args))
"""
SMALL = ["--no-cuda", "--hidden-dims", "16", "--eval-episodes", "0", "--save-model", "--gnn-dim", "8"]


def launch(tmp_path, name, num_ranks, flags, patch="", check=True):
    """The finished process of a script under torchrun, or alone for one rank."""
    file = tmp_path / f"run_{name}_{num_ranks}.py"
    file.write_text(GREEDY.format(scripts=str(SCRIPT.parent), tests=str(Path(__file__).parent), name=name, patch=patch))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(torchrun if num_ranks > 1 else []), str(file), *SMALL, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert not check or result.returncode == 0, result.stderr
    return result


def model(folder):
    (path,) = Path(folder).glob("*/model.pt")
    return torch.load(path, weights_only=True)["model"]


@pytest.mark.parametrize("name", BASE)
def test_two_ranks_equal_one_with_all_environments(name, tmp_path):
    """S4: the first update of 2 ranks x 3 environments is that of 1 rank x 6, and so are the statistics of
    observations; everything random is switched off."""
    patch = "script.gumbel_like = torch.zeros_like"
    flags = ["--env-id", "Random-v0", "--env-kwargs", '{"observation": "mixed"}', "--num-steps", "16", "--norm-obs",
             "--num-minibatches", "1", "--update-epochs", "1", "--total-timesteps", "96", "--norm-adv-global"]
    for num_ranks in (1, 2):
        launch(tmp_path, name, num_ranks, [*flags, "--num-envs", str(6 // num_ranks), "--run-dir", str(num_ranks)],
               patch)
    one, two = model(tmp_path / "1"), model(tmp_path / "2")
    assert any("mean" in key for key in one)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=1e-6, rtol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def test_two_ranks_learn(tmp_path):
    """S4: two ranks balance the pole; one log, one bar, all steps counted."""
    flags = ["--env-id", "CartPole-v1", "--total-timesteps", "30720", "--num-envs", "8", "--num-steps", "64",
             "--learning-rate", "3e-3", "--run-dir", "runs", "--hidden-dims", "64"]
    result = launch(tmp_path, "ppo_graph", 2, flags)
    (folder,) = (tmp_path / "runs").iterdir()
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    log.Reload()
    returns = log.Scalars("charts/episodic_return")
    assert np.mean([event.value for event in returns[-20:]]) > 100
    assert log.Scalars("charts/SPS")[-1].step == 30720 and result.stderr.count("  0%|") == 1


def test_two_ranks_resume(tmp_path):
    """X3, S4: a checkpoint holds the environments, memories and random states of all ranks: resumed runs end with the
    same bits."""
    flags = ["--env-id", "envs:GraphExplore-v0", "--num-envs", "2", "--num-steps", "8", "--num-minibatches", "2",
             "--checkpoint-every", "3", "--no-anneal-lr", "--norm-obs"]
    launch(tmp_path, "ppo_lstm_sparse", 2, [*flags, "--total-timesteps", "192", "--run-dir", "whole"])
    launch(tmp_path, "ppo_lstm_sparse", 2, [*flags, "--total-timesteps", "96", "--run-dir", "parts"])
    result = launch(tmp_path, "ppo_lstm_sparse", 2, [*flags, "--total-timesteps", "192", "--run-dir", "parts",
                                                     "--resume", "auto"])
    assert "--total-timesteps 192, it was 96" in result.stderr
    one, two = model(tmp_path / "whole"), model(tmp_path / "parts")
    assert all(torch.equal(one[key], two[key]) for key in one)
    result = launch(tmp_path, "ppo_lstm_sparse", 1, [*flags, "--total-timesteps", "192", "--run-dir", "parts",
                                                     "--resume", "auto"], check=False)
    assert result.returncode != 0 and "--world-size 1 where the checkpoint has 2" in result.stderr


def test_a_rank_that_dies_ends_the_others(tmp_path):
    """S4: the error of one rank is shown and ends all of them."""
    patch = ("original = script.collect\n"
             "def collect(actor, envs, *rest):\n"
             "    if script.ranks.rank == 1 and envs.num_steps >= 16: raise KeyError('the bridge is out')\n"
             "    return original(actor, envs, *rest)\n"
             "script.collect = collect")
    flags = ["--env-id", "CartPole-v1", "--num-envs", "2", "--num-steps", "8", "--total-timesteps", "100000"]
    result = launch(tmp_path, "ppo_graph", 2, flags, patch, check=False)
    assert result.returncode != 0 and "the bridge is out" in result.stderr
