"""What stops a run: kill -9, signals, faults of environments, bad numbers, damaged
checkpoints."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import gymnasium as gym
import pytest
import torch
import walks
from helpers import train_events, weights
from processes import (
    Dies,
    begun_earlier,
    children,
    folder_of,
    is_alive,
    newest,
    start,
    train,
    wait_for,
)
from torch.utils.tensorboard import SummaryWriter
from walks import Faulty, NoPickle, OnClass

from cleanrl_graph.services import checkpoint, runs
from cleanrl_graph.services.check import UsageError
from cleanrl_graph.services.plot import episodes_of
from cleanrl_graph.services.workers import WorkerEnvs

BENCHMARK = Path(__file__).parents[2] / "benchmark"
sys.path[:0] = [str(BENCHMARK / "reliability"), str(BENCHMARK / "third_party")]

GRAPH = dict(env_id="envs:PoissonGraph-v0", env_kwargs={"episode_length": 5})


def log_of(folder):
    """What a run logged, without what depends on the clock; its run_dir has no other run."""
    log = train_events(folder.parent)
    del log["charts/SPS"]
    return log


def assert_same(run_dir, whole):
    """Weights and log in a run_dir are those of the run in the folder `whole`, bit by bit."""
    folder = folder_of(run_dir)
    assert_equal(weights(folder), weights(whole))
    assert log_of(folder) == log_of(whole)


def assert_equal(mine, other):
    assert list(mine) == list(other) and all(torch.equal(mine[name], other[name]) for name in other)


def dies(run_dir, patch, script="ppo_graph", code=-signal.SIGKILL, **flags):
    """A run that ends there; the newest checkpoint that it left."""
    process = start(run_dir, script, patch=patch, **flags)
    process.join()
    assert process.exitcode == code
    found = newest(run_dir)
    begun_earlier(run_dir)
    return found


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(checkpoint, "inexact", set())


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of one's own in the current folder."""
    folder = tmp_path / "mine"
    folder.mkdir()
    text = Path(walks.__file__).read_text() + '\ngym.register("Walk-v0", WithLambda)\n'
    (folder / "walk.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("walk", None)


# ---- Kill and resume ----
def moment(name, flags):
    """Where a run dies, after its first checkpoint: in a step, an update, a log or a save."""
    rng = random.Random(name)
    envs = (WorkerEnvs if flags.get("num_workers") else "Envs", "step", rng.randrange(17, 49))
    return [
        envs,
        (torch.optim.Adam, "step", rng.randrange(9, 17)),
        (os, "replace", 4),  # args.json and episodes.csv were the first
        (SummaryWriter, "add_scalar", rng.randrange(3, 7), "losses/clipfrac"),
    ][rng.randrange(4)]


STATELESS = dict(env_id="envs:StatelessCartPole-v1", norm_obs=True)
LAST = dict(env_id="envs:LastGraphs-v0", num_workers=2)
EXPLORE = dict(env_id="envs:GraphExplore-v0")
PREV = dict(prev_action=True, prev_reward=True)
SHIFTS = dict(obs_shifts="-11:0", action_shifts="-12,-1", reward_shifts="-9:-1")
RUNS = {  # name -> (script, flags): what is kept between two updates, all of it
    "CartPole": ("ppo_graph", dict(env_id="CartPole-v1")),
    "graphs, workers": ("ppo_graph", GRAPH | dict(num_workers=2, wrap=("z:skill:3",))),
    "JobShop": ("ppo_graph", dict(env_id="envs:JobShop-v0", anneal_lr=False, target_kl=0.01)),
    "pairs": ("ppo_graph", dict(env_id="envs:PairNodes-v0", autoregressive=True)),
    "list": ("ppo_graph", dict(env_id="walk:Walk-v0", env_kwargs=[{}, {"max_episode_steps": 4}])),
    "own class, workers": ("ppo_framestack", dict(env_id="walk:Walk-v0", num_workers=2)),
    "shifts": ("ppo_framestack", STATELESS | SHIFTS),
    "shifts, workers": ("ppo_framestack", LAST),
    "LSTM, ids": ("ppo_lstm_sparse", EXPLORE | PREV | dict(remember_edges=True)),
    "LSTM, workers": ("ppo_lstm_sparse", EXPLORE | dict(num_workers=2, norm_obs=True)),
    "transformer": ("ppo_gtrxl", STATELESS | PREV | dict(memory_length=11)),
    "agents": ("ppo_graph_agents", dict(env_id="envs:Crowd-v0")),
    "transformer, workers": ("ppo_gtrxl", EXPLORE | dict(prev_action=True, num_workers=2)),
}


# What each memory keeps, in process and with workers; the others differ in what other tests restore
FAST = ("graphs, workers", "shifts", "LSTM, ids", "transformer")


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RUNS],
)
def test_killed_and_resumed(name, tmp_path, own_module, capfd):
    """A run that was killed with -9 ends with the weights and the log of one that was not."""
    script, flags = RUNS[name]
    whole = train(tmp_path / "a", script, **flags)
    assert 0 < dies(tmp_path / "b", Dies(*moment(name, flags)), script, **flags) < 144
    train(tmp_path / "b", script, resume="auto", **flags)
    assert_same(tmp_path / "b", whole)
    assert "new episode" not in capfd.readouterr().err


def test_killed_before_the_first_checkpoint(tmp_path, capsys):
    """`auto` starts anew and says so; no half of a file is taken for a checkpoint."""
    whole = train(tmp_path / "a", **GRAPH)
    process = start(tmp_path / "b", patch=Dies(os, "replace", 3), **GRAPH)
    process.join()
    assert process.exitcode == -signal.SIGKILL and newest(tmp_path / "b") == 0
    train(tmp_path / "b", resume="auto", **GRAPH)
    assert "no checkpoint of PoissonGraph-v0" in capsys.readouterr().err
    begun_earlier(tmp_path / "b")
    assert_same(tmp_path / "b", whole)


def test_killed_while_it_saves(tmp_path):
    """The checkpoint before is taken, and nothing unfinished stays."""
    whole = train(tmp_path / "a", **GRAPH)
    at = Dies(os, "fsync", 3)  # the first one was the trial
    assert dies(tmp_path / "b", at, **GRAPH) == 48
    (unfinished,) = tmp_path.glob("b/*/unfinished.tmp")
    train(tmp_path / "b", resume="auto", **GRAPH)
    assert_same(tmp_path / "b", whole)
    assert not unfinished.exists()


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    """benchmark/reliability/kill.py: every script, in process and with workers."""
    import kill

    outcomes = kill.kill_runs(len(kill.RUNS), tmp_path, seed=None, total_timesteps=720)
    assert all(outcome.equal for outcome in outcomes), outcomes


def test_resumed_again_and_again(tmp_path):
    """Three kills in one run, of which the second comes before a new checkpoint."""
    whole = train(tmp_path / "a", **STATELESS)
    for at, found in ((20, 48), (5, 48), (20, 96)):
        at = Dies("Envs", "step", at)
        assert dies(tmp_path / "b", at, resume="auto", **STATELESS) == found
    train(tmp_path / "b", resume="auto", **STATELESS)
    assert_same(tmp_path / "b", whole)


# ---- Environments that do not go on exactly ----
for env in (Faulty, NoPickle, OnClass):
    gym.register(f"{env.__name__}-v0", entry_point=env)


@pytest.mark.parametrize(
    "kind, words, workers",
    [
        ("NoPickle", "no copy can be made of it: TypeError", 0),
        ("OnClass", "a copy returns another observation", 2),
    ],
)
def test_inexact_environments_begin_anew(kind, words, workers, tmp_path, capfd):
    """Which is said once, with other seeds; all else goes on."""
    kwargs = {"seeds": str(tmp_path / "seeds")}
    flags = dict(env_id=f"{kind}-v0", env_kwargs=kwargs, num_workers=workers)
    assert dies(tmp_path / "b", Dies(torch.optim.Adam, "step", 11), **flags) == 48
    sentence = f"{kind}-v0: it begins a new episode when the run is resumed, since {words}"
    assert capfd.readouterr().err.count(sentence) == 1
    folder = train(tmp_path / "b", resume="auto", **flags)
    assert capfd.readouterr().err.count(sentence) == 1
    log = log_of(folder)
    assert [step for step, _ in log["losses/value_loss"]] == [24 * k for k in range(1, 7)]
    ends = sorted([*range(21, 49, 21), *range(48 + 21, 145, 21)] * 3)
    assert [(step, length) for step, _, _, length in episodes_of(folder)] == [
        (step, 7) for step in ends
    ]
    seeds = list(map(int, (tmp_path / "seeds").read_text().split()))  # workers write side by side
    assert sorted(seeds[:3]) == [1, 2, 3] and len(seeds) == len(set(seeds)) == 6


# ---- When checkpoints are written ----
class Clock:
    """Each look at it is 100 seconds later."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 100
        return self.now

    def time(self):
        return time.time()


@pytest.mark.parametrize(
    "every, minutes, steps",
    [
        (100, 5.0, [72, 144]),  # after 3 updates, and at the end
        (100, 0.0, [144]),
        (2, 5.0, [48, 96, 144]),
        (0, 5.0, []),
    ],
)
def test_updates_or_minutes(every, minutes, steps, tmp_path, monkeypatch):
    """Whichever comes first, and the end; none with --checkpoint-every 0."""
    written, save = [], checkpoint.Folder.save
    noted = lambda self, *args: (written.append(args[0]), save(self, *args))
    monkeypatch.setattr(runs, "time", Clock())
    monkeypatch.setattr(checkpoint.Folder, "save", noted)
    train(tmp_path, checkpoint_every=every, checkpoint_minutes=minutes, env_id="CartPole-v1")
    assert written == steps


# ---- What --resume finds ----
def test_auto_refuses_changed_flags(tmp_path, capsys):
    """By name, before anything is written; a folder goes on with them."""
    folder = train(tmp_path, anneal_lr=False, learning_rate=0.5, **GRAPH)
    changed = GRAPH | dict(anneal_lr=False, learning_rate=1e-3, gamma=0.5, total_timesteps=192)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    sentences = ["--learning-rate 0.001, it was 0.5", "--gamma 0.5, it was 0.99"]
    with pytest.raises(SystemExit, match="; ".join(sentences)):
        train(tmp_path, resume="auto", **changed)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    begun_earlier(tmp_path)
    train(tmp_path, resume=str(folder), **changed)
    written = capsys.readouterr().err
    for sentence in (*sentences, "--total-timesteps 192, it was"):
        assert f"--resume: {sentence}" in written
    assert written.count("it was") == 3
    rates = log_of(folder)["charts/learning_rate"]
    assert rates == [(24 * k, pytest.approx(0.5 if k < 7 else 1e-3)) for k in range(1, 9)]


def test_auto_after_the_end(tmp_path):
    """With the same flags the run ends well, with its model; other steps go on."""
    folder = train(tmp_path, **GRAPH)
    model, log, paths = weights(folder), log_of(folder), checkpoint.checkpoints_in(str(folder))
    before = Path(paths[0]).read_bytes()
    (folder / "model.pt").unlink()
    begun_earlier(tmp_path)
    process = start(tmp_path, resume="auto", **GRAPH)
    process.join()
    assert process.exitcode == 0 and folder_of(tmp_path) == folder and log_of(folder) == log
    assert_equal(weights(folder), model)
    assert checkpoint.checkpoints_in(str(folder)) == paths and Path(paths[0]).read_bytes() == before
    begun_earlier(tmp_path)
    train(tmp_path, resume="auto", **GRAPH | dict(total_timesteps=192))
    assert newest(tmp_path) == 192 and len(log_of(folder)["losses/value_loss"]) == 8


# ---- Signals ----
@pytest.mark.parametrize(
    "number, script, workers",
    [
        (signal.SIGINT, "ppo_graph", 0),
        (signal.SIGTERM, "ppo_lstm_sparse", 2),
    ],
)
def test_signal_saves_and_leaves(number, script, workers, tmp_path):
    """It ends the update, saves and exits with 130 or 143; the run can go on."""
    flags = STATELESS | dict(num_workers=workers)
    whole = train(tmp_path / "a", script, **flags)
    at = Dies(WorkerEnvs if workers else "Envs", "step", 19, number=number)
    stopped = dict(flags, checkpoint_every=50, code=128 + number)
    assert dies(tmp_path / "b", at, script, **stopped) == 72
    assert not list(tmp_path.glob("b/*/failed"))
    train(tmp_path / "b", script, resume="auto", **flags)
    assert_same(tmp_path / "b", whole)


def test_second_signal_leaves_at_once(tmp_path):
    """Where the first one has to wait for an environment that hangs."""
    flags = dict(env_id="Faulty-v0", env_kwargs={"fault": "hang", "at": 30})
    process = start(tmp_path, num_workers=2, **flags)
    wait_for(lambda: newest(tmp_path) == 48)
    time.sleep(0.3)
    for _ in range(2):
        assert process.is_alive()
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.2)
    wait_for(lambda: process.exitcode is not None, 2)
    assert process.exitcode == 130


@pytest.mark.parametrize("fault", ["", pytest.param("hang", marks=pytest.mark.slow)])
def test_no_orphans(fault, tmp_path):
    """Kill -9 of the run: its workers leave, also from a step that hangs."""
    flags = dict(env_id="Faulty-v0", env_kwargs={"fault": fault, "at": 30}, total_timesteps=10**6)
    process = start(tmp_path, num_workers=2, **flags)
    wait_for(lambda: newest(tmp_path) >= 48)
    time.sleep(0.3 if fault else 0)
    workers = children(process.pid)
    process.kill()
    process.join()
    wait_for(lambda: not any(map(is_alive, workers)), 20)
    assert len(workers) == 2


# ---- Faults in environments ----
@pytest.mark.parametrize(
    "fault, workers, sentence",
    [
        (
            "step",
            2,
            r"raise KeyError(.|\n)*env 1, step 21, step.*: KeyError: 'the engine is on fire",
        ),
        ("kill", 2, "step 21: the worker of envs 0 to 1 died with exit code -9"),
    ],
)
def test_fault_in_an_environment(fault, workers, sentence, tmp_path):
    """A sentence and a mark; the resumed run has other seeds, lest it comes again."""
    kwargs = {"fault": fault, "at": 21, "seeds": str(tmp_path / "seeds")}
    flags = dict(env_id="Faulty-v0", env_kwargs=kwargs, num_workers=workers, env_timeout=0.5)
    with pytest.raises((UsageError, ChildProcessError), match=sentence):
        train(tmp_path / "b", **flags)
    folder = folder_of(tmp_path / "b")
    assert newest(tmp_path / "b") == 48 and (folder / "failed").read_text().count("\n") == 1
    begun_earlier(tmp_path / "b")
    train(tmp_path / "b", resume="auto", **flags)
    assert newest(tmp_path / "b") == 144 and not (folder / "failed").exists()
    log = log_of(folder)
    assert [step for step, _ in log["losses/value_loss"]] == [24 * k for k in range(1, 7)]
    ends = [step for step, *_ in episodes_of(folder)]
    assert ends[-3:] == [48 + 21 * 4] * 3  # they began in update 3
    seeds = (tmp_path / "seeds").read_text().split()
    assert len(seeds) == len(set(seeds)) == 6


# ---- Bad numbers ----
def test_network_that_diverges(tmp_path):
    """NaN stops the run at the end of its update, before anything is saved."""
    flags = dict(learning_rate=1e30, checkpoint_every=1, anneal_lr=False, **STATELESS)
    with pytest.raises(ValueError, match=r"update \d: losses/\w+ is (nan|inf).*--learning-rate"):
        train(tmp_path, **flags)
    (folder,) = tmp_path.iterdir()
    assert not (folder / "model.pt").exists() and (folder / "failed").exists()
    for path in folder.glob("*.ckpt"):
        assert all(value.isfinite().all() for value in checkpoint.read(str(path))["model"].values())
