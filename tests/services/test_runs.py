"""services/runs.py and services/command.py: what a script's Run gets, and what is asked of a
script."""

import types

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import run, run_folder, small_args, train_events, vector
from processes import begun_earlier, newest, train

from cleanrl_graph import ppo_graph, services
from cleanrl_graph.services import checkpoint, command
from cleanrl_graph.services.arguments import args_of


class Steps(gym.Env):
    """Episodes of 7 steps, of which each earns 1; a life ends after 3."""

    observation_space, action_space = vector(2), spaces.Discrete(2)

    def __init__(self, lives=0):
        self.lives = lives

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 7, False, {"lives": self.lives}


class Lives(gym.Wrapper):
    """An episode ends with a life, around what records whole games."""

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        is_life = self.unwrapped.t == 3
        return obs, reward, terminated or is_life, truncated, info | {"lives": int(is_life)}


def limited(env):
    """Episodes of 5 steps, by a wrapper of --wrap."""
    return gym.wrappers.TimeLimit(env, 5)


def with_lives(env):
    return Lives(env)


gym.register("Steps-v0", Steps)


# ---- Steps that were made ----
def test_resumed_with_other_num_steps(tmp_path):
    """The steps before are those that were made: charts and checkpoints go on from there, and as
    many updates follow as fit into --total-timesteps."""
    folder = train(tmp_path, env_id="Steps-v0", total_timesteps=120)  # 5 updates of 24
    assert newest(tmp_path) == 120
    begun_earlier(tmp_path)
    more = dict(num_steps=20, total_timesteps=400)
    train(tmp_path, env_id="Steps-v0", resume=str(folder), **more)
    log = train_events(tmp_path)
    steps = [step for step, _ in log["losses/value_loss"]]
    assert steps == [24, 48, 72, 96, 120, 180, 240, 300, 360] and newest(tmp_path) == 360
    ends = [step for step, _ in log["charts/episodic_length"]]
    assert ends == [step for step in range(21, 361, 21) for _ in range(3)]
    rates = [value for _, value in log["charts/learning_rate"]]
    assert rates[5:] == pytest.approx([2.5e-4 * (1 - k / 6) for k in (2, 3, 4, 5)])


def test_floor_of_the_deviation_is_kept(tmp_path):
    """The largest deviation of the returns so far, which --adv-floor takes, is in a checkpoint."""
    flags = dict(env_id="envs:PoissonGraph-v0", adv_floor=0.1, adv_floor_decay=0.9)
    folder = train(tmp_path, **flags)
    for path in folder.glob("*.ckpt"):
        assert checkpoint.read(path)["std_floor"] > 0


# ---- Episodes that a wrapper ended ----
@pytest.mark.parametrize("workers", [0, 2])
def test_episode_that_an_outer_wrapper_truncated(workers, tmp_path):
    """Its return and length are logged as of any other."""
    wrap = (f"{__name__}:limited",)
    log = run(tmp_path, env_id="Steps-v0", wrap=wrap, num_workers=workers).scalars
    assert {value for _, value in log["charts/episodic_return"]} == {5.0}
    assert len(log["charts/episodic_length"]) == 3 * 3


def test_life_is_no_episode(tmp_path):
    """Where only a life ended nothing is logged."""
    log = run(tmp_path, env_id="Steps-v0", wrap=(f"{__name__}:with_lives",)).scalars
    assert "charts/episodic_return" not in log


# ---- What is asked of a script ----
def copied(**names):
    """ppo_graph.py with other names."""
    script = types.ModuleType("my_script")
    vars(script).update(vars(ppo_graph) | names)
    return script


def test_script_of_another_version():
    with pytest.raises(SystemExit, match="is for services of version 2, these have version 1"):
        services.main(ppo_graph, 2)


@pytest.mark.parametrize("name", command.NAMES)
def test_script_that_lacks_a_name(name):
    script = copied()
    delattr(script, name)
    with pytest.raises(SystemExit, match=f"it lacks {name}"):
        services.main(script, command.VERSION)


def test_flags_are_one_object():
    """It is an Args of the script, too, and takes no flag that neither knows."""
    args = args_of(ppo_graph, gamma=0.5, eval_suite="la")
    assert isinstance(args, ppo_graph.Args) and vars(args)["eval_suite"] == "la"
    assert vars(args)["gamma"] == 0.5 and not hasattr(args, "record")
    with pytest.raises(TypeError, match="nope"):
        args_of(ppo_graph, nope=1)


def test_run_in_a_program(tmp_path):
    """The script's own Args and flags of the services, as for Optuna; the script is as it was."""
    before = dict(vars(ppo_graph))
    small = vars(small_args(run_dir=str(tmp_path), env_id="Steps-v0", eval_episodes=2))
    own = {name: small[name] for name in ppo_graph.Args.__dataclass_fields__}
    rows = services.run(ppo_graph, ppo_graph.Args(**own), checkpoint_every=0)
    assert [row["return"] for row in rows] == [7.0, 7.0]
    assert vars(ppo_graph) == before and torch.is_grad_enabled()


class Mixing(torch.nn.Module):
    """A layer of which one that a user writes may mix the graphs of a batch."""

    def __init__(self, dim, mixes):
        super().__init__()
        self.linear, self.mixes = torch.nn.Linear(dim, dim), mixes

    def forward(self, x, edge_index):
        return self.linear(x - x.mean(0)) if self.mixes else self.linear(x)


@pytest.mark.parametrize("mixes", [False, True])
def test_warns_of_what_mixes_observations(mixes, tmp_path, monkeypatch, capsys):
    """Once, on the console, where collection and update do not agree."""
    monkeypatch.setattr(ppo_graph, "make_conv", lambda kind, dim, *_: Mixing(dim, mixes))
    args = small_args(run_dir=str(tmp_path), env_id="envs:PoissonGraph-v0", learning_rate=0.1)
    services.run(ppo_graph, args)
    text = capsys.readouterr().err
    assert text.count("debug/collection_mismatch is ") == mixes
    assert text.count("mixes the observations of a batch (batch norm;") == mixes


def test_learning_rate_after_a_longer_resume(tmp_path, capsys):
    """What it jumps to is said: of 3 updates the last one has a third, of 8 the fourth has 5/8.
    Where it falls nothing is."""
    flags = dict(env_id="CartPole-v1", checkpoint_every=1, run_dir=str(tmp_path), learning_rate=0.4)
    services.run(ppo_graph, small_args(**flags))
    assert "learning rate" not in capsys.readouterr().err
    folder = str(run_folder(tmp_path))
    for num, line in ((72, None), (192, "goes on at 0.25, which falls to 0 at")):
        services.run(ppo_graph, small_args(resume=folder, total_timesteps=num, **flags))
        err = capsys.readouterr().err
        if line:
            assert f"{line} --total-timesteps {num}; its last one was 0.133" in err
        else:
            assert "the learning rate goes on" not in err
