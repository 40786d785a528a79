"""services/runs.py and services/command.py: what a script's Run gets, and what is asked of a
script."""

import csv
import io
import json
import re
import subprocess
import time
import types
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import (
    ListEnv,
    SmallEnv,
    graph_space,
    make_envs,
    run,
    run_folder,
    sample,
    small_args,
    train_events,
    vector,
)
from helpers import command as command_line
from processes import begun_earlier, newest, train
from torch_geometric import nn as pyg

from cleanrl_graph import load_policy, ppo_graph, services
from cleanrl_graph.services import check, command, layers, process, runs


class Steps(SmallEnv):
    """Episodes of 7 steps, each of which earns 1."""

    observation_space, action_space = vector(2), spaces.Discrete(2)
    length, terminates = 7, True

    def observe(self):
        return np.zeros(2, np.float32)

    def reward(self, action):
        return 1.0


class Lives(gym.Wrapper):
    """An episode ends with a life, around what records whole games."""

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        is_life = self.unwrapped.t == 3
        return obs, reward, terminated or is_life, truncated, info | {"lives": int(is_life)}


def limited(env):
    """Episodes of 5 steps, with rewards that are not what is logged, by a wrapper of --wrap."""
    return gym.wrappers.TransformReward(gym.wrappers.TimeLimit(env, 5), lambda reward: 2 * reward)


def with_lives(env):
    return Lives(env)


gym.register("Steps-v0", Steps)


def test_resumed_with_other_num_steps(tmp_path):
    """The steps before are those that were made: charts and checkpoints go on from there, and as
    many updates follow as fit into --total-timesteps."""
    folder = train(tmp_path, env_id="Steps-v0", total_timesteps=120)  # 5 updates of 24
    assert newest(tmp_path) == 120
    begun_earlier(tmp_path)
    more = dict(num_steps=25, total_timesteps=400)  # 75 an update, and 45 were made before
    train(tmp_path, env_id="Steps-v0", resume=str(folder), **more)
    log = train_events(tmp_path)
    steps = [step for step, _ in log["losses/value_loss"]]
    assert steps == [24, 48, 72, 96, 120, 195, 270, 345] and newest(tmp_path) == 345
    assert [step for step, _ in log["charts/episodic_length"]] == steps
    ends = [int(row["step"]) for row in episodes_of(folder)]
    assert ends == [step for step in range(21, 346, 21) for _ in range(3)]
    rates = [value for _, value in log["charts/learning_rate"]]
    assert rates[5:] == pytest.approx([2.5e-4 * (1 - k / 4) for k in (1, 2, 3)])


# ---- Episodes that a wrapper ended ----
def test_episodes_that_wrappers_end(tmp_path):
    """Return and length of one that was truncated are logged as of any other; where only a life
    ended nothing is logged."""
    flags = dict(env_id="Steps-v0", num_workers=2)
    result = run(tmp_path / "a", wrap=(f"{__name__}:limited",), **flags)
    for name in ("return_min", "return_max", "length"):
        assert {value for _, value in result.scalars[f"charts/episodic_{name}"]} == {5.0}
    assert len(episodes_of(result.folder)) == 3 * 3
    log = run(tmp_path / "b", wrap=(f"{__name__}:with_lives",), **flags).scalars
    assert "charts/episodic_return" not in log


# ---- What is asked of a script ----


def test_scripts_that_services_cannot_call():
    with pytest.raises(SystemExit, match="is for services of version 1, these have version 2"):
        services.main(ppo_graph, 1)
    for name in command.NAMES:
        script = copy_of(ppo_graph)
        delattr(script, name)
        with pytest.raises(SystemExit, match=f"it lacks {name}"):
            services.main(script, command.VERSION)


def copy_of(script):
    """Another module with the same contents."""
    copy = types.ModuleType("my_script")
    vars(copy).update(vars(script))
    return copy


@pytest.mark.parametrize("name", ["first", "place"])
def test_names_that_services_need_in_envs(name, tmp_path):
    """An Envs of a copy that has one of them is refused; CONTRIBUTING.md lists them."""
    script = copy_of(ppo_graph)

    class Envs(ppo_graph.Envs):
        def __init__(self, makers):
            super().__init__(makers)
            self.first = [env.reset() for env in self.envs]

    script.Envs = Envs if name == "first" else type("Envs", (ppo_graph.Envs,), {name: "here"})
    args = small_args(script, run_dir=str(tmp_path), env_id="Steps-v0")
    with pytest.raises(check.UsageError, match=f"Envs has {name}, which services need"):
        services.run(script, args)
    make = lambda: gym.make("Steps-v0")
    theirs = vars(ppo_graph.Envs([make])).keys() | {"reset", "step", "read", "collate", "close"}
    envs = make_envs([make])
    envs.reset(1)
    names = {*vars(envs), *vars(type(envs)), *vars(check.Checks)}
    ours = {each for each in names if not each.startswith("__")}
    assert ours - theirs - {"rows"} == check.OWN


watched = []


class Watched(SmallEnv):
    """A graph; notes at each step what the script's module and PyG's classes are."""

    observation_space, action_space = graph_space(vector(2)), spaces.Discrete(2)
    length, terminates = 7, True

    def observe(self):
        return sample(self.observation_space, self.np_random, lambda rng: 4)

    def reward(self, action):
        watched.append(contents())
        return 1.0


gym.register("Watched-v0", Watched)


def contents():
    """What the script and the classes of its layers hold."""
    return [dict(vars(each)) for each in (ppo_graph, ppo_graph.Agent, pyg.GINEConv, pyg.GINConv)]


def test_what_is_read_is_what_runs(tmp_path):
    """While a run trains and is evaluated nothing in the script or in PyG is another than before;
    the agent has the faster layers all the same."""
    pyg.GINEConv(torch.nn.Linear(2, 2))  # the first one completes the class
    before = contents()
    args = small_args(run_dir=str(tmp_path), env_id="Watched-v0", eval_episodes=1)
    watched.clear()
    services.run(ppo_graph, args, save_model=True)
    assert len(watched) > 40 and all(found == before for found in watched)
    policy = load_policy(tmp_path)
    kinds = [
        type(conv) for conv in policy.agent.encoder.nets[ppo_graph.module_key("obs.nodes")].convs
    ]
    assert kinds == [layers.GINE] * small_args().gnn_layers


class Weighted(Steps):
    """Rewards are scaled by what a program gives."""

    def __init__(self, weights, scale, names=None):
        assert type(weights) is np.ndarray
        self.weights, self.scale = weights, scale

    def reward(self, action):
        return float(self.scale(self.weights.sum()))


gym.register("Weighted-v0", Weighted)


def test_versions_and_commit_of_a_run(tmp_path):
    """args.json has those of the packages, and the commit of the script's repository; a file in no
    repository has none."""
    run(tmp_path, env_id="CartPole-v1")
    kept = json.loads((run_folder(tmp_path) / "args.json").read_text())
    assert kept["versions"]["torch"] == torch.__version__
    assert kept["versions"]["gymnasium"] == gym.__version__
    repository = tmp_path / "repository"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(repository)]
    script = repository / "my_ppo.py"
    repository.mkdir()
    script.write_text("one")
    assert runs.commit_of(str(script)) is None
    for words in (["init", "-q"], ["add", "my_ppo.py"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert runs.commit_of(str(script)) == head.strip()
    script.write_text("two")
    assert runs.commit_of(str(script)) == f"{head.strip()}-dirty"


def test_metric_that_is_nan(tmp_path, monkeypatch, capsys):
    """One that a copy of the script logs ends no run, and is said once."""
    original = runs.Services.end_update

    def with_metric(self, global_step, step, scalars, episodes):
        scalars["charts/mine"] = float("nan")
        original(self, global_step, step, scalars, episodes)

    monkeypatch.setattr(runs.Services, "end_update", with_metric)
    flags = dict(env_id="CartPole-v1", total_timesteps=96, run_dir=str(tmp_path))
    services.run(ppo_graph, small_args(**flags))
    said = capsys.readouterr().err
    assert said.count("charts/mine is nan, and is logged as it is") == 1


def test_objects_of_a_program(tmp_path, capsys):
    """Arrays, functions, paths and NumPy's numbers as flags: files have them as text, and numbers.
    They are loaded without pickle, and say whether a run is the same. A text of an object makes no
    environment."""
    kwargs = {"weights": np.arange(3000.0), "scale": abs, "names": {(0, 1): "edge"}}
    flags = dict(env_id="Weighted-v0", seed=np.int64(3), gamma=np.float64(0.5))
    args = small_args(run_dir=tmp_path, env_kwargs=kwargs, **flags, eval_episodes=1)
    (row,) = services.run(ppo_graph, args, checkpoint_every=1)
    assert row["return"] == 7 * 4498500
    folder = run_folder(tmp_path)
    saved = torch.load(folder / "model.pt", weights_only=True)["args"]
    args_json = json.loads((folder / "args.json").read_text())
    for own in (saved, args_json):
        assert (own["seed"], own["gamma"], own["run_dir"]) == (3, 0.5, str(tmp_path))
        assert own["env_kwargs"]["weights"].startswith("object of a program: array([0.")
        assert own["env_kwargs"]["scale"] == "object of a program: <built-in function abs>"
        assert own["env_kwargs"]["names"] == "object of a program: {(0, 1): 'edge'}"
    with pytest.raises(ValueError, match="object of a program.*give env_kwargs again.*an `env`"):
        load_policy(folder)
    policy = load_policy(folder, gym.make("Weighted-v0", **kwargs))
    assert policy(np.zeros(2, np.float32)) in (0, 1)
    more = dict(resume="auto", total_timesteps=96, checkpoint_every=1)
    services.run(ppo_graph, args, **more)
    assert "goes on from" in capsys.readouterr().out
    # One of the numbers that its text leaves out
    other = np.where(np.arange(3000) == 1500, 0.0, kwargs["weights"])
    services.run(ppo_graph, replace(args, env_kwargs=kwargs | {"weights": other}), **more)
    assert "no checkpoint" in capsys.readouterr().err


class Mixing(torch.nn.Module):
    """A layer of which one that a user writes may mix the graphs of a batch."""

    def __init__(self, dim, mixes):
        super().__init__()
        self.linear, self.mixes = torch.nn.Linear(dim, dim), mixes

    def forward(self, x, edge_index):
        return self.linear(x - x.mean(0)) if self.mixes else self.linear(x)


@pytest.mark.parametrize(
    "scale, flags, is_said",
    [
        (1e4, {}, True),
        (1e4, {"clip_vloss": False, "norm_vloss": 1.0}, False),
        (1e4, {"wrap": ("gymnasium.wrappers:NormalizeReward",)}, False),
    ],
)
def test_warns_of_large_returns(scale, flags, is_said, tmp_path, capsys):
    """Once, where V cannot follow them; not where what is named is given."""
    weighted = {"weights": np.ones(1), "scale": lambda total: scale * total}
    args = small_args(run_dir=str(tmp_path), env_id="Weighted-v0", env_kwargs=weighted, **flags)
    services.run(ppo_graph, args)
    words = "the returns' deviation is .*: scale rewards by --wrap gymnasium.wrappers:NormalizeRew"
    assert len(re.findall(words, capsys.readouterr().err)) == is_said


@pytest.mark.parametrize("mixes", [False, True])
def test_warns_of_what_mixes_observations(mixes, tmp_path, monkeypatch, capsys):
    """Once, on the console, where collection and update do not agree."""
    monkeypatch.setattr(ppo_graph, "make_conv", lambda kind, dim, *_: Mixing(dim, mixes))
    args = small_args(run_dir=str(tmp_path), env_id="envs:PoissonGraph-v0", learning_rate=0.1)
    services.run(ppo_graph, args)
    text = capsys.readouterr().err
    assert text.count("debug/collection_mismatch is ") == mixes
    assert text.count("mixes the observations of a batch (batch norm;") == mixes


# ---- What a run leaves ----


def episodes_of(folder):
    """The rows of episodes.csv."""
    with open(folder / "episodes.csv", newline="") as file:
        return list(csv.DictReader(file))


MORE = "--total-timesteps", "100"
SMALL = "--total-timesteps 96 --num-envs 2 --num-steps 24 --hidden-dims 8 --no-cuda".split()


def test_what_a_command_leaves(tmp_path):
    """Flags, episodes, table and weights; the last lines say so, and their command plays."""
    code, out, err = command_line("--env-id", "CartPole-v1", *SMALL, cwd=tmp_path)
    assert code == 0, err
    folder = run_folder(tmp_path / "runs")
    kept = json.loads((folder / "args.json").read_text())
    assert kept["script"] == "ppo_graph" and kept["num_steps"] == 24 and kept["world_size"] == 1
    assert kept["hidden_dims"] == [8] and kept["num_iterations"] == 0
    rows = episodes_of(folder)
    log = train_events(tmp_path / "runs")
    returns = {}  # of each rollout
    for row in rows:
        returns.setdefault(-(int(row["step"]) // -48) * 48, []).append(float(row["return"]))
    means = {step: np.mean(found) for step, found in returns.items()}
    assert dict(log["charts/episodic_return"]) == pytest.approx(means)
    assert all(row["return"] == row["length"] + ".0" for row in rows)
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds) and 0 < seconds[0] and {row["group"] for row in rows} == {""}
    where, *play = out.splitlines()[-3:]
    there = "args.json, checkpoint_000000000096.ckpt, episodes.csv, eval.csv, eval.md, model.pt"
    assert where == f"in {folder}: {there}, TensorBoard's log"
    words = play[0].removeprefix("to play: python ").split()
    assert words[0] == ppo_graph.__file__ and play[1].endswith(f"load_policy('{words[2]}')")
    code, out, err = command_line(*words[1:], "--eval-episodes", 2, cwd=tmp_path)
    assert code == 0 and "| 1 |" in out, err
    assert len(list(tmp_path.rglob("model.pt"))) == 1  # a run that only plays leaves none


def test_steps_that_are_no_whole_update(tmp_path):
    """The run says how many it trains, and its bar ends there; one that is resumed when all are
    trained says so."""
    code, out, err = command_line("--env-id", "CartPole-v1", *SMALL[2:], *MORE, cwd=tmp_path)
    assert code == 0 and "training: 2 updates of 48 steps: 96 of the 100 steps" in out + err
    assert "100%" in err and "96.0/96.0" in err
    code, out, err = command_line(
        "--env-id", "CartPole-v1", *SMALL[2:], *MORE, "--resume", "auto", cwd=tmp_path
    )
    assert code == 0 and "--resume: all 96 steps have been trained" in out + err


def test_no_episode_has_ended(tmp_path):
    """An environment that never ends one is named at the end."""
    gym.register("Endless-v0", lambda: ListEnv(vector(2), [np.zeros(2)] * 99))
    result = run(tmp_path, env_id="Endless-v0", num_envs=2, num_steps=24, total_timesteps=96)
    assert "no episode has ended in 48 steps" in result.text


def test_episodes_after_a_resume(tmp_path):
    """What ended after the checkpoint is dropped, and comes again; seconds go on."""
    flags = dict(env_id="Steps-v0", checkpoint_every=1)
    folder = train(tmp_path, **flags)
    before = episodes_of(folder)
    path = folder / "checkpoint_000000000120.ckpt"
    assert [int(row["step"]) for row in before][-1] > 120
    begun_earlier(tmp_path)
    train(tmp_path, resume=str(path), **flags)
    after = episodes_of(folder)
    assert len(before) == len(after)
    for one, two in zip(before, after):
        seconds = float(one.pop("seconds")), float(two.pop("seconds"))
        assert one == two and (int(one["step"]) > 120 or seconds[0] == seconds[1])
        last = seconds[1]
    assert last >= max(float(row["seconds"]) for row in episodes_of(folder)[:-3])


# ---- The bar ----
def test_bar(monkeypatch):
    """Where stderr is no terminal there is a line at once, one every ten seconds, and one at the
    end."""
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    bar = process.bar(total=1000, position=0)  # whatever bars are left open
    for k in range(100):
        now[0] += 1
        bar.update(10)
        bar.set_postfix(ret=k)
    bar.close()
    lines = out.getvalue().splitlines()
    assert "\r" not in out.getvalue() and len(lines) == 12 and "ret=99" in lines[-1]
    assert lines[0].startswith("0%|") and "100%|" in lines[-1]
