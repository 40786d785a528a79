"""X3 and what stops a run: kill -9, signals, faults of environments, bad numbers, damaged checkpoints, a full disk."""

import importlib
import multiprocessing as mp
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import ppo_graph
import pytest
import torch
from gymnasium import spaces
from helpers import small_args, vector
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

FORK = mp.get_context("fork")  # a process that has torch already
GRAPH = dict(env_id="envs:PoissonGraph-v0", env_kwargs={"episode_length": 5})

# name -> (script, flags): what is kept between two updates, all of it
RUNS = {
    "graph, statistics": ("ppo_graph", GRAPH | dict(norm_obs=True)),
    "graph, workers": ("ppo_graph", GRAPH | dict(norm_obs=True, num_workers=2)),
    "graph, JobShop": ("ppo_graph", dict(env_id="envs:JobShop-v0", anneal_lr=False, target_kl=0.01)),
    "graph, pairs": ("ppo_graph", dict(env_id="envs:PairNodes-v0", autoregressive=True)),
    "shifts, time limit": ("ppo_framestack", dict(env_id="envs:StatelessCartPole-v1", obs_shifts="-11:0",
                                                  action_shifts="-12,-1", reward_shifts="-9:-1", norm_obs=True)),
    "shifts, workers": ("ppo_framestack", dict(env_id="envs:LastGraphs-v0", num_workers=2, obs_shifts="-3:0")),
    "LSTM, remembered edges": ("ppo_lstm_sparse", dict(env_id="envs:GraphExplore-v0", remember_edges=True, lstm_dim=8,
                                                       prev_action=True, prev_reward=True)),
    "LSTM, workers": ("ppo_lstm_sparse", dict(env_id="envs:GraphExplore-v0", lstm_dim=8, num_workers=2,
                                              norm_obs=True)),
    "LSTM, no ids": ("ppo_lstm_sparse", dict(env_id="envs:Recall-v0", lstm_dim=8)),
    "transformer, previous": ("ppo_gtrxl", dict(env_id="envs:StatelessCartPole-v1", prev_action=True, prev_reward=True,
                                                memory_length=11, dim=8, num_heads=2, norm_obs=True)),
    "transformer, workers": ("ppo_gtrxl", dict(env_id="envs:GraphExplore-v0", memory_length=5, dim=8, num_heads=2,
                                               prev_action=True, num_workers=2)),
}


def args_of(run_dir, script="ppo_graph", **flags):
    module = importlib.import_module(script)
    defaults = dict(run_dir=str(run_dir), total_timesteps=144, checkpoint_every=1, keep_checkpoints=100,
                    save_model=True)
    return module, small_args(module, **defaults | flags)


def train(run_dir, script="ppo_graph", **flags):
    """The folder of the run."""
    module, args = args_of(run_dir, script, **flags)
    module.main(args)
    return folder_of(run_dir)


def start(run_dir, script="ppo_graph", stderr=None, **flags):
    """A process that trains, in a process group of its own."""
    module, args = args_of(run_dir, script, **flags)

    def target():
        os.setpgid(0, 0)
        tempfile.tempdir = str(Path(run_dir).parent)
        tqdm.set_lock(threading.RLock())  # its own lock is shared with this process, and could be held when it dies
        if stderr is not None:
            os.dup2(stderr, 2)
            sys.stderr = open(2, "w")
        module.main(args)

    process = FORK.Process(target=target)
    process.start()
    return process


def folder_of(run_dir):
    (folder,) = Path(run_dir).iterdir()
    return folder


def weights(folder):
    return torch.load(Path(folder) / "model.pt", weights_only=True)["model"]


def assert_equal(a, b):
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name


def log_of(folder):
    """name -> [(step, value)], without what depends on the clock."""
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    log.Reload()
    return {name: [(event.step, event.value) for event in log.Scalars(name)]
            for name in log.Tags()["scalars"] if name != "charts/SPS"}


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited too long"
        time.sleep(0.005)


def children(pid):
    """Process ids of the children that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def shared_memory():
    """Names in /dev/shm, but for the semaphores that every Python process which draws a bar has for a moment."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


# ---- Checkpoint and resume ----
@pytest.mark.parametrize("name", RUNS)
def test_resume_is_bitwise_the_same(name, tmp_path):
    """X3: a run that lost everything after its k-th checkpoint ends with the weights and the log of one that did not.
    The log file still holds what came after that checkpoint."""
    script, flags = RUNS[name]
    whole = train(tmp_path / "a", script, **flags)
    k = random.Random(name).randrange(1, 6)
    folder = tmp_path / "b" / whole.name
    shutil.copytree(whole, folder)
    for path in ppo_graph.checkpoints_in(str(folder))[:6 - k]:
        os.remove(path)
    (folder / "model.pt").unlink()
    module, args = args_of(tmp_path / "b", script, resume="auto", **flags)
    module.main(args)
    assert_equal(weights(folder), weights(whole))
    assert log_of(folder) == log_of(whole)
    last = [ppo_graph.load_checkpoint(ppo_graph.checkpoints_in(str(path))[0]) for path in (folder, whole)]
    for part in ("ranks", "optimizer", "iteration", "num_steps"):
        assert torch.equal(*(flat(state[part]) for state in last)), part
    assert list(last[0]["logger"]["recent"]) == list(last[1]["logger"]["recent"])


def flat(value):
    """All bytes of nested values in one tensor."""
    return torch.frombuffer(bytearray(repr(plain(value)).encode()), dtype=torch.uint8)


def plain(value):
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray)) else value


def newest(run_dir):
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.stem.split("_")[1]) for path in Path(run_dir).glob("*/checkpoint_*.ckpt")), default=0)


KILLED = ["graph, workers", "shifts, time limit", "LSTM, remembered edges", "transformer, workers"]


@pytest.mark.parametrize("name", KILLED)
def test_killed_at_a_random_moment(name, tmp_path):
    """X3: kill -9 twice in a run, wherever it is, and the weights and the log are those of an uninterrupted run. Its
    workers leave and no shared memory stays."""
    script, flags = RUNS[name]
    flags = flags | dict(total_timesteps=960, keep_checkpoints=2)
    whole, rng, memory, kills = train(tmp_path / "a", script, **flags), random.Random(), shared_memory(), 0
    while kills < 2:
        process = start(tmp_path / "b", script, resume="auto", **flags)
        steps = max(24 * rng.randrange(4 + 8 * kills, 9 + 8 * kills), newest(tmp_path / "b") + 24)
        wait_for(lambda: newest(tmp_path / "b") >= steps)
        time.sleep(rng.random() * 0.03)
        workers = children(process.pid)
        process.kill()
        process.join()
        wait_for(lambda: not any(map(is_alive, workers)), 20)
        kills += 1
        if process.exitcode == 0:  # it ended before this busy machine could kill it: once more
            shutil.rmtree(tmp_path / "b")
            kills = 0
    assert process.exitcode == -signal.SIGKILL
    assert len(workers) == flags.get("num_workers", 0)
    folder = train(tmp_path / "b", script, resume="auto", **flags)
    assert_equal(weights(folder), weights(whole))
    assert log_of(folder) == log_of(whole)
    assert shared_memory() <= memory


def test_env_that_cannot_be_restored(tmp_path, capsys):
    """X3: CartPole-v1 has no get_state; its episodes begin anew and the log says so. MuJoCo's set_state has another
    meaning, and a state with an odd object in it is no state; neither stops the checkpoint."""
    for kind, sentence in (("CartPole-v1", ""), ("NoState-v0", ""), ("OddState-v0", "env 1, get_state: TypeError")):
        capsys.readouterr()
        folder = train(tmp_path / kind, env_id=kind)
        os.remove(ppo_graph.checkpoints_in(str(folder))[0])
        written = capsys.readouterr().err
        assert sentence in written
        train(tmp_path / kind, env_id=kind, resume=str(folder))
        assert "3 of 3 environments cannot restore their state and begin a new episode" in capsys.readouterr().err
        steps = [step for step, _ in log_of(folder)["losses/value_loss"]]
        assert steps == [24 * k for k in range(1, 7)]


class Faulty(gym.Env):
    """Counts its steps; `fault` happens in step `at` of env `index` (the seed minus 1), where `once` is a file only if
    that does not exist yet. The state is its own to save."""

    action_space = spaces.Discrete(2)
    observation_space = vector(2, low=0, high=1000)

    def __init__(self, fault="", at=5, index=1, once="", length=7):
        self.fault, self.at, self.index, self.once, self.length = fault, at, index, once, length
        self.t, self.seed = 0, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = seed if self.seed is None else self.seed
        if self.t >= self.at and self.fault == "reset":
            self.strike()
        return self.observe(), {}

    def observe(self):
        bad = self.fault == "nan observation" and self.t == self.at and self.mine()
        return np.array([self.t, np.nan if bad else 1], np.float32)

    def mine(self):
        if self.seed is None or self.seed % 1000 - 1 != self.index or (self.once and os.path.exists(self.once)):
            return False
        if self.once:
            Path(self.once).touch()
        return True

    def strike(self):
        if self.mine():
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "hang":
                time.sleep(1000)
            if self.fault == "stuck":
                pow(7, 10**8)  # minutes, with the interpreter's lock held
            if self.fault == "exit":
                sys.exit(3)
            raise KeyError("the engine is on fire")

    def step(self, action):
        self.t += 1
        if self.t == self.at and self.fault in ("step", "kill", "hang", "stuck", "exit"):
            self.strike()
        reward = np.nan if self.fault == "nan reward" and self.t == self.at and self.mine() else 1.0
        return self.observe(), reward, False, self.t % self.length == 0, {}

    def get_state(self):
        return {"t": self.t, "seed": self.seed}

    def set_state(self, state):
        self.t, self.seed = state["t"], state["seed"]


class NoState(Faulty):
    get_state = property()  # as if there were none

    def set_state(self, qpos, qvel):
        raise AssertionError


class OddState(Faulty):
    def get_state(self):
        return {"simulator": object()}


for env in (Faulty, NoState, OddState):
    gym.register(f"{env.__name__}-v0", entry_point=env)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_write_the_same_states(workers, tmp_path):
    """X3: a checkpoint of a run with worker processes can be continued without, and the other way round."""
    whole = train(tmp_path / "a", num_workers=workers, **GRAPH)
    folder = tmp_path / "b" / whole.name
    shutil.copytree(whole, folder)
    for path in ppo_graph.checkpoints_in(str(folder))[:3]:
        os.remove(path)
    train(tmp_path / "b", num_workers=2 - workers, resume=str(folder), **GRAPH)
    assert_equal(weights(folder), weights(whole))


def test_last_checkpoints_are_kept(tmp_path):
    """X3: --keep-checkpoints K; nothing unfinished stays."""
    folder = train(tmp_path, keep_checkpoints=2, **GRAPH)
    assert sorted(path.name for path in folder.glob("*c*k*")) == [
        f"checkpoint_{step:012d}.ckpt" for step in (120, 144)]
    assert not list(folder.glob("*.tmp")) and not list(folder.glob("trial"))


DAMAGE = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:len(data) // 2],
    "flipped byte": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "only the header": lambda data: data[:data.index(b"\n")],
    "another format": lambda data: data.replace(b"checkpoint-1 ", b"checkpoint-9 ", 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint(damage, tmp_path, capsys):
    """X3: the one before it is used, with a warning; the end is the same."""
    whole = train(tmp_path / "a", **GRAPH)
    folder = tmp_path / "b" / whole.name
    shutil.copytree(whole, folder)
    path = Path(ppo_graph.checkpoints_in(str(folder))[0])
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    capsys.readouterr()
    train(tmp_path / "b", resume=str(path if damage == "truncated" else folder), **GRAPH)
    assert path.name in capsys.readouterr().err and path.name in map(str, [p.name for p in folder.iterdir()])
    assert_equal(weights(folder), weights(whole))
    assert log_of(folder) == log_of(whole)
    ppo_graph.load_checkpoint(str(path))  # it was written again


def test_older_checkpoint(tmp_path):
    """X3: a run that goes on from an older checkpoint keeps its own new ones, not those of the future that it left."""
    whole = train(tmp_path, **GRAPH)
    older = ppo_graph.checkpoints_in(str(whole))[3]
    train(tmp_path, resume=older, keep_checkpoints=2, learning_rate=1e-2, checkpoint_every=2, total_timesteps=120,
          **GRAPH)
    names = sorted(path.name for path in whole.glob("checkpoint_*"))
    assert [int(name[11:23]) for name in names if name.endswith(".ckpt")] == [96, 120]
    assert [int(name[11:23]) for name in names if name.endswith(".unused")] == [96, 120, 144]
    assert max(step for step, _ in log_of(whole)["losses/value_loss"]) == 120


def test_flags_that_changed(tmp_path, capsys):
    """X3: --resume says which flags differ, and goes on with the new ones where it can."""
    folder = train(tmp_path, anneal_lr=False, learning_rate=0.5, **GRAPH)
    capsys.readouterr()
    train(tmp_path, anneal_lr=False, learning_rate=1e-3, gamma=0.5, total_timesteps=192, resume=str(folder), **GRAPH)
    written = capsys.readouterr().err
    for sentence in ("--learning-rate 0.001, it was 0.5", "--gamma 0.5, it was 0.99", "--total-timesteps 192, it was"):
        assert f"--resume: {sentence}" in written
    assert written.count("it was") == 3 and "num-iterations" not in written
    rates = log_of(folder)["charts/learning_rate"]
    assert rates == [(24 * k, pytest.approx(0.5 if k < 7 else 1e-3)) for k in range(1, 9)]


def test_auto_takes_the_newest_run(tmp_path, capsys):
    """X3: --resume auto: the newest run of this env_id, exp_name and seed that has a checkpoint, or a new one."""
    folders = []
    for seed, timesteps in ((1, 24), (1, 48), (2, 72)):
        before = set(tmp_path.iterdir())
        module, args = args_of(tmp_path, seed=seed, total_timesteps=timesteps, resume="auto" if seed == 2 else None,
                               **GRAPH)
        module.main(args)
        folders += set(tmp_path.iterdir()) - before
        assert ("no checkpoint of PoissonGraph-v0__ppo_graph__2__" in capsys.readouterr().err) == (seed == 2)
    module, args = args_of(tmp_path, total_timesteps=96, resume="auto", **GRAPH)
    module.main(args)
    assert newest(tmp_path) == 96 and ppo_graph.checkpoints_in(str(folders[1]))[0].endswith("96.ckpt")
    assert len(list(tmp_path.iterdir())) == 3


# ---- Signals ----
@pytest.mark.parametrize("number, workers", [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGTERM, 2)])
def test_signal_saves_and_leaves(number, workers, tmp_path):
    """X3: SIGINT and SIGTERM, here to the whole group, save a checkpoint after the present step and exit with 130 and
    143. The resumed run trains the updates that are left; the log has each of them and each episode once."""
    flags = GRAPH | dict(num_workers=workers, total_timesteps=24 * 100, checkpoint_every=50)
    process = start(tmp_path, **flags)
    wait_for(lambda: list(tmp_path.glob("*/events*")))
    time.sleep(0.5 + random.random() * 0.2)
    inner = children(process.pid)
    os.killpg(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number and len(inner) == workers and not any(map(is_alive, inner))
    folder = folder_of(tmp_path)
    state = ppo_graph.load_checkpoint(ppo_graph.checkpoints_in(str(folder))[0])
    stopped = 3 * state["num_steps"]
    assert newest(tmp_path) == stopped and 0 <= state["num_steps"] - 8 * state["iteration"] <= 8
    assert all(env["env"] is not None for env in state["ranks"][0]["envs"])
    train(tmp_path, resume="auto", **flags)
    log, lost = log_of(folder), stopped - 24 * state["iteration"]
    updates = [24 * k + lost * (k > state["iteration"]) for k in range(1, 101)]
    assert [step for step, _ in log["losses/value_loss"]] == updates
    ends = [step for step, _ in log["charts/episodic_return"]]
    assert ends == [15 * k for k in range(1, updates[-1] // 15 + 1) for _ in range(3)]


def test_second_signal_leaves_at_once(tmp_path):
    """X3: where the first one has to wait for an environment that hangs."""
    flags = dict(env_id="Faulty-v0", env_kwargs={"fault": "hang"}, num_workers=2)
    process = start(tmp_path, **flags)
    wait_for(lambda: list(tmp_path.glob("*/events*")))
    time.sleep(1)
    workers = children(process.pid)
    for _ in range(2):
        assert process.is_alive()
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.3)
    process.join(5)
    assert process.exitcode == 130 and len(workers) == 2
    wait_for(lambda: not any(map(is_alive, workers)), 20)


def test_signal_on_the_command_line(tmp_path):
    """X3: Ctrl-C in the middle of `python ppo_graph.py` exits with 130, says so, and shows no traceback."""
    flags = ["--env-id", "envs:BestOfSet-v0", "--run-dir", str(tmp_path), "--num-workers", "1", "--no-cuda"]
    process = subprocess.Popen([sys.executable, ppo_graph.__file__, *flags], stderr=subprocess.PIPE, text=True,
                               env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
    wait_for(lambda: list(tmp_path.glob("*/events*")), 100)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate()[1]
    assert process.returncode == 130 and "SIGINT: stopping after this step" in error and "Traceback" not in error
    assert len(list(tmp_path.glob("*/checkpoint_*.ckpt"))) == 1


@pytest.mark.parametrize("fault", ["", "hang", "stuck"])
def test_no_orphans(fault, tmp_path):
    """X3: kill -9 of the run: its workers leave, also from a step that hangs or holds the interpreter's lock."""
    memory = shared_memory()
    flags = dict(env_id="Faulty-v0", env_kwargs={"fault": fault}, total_timesteps=10**6, checkpoint_every=0)
    process = start(tmp_path / "runs", num_workers=2, **flags)
    wait_for(lambda: list(tmp_path.glob("runs/*/events*")))
    time.sleep(0.5)
    workers = children(process.pid)
    process.kill()
    process.join()
    wait_for(lambda: not any(map(is_alive, workers)), 20)
    assert len(workers) == 2 and shared_memory() <= memory and os.listdir(tmp_path) == ["runs"]


# ---- Faults in environments ----
@pytest.mark.parametrize("fault, doing", [("step", "action [01]"), ("reset", "reset")])
@pytest.mark.parametrize("workers", [0, 2])
def test_exception_in_an_environment(fault, doing, workers, tmp_path):
    """X3: the env's own traceback, index, step and action; a checkpoint from before the update is left."""
    flags = dict(env_id="Faulty-v0", env_kwargs={"fault": fault, "at": 21}, num_workers=workers)
    with pytest.raises(RuntimeError, match=f"env 1, step 21, {doing}: KeyError: 'the engine is on fire'") as error:
        train(tmp_path, **flags)
    trace = "".join(ppo_graph.traceback.format_exception(error.value))
    assert "in strike" in trace and 'raise KeyError("the engine is on fire")' in trace
    state = ppo_graph.load_checkpoint(ppo_graph.checkpoints_in(str(folder_of(tmp_path)))[0])
    whole = ppo_graph.load_checkpoint(ppo_graph.checkpoints_in(str(folder_of(tmp_path)))[1])
    assert state["iteration"] == whole["iteration"] == 2 and newest(tmp_path) == 63
    assert_equal(state["model"], whole["model"])


@pytest.mark.parametrize("workers, lost", [(1, 3), (3, 1)])
@pytest.mark.parametrize("fault, sentence", [("kill", "died with exit code -9"), ("exit", "died with exit code"),
                                             ("hang", "did not answer within 0.5 s")])
def test_worker_that_is_lost(fault, sentence, workers, lost, tmp_path, capfd):
    """X3: raised with the envs and the step, or with `restart` the episodes of its envs are truncated."""
    flags = dict(env_id="Faulty-v0", num_workers=workers, env_timeout=0.5)
    first, last = (0, 2) if lost == 3 else (1, 1)
    with pytest.raises(RuntimeError, match=f"worker of envs {first} to {last} {sentence}.* in step 5"):
        train(tmp_path / "a", env_kwargs={"fault": fault}, **flags)
    once = {"fault": fault, "once": str(tmp_path / "flag"), "length": 10**6}
    folder = train(tmp_path / "b", env_kwargs=once, on_env_error="restart", **flags)
    assert f"worker of envs {first} to {last} {sentence}" in capfd.readouterr().err
    log = log_of(folder)
    assert [value for _, value in log["charts/env_restarts"]] == [lost] * 6
    assert log["charts/episodic_length"] == log["charts/episodic_return"] == [(15, 4)] * lost


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", ["step", "reset"])
def test_restart(fault, workers, tmp_path, capfd):
    """X3: with `restart` the env is made anew; its episode is truncated at the last observation that it returned,
    with whose value the return goes on."""
    once = {"fault": fault, "once": str(tmp_path / "flag"), "at": 7}
    folder = train(tmp_path / "b", env_id="Faulty-v0", env_kwargs=once, on_env_error="restart", num_workers=workers)
    assert "env 1, step 7" in (written := capfd.readouterr().err) and "Traceback" in written
    log = log_of(folder)
    assert [value for _, value in log["charts/env_restarts"]] == [1.0 if fault == "step" else 0.0] * 6
    lengths = [value for step, value in log["charts/episodic_length"] if step == 21]
    assert lengths == ([7, 6, 7] if fault == "step" else [7] * 3)

    class Once(Faulty):
        def __init__(self, t=0):
            super().__init__()
            self.t = t

        def step(self, action):
            if self.t == 1 and self.seed == 1:
                raise OSError
            return super().step(action)

    envs = ppo_graph.make_envs([lambda: Once(4), Once], small_args(num_workers=workers, on_env_error="restart"))
    try:
        envs.reset(0)
        envs.step([0, 0])
        step = envs.step([0, 0])
        assert step.truncated.tolist() == [False, True] and step.reward.tolist() == [1, 0]
        ((i, (final,)),) = step.finals
        assert i == 1 and final.tolist() == [1, 1] and step.episodes == [(1, 1.0, 1, {"restarted": 1})]
        assert np.concatenate(step.parts[0]).tolist() == [[6, 1], [0, 1]]
    finally:
        envs.close()


class Hopeless(Faulty):
    """Fails in every step, or after the first one already when it is made."""

    made = 0

    def __init__(self, how="step", **kwargs):
        super().__init__(**kwargs)
        self.how = how
        Hopeless.made += 1
        if how == "made" and Hopeless.made > 4:
            raise OSError("no licence")

    def step(self, action):
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("the engine is on fire")


gym.register("Hopeless-v0", entry_point=Hopeless)


@pytest.mark.parametrize("how, workers, sentence", [
    ("step", 0, "env 0, step 11, action .*10 restarts"), ("step", 2, "env 0, step 11, action .*10 restarts"),
    ("made", 0, "env 1, step 1, restart: OSError: no licence .*10 restarts"),
    ("kill", 3, "worker of envs 0 to 0 died with exit code -9 in step 11 .*10 restarts")])
def test_too_many_restarts(how, workers, sentence, tmp_path):
    """X3: an environment that fails again and again stops the run."""
    Hopeless.made = 0
    with pytest.raises(RuntimeError, match=sentence):
        train(tmp_path, env_id="Hopeless-v0", env_kwargs={"how": how}, on_env_error="restart", num_workers=workers)


def test_worker_that_is_lost_between_steps(tmp_path):
    """X3: a worker that is killed while the run updates is missing in the checkpoint only; the next step deals with
    it."""
    makers = [lambda: Faulty(length=100)] * 4
    for restart in (False, True):
        envs = ppo_graph.WorkerEnvs(makers, 2, restart=restart)
        try:
            envs.reset(1)
            envs.step([0] * 4)
            envs.workers[1][0].kill()
            states = envs.state()
            assert [state["env"] is None for state in states] == [False, False, True, True]
            if restart:
                assert envs.step([0] * 4).truncated.tolist() == [False, False, True, True]
            else:
                with pytest.raises(ppo_graph.WorkerLost, match="envs 2 to 3 died with exit code -9 in step 2"):
                    envs.step([0] * 4)
        finally:
            envs.close()
        again = ppo_graph.Envs(makers)
        step = again.restore((1, 1, states))
        assert step.terminated.tolist() == [False, False, True, True]
        assert np.concatenate(step.parts[0])[:, 0].tolist() == [1, 1, 0, 0]


def test_hanging_worker_is_killed():
    """X3: none is left behind when another one takes its place, and its late answer is never taken for another."""
    before = children(os.getpid())
    envs = ppo_graph.WorkerEnvs([lambda i=i: Faulty("hang", at=2, index=i, length=3) for i in range(2)], 2, "auto",
                                True, 0.3)
    try:
        envs.reset(1)
        for ends in (False, True, False):
            assert envs.step([0] * 2).truncated.tolist() == [ends] * 2
        assert len(children(os.getpid())) - len(before) == 2
    finally:
        envs.close()


# ---- Bad numbers ----
@pytest.mark.parametrize("fault, sentence", [
    ("nan observation", r"env 1, leaf 'obs', step 20: value nan at index \[1\]"),
    ("nan reward", "env 1, step 20: reward nan")])
@pytest.mark.parametrize("workers", [0, 2])
def test_nan_from_an_environment(fault, sentence, workers, tmp_path):
    """X3: named, after a checkpoint with the weights of before the update that it would have gone into."""
    flags = dict(env_id="Faulty-v0", env_kwargs={"fault": fault, "at": 20}, num_workers=workers)
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        train(tmp_path, **flags)
    newer, older = map(ppo_graph.load_checkpoint, ppo_graph.checkpoints_in(str(folder_of(tmp_path)))[:2])
    assert newer["iteration"] == older["iteration"] == 2
    assert_equal(newer["model"], older["model"])


def poison(monkeypatch, name, at, script=ppo_graph):
    """The at-th minibatch of a run has a loss or a gradient that is NaN. Returns the list of agents it saw."""
    original, seen = script.ppo_loss, []

    def loss(agent, inputs, batch, args):
        value, logs = original(agent, inputs, batch, args)
        seen.append((agent, {k: v.clone() for k, v in agent.state_dict().items()}))
        if len(seen) - 1 == at:
            if name == "loss":
                value = value * np.inf
            else:
                weight = next(agent.actor.parameters())
                weight.register_hook(lambda grad: grad * np.nan if len(seen) - 1 == at else grad)
                value, logs = original(agent, inputs, batch, args)
        return value, logs

    monkeypatch.setattr(script, "ppo_loss", loss)
    return seen


@pytest.mark.parametrize("name, sentence", [
    ("loss", "update 3, after 24 steps of 3 envs: loss of minibatch 1 is NaN or inf; the checkpoint in"),
    ("gradient", "update 3, after 24 steps of 3 envs: gradient of actor.0.weight of minibatch 1 is NaN")])
def test_bad_update_stops(name, sentence, tmp_path, monkeypatch):
    """X3: a checkpoint with the weights, moments and statistics of before the bad update; a run resumes from it."""
    seen = poison(monkeypatch, name, 9)  # 4 minibatches an update
    with pytest.raises(FloatingPointError, match=sentence):
        train(tmp_path, checkpoint_every=0, norm_obs=True, **GRAPH)
    folder = folder_of(tmp_path)
    state = ppo_graph.load_checkpoint(ppo_graph.checkpoints_in(str(folder))[0])
    assert state["iteration"] == 2 and state["optimizer"]["state"][0]["step"] == 8
    assert_equal(state["model"], seen[8][1])
    monkeypatch.undo()
    train(tmp_path, resume="auto", norm_obs=True, **GRAPH)
    assert len(log_of(folder)["losses/value_loss"]) == 6


def test_bad_rollout_is_named(tmp_path, monkeypatch):
    """X3: where a column of the rollout is bad already, it is named, with env and step."""
    original = ppo_graph.collect

    def collect(*args):
        rollout = original(*args)
        rollout.log_probs[7] = -np.inf  # step 2 of env 1
        return rollout

    monkeypatch.setattr(ppo_graph, "collect", collect)
    with pytest.raises(FloatingPointError, match="log_probs of env 1 in step 2 of the rollout: -inf"):
        train(tmp_path, **GRAPH)


@pytest.mark.parametrize("name", ["loss", "gradient"])
@pytest.mark.parametrize("at", [0, 9])
def test_bad_update_is_skipped(name, at, tmp_path, monkeypatch):
    """X3: --skip-nonfinite-updates leaves weights and the optimiser's state untouched by the bad minibatch, also by
    the very first one, and counts it."""
    seen, states = poison(monkeypatch, name, at), []
    original = torch.optim.Adam.step

    def step(self, *args):
        state = lambda: {f"{k} {i}": v.clone() for i, s in enumerate(self.state.values()) for k, v in s.items()}
        before = state()
        original(self, *args)
        states.append((before, state()))

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    folder = train(tmp_path, skip_nonfinite_updates=True, **GRAPH)
    skipped = log_of(folder)["charts/skipped_minibatches"]
    assert [value for _, value in skipped] == [float(at // 4 == k) for k in range(6)]
    assert_equal(seen[at][1], seen[at + 1][1])
    before, after = states[at]
    if at:
        assert_equal(before, after)
    else:
        assert before == {} and not any(value.any() for value in after.values())
    assert any((a != b).any() for a, b in zip(states[-1][0].values(), states[-1][1].values()))
    assert all(value.isfinite().all() for value in weights(folder).values())


@pytest.mark.parametrize("script", ["ppo_lstm_sparse", "ppo_graph", "ppo_gtrxl", "ppo_framestack"])
def test_minibatches_of_nothing(script, tmp_path):
    """X3: observations without a single row give no gradient to some weights; that is no bad number."""
    extra = {"ppo_lstm_sparse": dict(lstm_dim=8), "ppo_gtrxl": dict(dim=8, num_heads=2)}.get(script, {})
    folder = train(tmp_path, script, env_id="Nothing-v0", num_minibatches=3, **extra)
    assert len(log_of(folder)["losses/value_loss"]) == 6


class Nothing(gym.Env):
    """Env 0 shows a graph, the others graphs without nodes."""

    observation_space = spaces.Dict(g=spaces.Graph(vector(2), vector(1)),
                                    node_ids=spaces.Sequence(spaces.Discrete(9), stack=True))
    action_space, num = spaces.Discrete(2), 0

    def reset(self, *, seed=None, options=None):
        self.num = self.num if seed is None else 2 * (seed == 1)
        return self.observe(), {}

    def observe(self):
        graph = spaces.GraphInstance(np.ones((self.num, 2), np.float32), np.ones((self.num, 1), np.float32),
                                     np.zeros((self.num, 2), np.int64))
        return {"g": graph, "node_ids": np.arange(self.num)}

    def step(self, action):
        return self.observe(), 1.0, False, False, {}


gym.register("Nothing-v0", entry_point=Nothing)


# ---- Files that cannot be written ----
def test_run_dir_that_cannot_be_written(tmp_path, monkeypatch, capfd):
    """X3: run_dir is a file for a while: one warning, training goes on, and then all that was pending is written."""
    whole = train(tmp_path / "a", checkpoint_every=2, **GRAPH)
    blocked, original, calls = tmp_path / "b", ppo_graph.update, []
    blocked.write_text("in the way")

    def update(*args):
        calls.append(0)
        if len(calls) == 4:
            blocked.unlink()
        return original(*args)

    monkeypatch.setattr(ppo_graph, "update", update)
    capfd.readouterr()
    folder = train(blocked, checkpoint_every=2, **GRAPH)
    assert capfd.readouterr().err.count("training goes on, and the files will be tried again") == 1
    assert log_of(folder) == log_of(whole)
    assert_equal(weights(folder), weights(whole))
    assert sorted(path.name for path in folder.glob("*.ckpt")) == [
        f"checkpoint_{step:012d}.ckpt" for step in (96, 144)]


@pytest.mark.parametrize("limit, stderr", [(10, "file"), (3000, "pipe"), (20_000, "pipe")])
def test_full_disk(limit, stderr, tmp_path, monkeypatch, capfd):
    """X3: a file that may not grow beyond `limit` bytes (less than the first event, some events, less than a
    checkpoint) stands for a full disk: nothing is lost once there is room, the checkpoint that was due is written at
    the next update, and no file is left half written. stderr may be a file on that disk."""
    whole = train(tmp_path / "a", checkpoint_every=2, **GRAPH)
    original, calls = ppo_graph.update, []

    def update(*args):
        calls.append(0)
        soft = {2: limit, 5: resource.RLIM_INFINITY}.get(len(calls))
        if soft is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
        if len(calls) == 5:
            Path(tmp_path / "files").write_text("\n".join(map(str, (tmp_path / "b").glob("*/*"))))
        return original(*args)

    monkeypatch.setattr(ppo_graph, "update", update)
    read, write = os.pipe()
    process = start(tmp_path / "b", stderr=write if stderr == "pipe" else None, checkpoint_every=2, **GRAPH)
    process.join()
    os.close(write)
    with open(read) as file:
        assert ("training goes on, and the files will be tried again" in file.read()) == (stderr == "pipe")
    assert process.exitcode == 0
    files = (tmp_path / "files").read_text()
    assert "unfinished" not in files and files.count("tfevents") <= 2
    folder = folder_of(tmp_path / "b")
    assert log_of(folder) == log_of(whole)
    assert_equal(weights(folder), weights(whole))
    assert sorted(path.name for path in folder.glob("*.ckpt")) == [
        f"checkpoint_{step:012d}.ckpt" for step in (120, 144)]
    assert not list(folder.glob("*.tmp")) and not list(folder.glob("trial"))


def test_disk_that_stays_full(tmp_path, capfd):
    """X3: the run still ends, with its table on the screen, and says what is lost."""
    tmp_path.joinpath("file").write_text("in the way")
    module, args = args_of(tmp_path / "file", eval_episodes=2, **GRAPH)
    rows = module.main(args)
    out, error = capfd.readouterr()
    assert len(rows) == 2 and "| return |" in out and error.count("cannot write to") == 1
    assert "3 files are lost" not in error and "2 files are lost" in error
