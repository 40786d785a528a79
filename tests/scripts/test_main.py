"""`main` from end to end: the command line, logs, models, evaluation."""

import dataclasses
import sys
import types

import pytest
import shared_blocks
from helpers import LOGGED, parsed, run, small_args
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanrl_graph import ppo_graph

SCRIPTS = {path.stem: path for path in shared_blocks.scripts()}


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
    args.env_kwargs = [{"max_size": 4}, {"max_size": 5}]
    made = [ppo_graph.make_env(args, which) for which in (0, 3)]
    made += [ppo_graph.make_env(args, 1, max_size=9)]
    assert [env.unwrapped.max_size for env in made] == [4, 5, 9]
    assert parsed("ppo_graph", []).env_kwargs == {}
    tasks = parsed("ppo_graph", ["--env-kwargs", '[{"max_size": 3}, {}]']).env_kwargs
    assert tasks == [{"max_size": 3}, {}]
    for wrong in (["--env-kwargs", "{max_size: 3}"], ["--gnn", "nope"], ["--num-iterations", "3"]):
        with pytest.raises(SystemExit):
            parsed("ppo_graph", wrong)
    with pytest.raises(ppo_graph.UsageError, match="--gnn gcn: make_conv knows no such layer"):
        ppo_graph.make_conv("gcn", 8, None, "sum")


# ---- Logs ----
def test_names_in_the_log(tmp_path):
    """CleanRL's names, bytes of observations and the mismatch, one value an update."""
    log = run(tmp_path, env_id="envs:PoissonGraph-v0", env_kwargs={"episode_length": 5}).scalars
    for name in LOGGED:
        assert [step for step, _ in log[name]] == [24, 48], name
    assert set(log) == {*LOGGED, "charts/episodic_return", "charts/episodic_length"}
    assert [value for _, value in log["charts/learning_rate"]] == pytest.approx([2.5e-4, 1.25e-4])
    assert 0 < log["charts/padding_avoided"][0][1] < 1
    ends = [step for step, _ in log["charts/episodic_return"]]
    assert ends == [15] * 3 + [30] * 3 + [45] * 3  # every episode, at the step at which it ended
    assert [value for _, value in log["charts/episodic_length"]] == [5] * 9


def test_hyperparameters_are_logged(tmp_path):
    """Every flag and its value is in the log."""
    folder = run(tmp_path, env_id="envs:BestOfSet-v0", env_kwargs={"max_size": 5}).folder
    log = EventAccumulator(str(folder))
    log.Reload()
    (event,) = log.Tensors("hyperparameters/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert all(f"|{field.name}|" in text for field in dataclasses.fields(ppo_graph.Args))
    assert str({"max_size": 5}) in text and "|num_iterations|2|" in text and "|resume|None|" in text


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
