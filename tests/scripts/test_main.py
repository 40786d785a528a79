"""`main` from end to end: what the command line means, what is logged under which names, and a
model that is saved, loaded, evaluated."""

import dataclasses
import os
import sys
import types
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import (
    LOGGED,
    command,
    parsed,
    run,
    run_folder,
    same_weights,
    small_args,
    train_events,
    vector,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanrl_graph import ppo_graph


# ---- The command line ----
def test_command_line():
    """Environments and their arguments by flags; tuples, choices and booleans as in tyro."""
    flags = "--env-id envs:BestOfSet-v0 --hidden-dims 8 9 --no-anneal-lr --gnn sage "
    flags += "--target-kl 0.1 --wrap hide:1 z:skill:2 --env-kwargs"
    args = parsed("ppo_graph", [*flags.split(), '{"max_size": 3, "stack": false}'])
    assert args.env_kwargs == {"max_size": 3, "stack": False} and args.hidden_dims == (8, 9)
    assert args.anneal_lr is False and args.gnn == "sage" and args.target_kl == 0.1
    assert args.wrap == ("hide:1", "z:skill:2")
    args.env_id = "cleanrl_graph.envs:BestOfSet-v0"
    assert ppo_graph.make_env(args).unwrapped.max_size == 3
    args.env_kwargs = parsed(
        "ppo_graph", ["--env-kwargs", '[{"max_size": 4}, {"max_size": 5}]']
    ).env_kwargs
    made = [ppo_graph.make_env(args, which) for which in (0, 3)]
    made += [ppo_graph.make_env(args, 1, max_size=9)]
    assert [env.unwrapped.max_size for env in made] == [4, 5, 9]


def test_runs_as_a_command(tmp_path):
    """With workers and a wrapper; the table is printed and in the run's folder."""
    flags = "--env-id CartPole-v1 --wrap hide:1,3 z:skill:2 --total-timesteps 96 --num-envs 2 "
    flags += "--num-steps 24 --num-workers 2 --hidden-dims 8 --eval-episodes 3 --no-cuda"
    code, out, err = command(*flags.split(), cwd=tmp_path)
    assert code == 0, err
    assert set(os.listdir(tmp_path)) == {"runs"}
    folder = run_folder(tmp_path / "runs")
    assert folder.name.startswith("CartPole-v1-") and "__ppo_graph__1__" in folder.name
    assert out.count(f"writes to {folder}\n") == 1
    assert (folder / "eval.md").read_text().strip() in out
    assert "| episode | group | length | return |" in out
    assert len(list(folder.glob("checkpoint_*.ckpt"))) == 1  # at the end
    assert any("episodic_return/z_" in name for name in train_events(tmp_path / "runs"))


# ---- Logs ----
def test_names_in_the_log(tmp_path):
    """CleanRL's names, bytes of observations and the mismatch, one value an update."""
    log = run(tmp_path, env_id="envs:PoissonGraph-v0", env_kwargs={"episode_length": 5}).scalars
    for name in LOGGED:
        assert [step for step, _ in log[name]] == [24, 48], name
    kinds = [f"charts/episodic_{kind}" for kind in ("return", "length")]
    assert set(log) == {*LOGGED, *(kind + end for kind in kinds for end in ("", "_min", "_max"))}
    assert [value for _, value in log["charts/learning_rate"]] == pytest.approx([2.5e-4, 1.25e-4])
    assert 0 < log["charts/padding_avoided"][0][1] < 1
    assert log["charts/episodic_length"] == [(24, 5), (48, 5)]


class Ends(gym.Env):
    """Episodes of `length` steps."""

    observation_space, action_space = vector(1), spaces.Discrete(2)

    def __init__(self, length=4):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == self.length, False, {}


gym.register("Ends-v0", entry_point=Ends)


def test_hyperparameters_are_logged(tmp_path):
    """Every flag and its value."""
    log = EventAccumulator(str(run(tmp_path, env_id="envs:BestOfSet-v0", env_kwargs={}).folder))
    log.Reload()
    (event,) = log.Tensors("hyperparameters/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert all(f"|{field.name}|" in text for field in dataclasses.fields(ppo_graph.Args))
    assert "|num_iterations|2|" in text and "|resume|None|" in text


def test_tracked_with_wandb(tmp_path, monkeypatch):
    """--track begins a wandb run, which takes over TensorBoard's scalars."""
    calls = []
    wandb = types.SimpleNamespace(init=lambda **kwargs: calls.append(kwargs))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = dict(track=True, wandb_project_name="mine", wandb_entity="we")
    folder = run(tmp_path, env_id="envs:BestOfSet-v0", **flags).folder
    (call,) = calls
    assert (call["project"], call["entity"], call["sync_tensorboard"]) == ("mine", "we", True)
    assert call["name"] == call["id"] == folder.name
    assert call["config"]["env_id"] == "envs:BestOfSet-v0"
    run(tmp_path / "other", env_id="envs:BestOfSet-v0")
    assert len(calls) == 1


# ---- Models and evaluation ----
def test_model_goes_through_a_file(tmp_path):
    """--load-model starts from exactly what --save-model wrote, and --total-timesteps 0 plays it,
    to the same returns."""
    flags = dict(env_id="envs:PoissonGraph-v0", eval_episodes=5, save_model=True)
    first = run(tmp_path / "a", **flags)
    saved = torch.load(first.folder / "model.pt", weights_only=True)
    assert saved["args"]["env_id"] == flags["env_id"] and saved["args"]["hidden_dims"] == (16,)
    flags |= dict(load_model=str(first.folder / "model.pt"))
    trained = run(tmp_path / "b", seed=9, learning_rate=0.0, **flags)
    played = run(tmp_path / "c", total_timesteps=0, num_envs=1, **flags)
    assert first.rows == played.rows and len(first.rows) == 5
    assert (first.folder / "eval.md").read_text() == (played.folder / "eval.md").read_text()
    assert same_weights(trained.folder, first.folder)


def test_played_episodes(tmp_path):
    """Seeded with seed + 10,000 + number, by the mode or by samples."""
    args = small_args(env_id="Random-v0", seed=3)
    envs = ppo_graph.Envs([lambda: ppo_graph.make_env(args)])
    agent = ppo_graph.Agent(envs.leaves, envs.action_space, args)
    seeds, makers = [], []
    for _ in range(4):
        env = ppo_graph.make_env(args)
        reset = env.reset
        noted = lambda reset=reset, **kwargs: seeds.append(kwargs.get("seed")) or reset(**kwargs)
        env.reset = noted
        makers.append(lambda env=env: env)
    play = lambda greedy: ppo_graph.play(agent, args, ppo_graph.Envs(makers), greedy)
    greedy, sampled, again = play(True), play(False), play(True)
    assert [seed for seed in seeds if seed is not None] == [10_003, 10_004, 10_005, 10_006] * 3
    ends = lambda infos: [(info["episode"]["r"], info["episode"]["l"]) for info in infos]
    assert ends(greedy) == ends(again) and len(greedy) == 4
    assert all(ret == length for ret, length in ends(greedy + sampled))  # reward 1: legal actions


def test_episodes_that_are_cut_off():
    """After --eval-max-steps an episode is given with what it has by then, and marked."""
    args = small_args(env_id="Ends-v0", eval_max_steps=3, num_steps=2)
    makers = [partial(ppo_graph.make_env, args, length=length) for length in (2, 3, 9)]
    envs = ppo_graph.Envs(makers)
    agent = ppo_graph.Agent(envs.leaves, envs.action_space, args)
    infos = ppo_graph.play(agent, args, envs, True)
    assert [info["episode"]["l"] for info in infos] == [2, 3, 3]
    assert [info["episode"]["r"] for info in infos] == [2, 3, 3]
    assert [info.get("cut", False) for info in infos] == [False, False, True]
