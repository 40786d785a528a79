"""services/checkpoint.py, the checkpoints of a run, its folder, and its environments as pickles
that were tried."""

import io
import os
import random
import signal
import time
from dataclasses import dataclass, replace

import cloudpickle
import gymnasium as gym
import helpers
import numpy as np
import pytest
import torch
import walks
from gymnasium.wrappers import TimeLimit
from processes import FORK, full_disk

from cleanrl_graph.envs import fitting
from cleanrl_graph.services import checkpoint

SCRIPT = "test_checkpoint"


@dataclass
class Args:
    run_dir: str
    resume: str = "auto"
    env_id: str = "CartPole-v1"
    exp_name: str = "test_checkpoint"
    num_envs: int = 4
    num_workers: int = 0
    learning_rate: float = 0.5
    hidden_dims: tuple = (8,)
    total_timesteps: int = 100
    checkpoint_every: int = 1
    cuda: bool = True
    amsgrad: bool = False


def run_of(args, name, *steps, **state):
    """The folder of a run that wrote checkpoints at these steps, a second apart from those of
    earlier runs."""
    folder = os.path.join(args.run_dir, name)
    with checkpoint.Folder(folder) as run:
        for step in steps:
            known = {"script": SCRIPT, "args": vars(args), "ranks": [None], "step": step}
            run.save(step, known | state)
    return folder


def find(args, prefix):
    """What a script of that name finds."""
    return checkpoint.find(args, SCRIPT, prefix)


def paths_in(folder):
    return sorted(os.listdir(folder))


# ---- Finding ----
def test_state_comes_back(tmp_path):
    """Tensors, arrays of any dtype, bytes and nested values are as they were."""
    args = Args(str(tmp_path), resume=str(tmp_path / "run"))
    plain = {"envs": [b"pickle", None], "pair": (1, 2)}
    saved = plain | {"model": {"w": torch.arange(3.0)}, "keys": np.array([2**60, -1])}
    run_of(args, "run", 12, **saved)
    folder, state = find(args, "")
    assert folder == args.resume and paths_in(folder) == ["checkpoint_000000000012.ckpt", "lock"]
    assert torch.equal(state["model"]["w"], saved["model"]["w"])
    assert state["keys"].dtype == np.int64 and (state["keys"] == saved["keys"]).all()
    assert {name: state[name] for name in plain} == plain


def saved_as(**state):
    """The bytes of another checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def flipped(data):
    """With another bit in its largest array."""
    at = data.index(np.arange(1000.0).tobytes()) + 4000
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "flipped bit": flipped,
    "another format": lambda data: saved_as(format="cleanrl_graph-checkpoint-3"),
}
HOW = [(damage, "auto") for damage in DAMAGE] + [("truncated", how) for how in ("folder", "file")]


@pytest.mark.parametrize("damage, how", HOW)
def test_damaged_checkpoint(damage, how, tmp_path, capsys):
    """The one before it is taken, with a line that says so; no file gets another name. Without one:
    an error."""
    args = Args(str(tmp_path))
    folder = run_of(args, "run", 100, 200, large=torch.arange(1000.0, dtype=torch.float64))
    path = tmp_path / "run" / "checkpoint_000000000200.ckpt"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    args.resume = {"auto": "auto", "folder": folder, "file": str(path)}[how]
    before = paths_in(folder)
    assert find(args, "run")[1]["step"] == 100
    assert f"{path} is left out" in capsys.readouterr().err and paths_in(folder) == before
    os.remove(path.with_name("checkpoint_000000000100.ckpt"))
    with pytest.raises(SystemExit, match="there is no checkpoint that can be read"):
        find(args, "run")


def test_auto(tmp_path, capsys):
    """The run with this prefix whose checkpoint is the newest; folders without one do not count."""
    args = Args(str(tmp_path / "runs[1]"))
    assert find(args, "a__") is None
    assert "--resume auto: no checkpoint of a__* in" in capsys.readouterr().err
    for k, name in enumerate(["a__2", "a__1", "b__3"]):
        path = os.path.join(run_of(args, name, k), f"checkpoint_{k:012d}.ckpt")
        os.utime(path, (1000 + k, 1000 + k))
    run_of(args, "a__9")
    assert find(args, "a__")[0] == os.path.join(args.run_dir, "a__1")
    path = os.path.join(args.run_dir, "a__1", "checkpoint_000000000001.ckpt")
    assert capsys.readouterr().out == f"--resume auto: goes on from {path}\n"


def test_file(tmp_path):
    """A file is that one or an older one, whatever is newer; what is no checkpoint is refused."""
    args = Args(str(tmp_path))
    folder = run_of(args, "run", 1, 2)
    older = replace(args, resume=f"{folder}/checkpoint_000000000001.ckpt")
    assert find(older, "")[1]["step"] == 1
    (tmp_path / "run" / "checkpoint_000000000001.ckpt").write_bytes(b"")
    with pytest.raises(SystemExit, match="there is no checkpoint that can be read"):
        find(older, "")
    (tmp_path / "run" / "model.pt").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name in ("run/model.pt", "run/checkpoint_000000000003.ckpt", "missing", "empty"):
        words = f"--resume {tmp_path / name}: auto, a folder with checkpoints or"
        with pytest.raises(SystemExit, match=words):
            find(replace(args, resume=str(tmp_path / name)), "")


def test_flags_that_are_refused(tmp_path, capsys):
    """One that the checkpoint does not know, unless it is None. What the saved state does not fit
    is refused for a folder and a file, too. Environments of other ranks are shared out, and it is
    said."""

    @dataclass
    class More(Args):
        target_kl: float | None = None
        noise: float = 0.1

    args = Args(str(tmp_path))
    folder = run_of(args, "run", 1)
    with pytest.raises(SystemExit, match="other flags: --noise 0.1, it was None. Give"):
        find(More(str(tmp_path)), "run")

    different = {"env_id": "Other-v0", "num_envs": 5, "num_workers": 1, "amsgrad": True}
    for name, value in different.items():
        with pytest.raises(SystemExit) as error:
            find(replace(args, resume=folder, **{name: value}), "run")
        flag = f"--{name.replace('_', '-')} {value}, it was {getattr(args, name)}"
        assert flag in str(error.value) and "to go on with these" not in str(error.value)
    other = replace(args, run_dir=str(tmp_path / "other"))
    folder = run_of(other, "run", 1, script="ppo_gtrxl")
    with pytest.raises(SystemExit, match="--script test_checkpoint, it was ppo_gtrxl"):
        find(replace(other, resume=folder), "run")
    ranks = Args(str(tmp_path / "ranks"), num_envs=3)
    run_of(ranks, "run", 1, ranks=[None, None])
    find(ranks, "run")
    assert ranks.num_envs == 6
    assert "environments are 1 x 6, they were 2 x 3" in capsys.readouterr().err


# ---- The folder of a run ----
def test_checkpoints_that_are_kept(tmp_path):
    """The newest two, also where the last step is saved once more. A run that went back to step 100
    keeps its own; the later ones stay under another name."""
    args, names = Args(str(tmp_path)), lambda *steps: [f"checkpoint_{n:012d}.ckpt" for n in steps]
    assert paths_in(run_of(args, "a", 10, 20, 30, 30)) == [*names(20, 30), "lock"]
    folder = run_of(args, "run", 100, 200)
    run_of(args, "run", 150)
    assert paths_in(folder) == [*names(100, 150), *(f"{x}.unused" for x in names(200)), "lock"]
    assert find(args, "run")[1]["step"] == 150


def test_folder_that_cannot_be_made_or_written(tmp_path):
    """An error before the first step: a file in the way, a file system that refuses, a full disk;
    later the checkpoints that there are stay, and nothing half written does."""
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "read-only").mkdir(mode=0o500)
    refusing = tmp_path / "read-only"
    if os.access(refusing, os.W_OK):  # root may write
        refusing = "/proc"
    words = "cannot write to the folder of the run .*--run-dir.*Errno"
    for folder in (tmp_path / "file", tmp_path / "file" / "run", f"{refusing}/run"):
        with pytest.raises(SystemExit, match=words):
            checkpoint.Folder(str(folder))
    words = "cannot write to the folder .*File too large"
    with full_disk(1000), pytest.raises(SystemExit, match=words):
        checkpoint.Folder(str(tmp_path / "other"))
    args = Args(str(tmp_path))
    folder = run_of(args, "run", 100, 200)
    before = paths_in(folder)
    with pytest.raises(SystemExit, match=r"cannot write .*checkpoint_000000000150.ckpt: \[Errno"):
        with checkpoint.Folder(folder) as run, full_disk(20_000):
            run.save(150, {"script": "", "args": {}, "model": torch.zeros(10_000)})
    assert paths_in(folder) == before and find(args, "run")[1]["step"] == 200


def hold(folder, pipe):
    """A run with a worker process, both of which wait."""
    checkpoint.Folder(folder)
    worker = FORK.Process(target=time.sleep, args=(60,))
    worker.start()
    pipe.send(worker.pid)
    time.sleep(60)


def test_lock_ends_with_its_process(tmp_path):
    """Another run is refused, of this process or another one; after kill -9 the folder is free,
    even while a worker of the dead run lives on."""
    folder, (mine, its) = str(tmp_path / "run"), FORK.Pipe()
    with checkpoint.Folder(folder):
        with pytest.raises(SystemExit, match=f"another process writes to {folder}"):
            checkpoint.Folder(folder)
    process = FORK.Process(target=hold, args=(folder, its))
    process.start()
    worker = mine.recv()
    try:
        with pytest.raises(SystemExit, match="another process writes"):
            checkpoint.Folder(folder)
        process.kill()
        process.join()
        with checkpoint.Folder(folder):
            os.kill(worker, 0)  # it is there
    finally:
        os.kill(worker, signal.SIGKILL)


def test_marks(tmp_path):
    """An exception leaves a mark, which the next run sees and its first checkpoint removes; Ctrl-C
    leaves none."""
    folder, seen = str(tmp_path / "run"), []
    burns = ValueError("frames of an environment\nenv 3, step 7: it burns")
    for error in (burns, RuntimeError(), KeyboardInterrupt(), SystemExit(143)):
        with pytest.raises(type(error)), checkpoint.Folder(folder) as run:
            seen.append(run.failures)
            raise error
    said = (tmp_path / "run" / "failed").read_text()
    assert seen == [0, 1, 2, 2] and said.startswith("env 3, step 7: it burns\n")
    with checkpoint.Folder(folder) as run:
        run.save(1, {})
        assert run.failures == 2
    with checkpoint.Folder(folder) as run:
        assert run.failures == 0


# ---- Environments ----
@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(checkpoint, "inexact", set())
    monkeypatch.setattr(fitting.SAID, "lines", set())


class DrawsWhenLoaded(walks.OwnGenerators):
    """Draws from the global generators, when a copy is loaded, too."""

    def draw(self):
        return np.random.random() + random.random() + torch.rand(()).item()

    def __setstate__(self, state):
        vars(self).update(state)
        self.draw()


def dump_envs(envs):
    """What a checkpoint has of environments."""
    return checkpoint.exact_dumps(checkpoint.dump_envs(envs))


def play(env, steps):
    """What comes back from each of these steps, with the reset after an episode's end, as text that
    tells each bit."""
    results = []
    for t in steps:
        obs, reward, terminated, truncated, _ = env.step(t % 2)
        results.append([repr(obs), float(reward).hex(), terminated, truncated])
        if terminated or truncated:
            results[-1].append(repr(env.reset()[0]))
    return results


def begun(make):
    """The environment after 5 steps, from the same random states."""
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    env = make()
    env.reset(seed=1)
    play(env, range(5))
    return env


EXACT = {
    "generators of its own": walks.OwnGenerators,
    "draws when loaded": DrawsWhenLoaded,
    "nested observations": walks.Nested,
    "wrapped": lambda: gym.wrappers.TransformReward(TimeLimit(walks.Walk(), 9), lambda r: r + 1),
}


@pytest.mark.parametrize("kind", EXACT)
def test_exact_copies(kind, capsys):
    """What was dumped at any moment goes on bit by bit as its original did, also what was dumped
    while the copy was tried. Neither the dumps nor the trial change what the environment does."""
    expected = play(begun(EXACT[kind]), range(5, 85))
    envs, results, dumps = [begun(EXACT[kind])], [], []
    for start in range(5, 85, 10):
        dumps.append((dump_envs(envs)[0], checkpoint.random_state()))
        results += play(envs[0], range(start, start + 10))
    assert results == expected and len({str(result) for result in expected}) > 40
    for k, (data, state) in enumerate(dumps):
        copy = cloudpickle.loads(data)
        of_other_devices = {"cuda": [None] * (torch.cuda.device_count() + 1)}  # they do no harm
        checkpoint.set_random_state(state | of_other_devices)
        assert play(copy, range(5 + 10 * k, 85)) == expected[10 * k :]
    assert capsys.readouterr().err == ""


OTHER, FAILS = "a copy returns another {} in the next step", "a copy fails in the next {}"
INEXACT = {
    "observation": (lambda: walks.Odd("observation"), OTHER.format("observation")),
    "a later step": (lambda: walks.Odd("reward", 16), OTHER.format("reward")),
    "EzPickle": (walks.Lossy, FAILS.format("step: AttributeError")),
    "left out": (walks.LeftOut, "its exact_resume is False"),
    "load": (lambda: walks.Odd("load"), FAILS.format("load: KeyError: 'what is missing'")),
    "pickle": (
        lambda: walks.Odd("pickle"),
        "no copy can be made of it: TypeError: I hold a simulator",
    ),
}


@pytest.mark.parametrize("kind", INEXACT)
def test_inexact_copies(kind, capsys):
    """An environment whose copy is not as it was is not dumped, and stderr says so once; it goes on
    undisturbed."""
    make, sentence = INEXACT[kind]
    expected = play(begun(make), range(5, 35))
    envs = [begun(make), begun(make)]
    first = dump_envs(envs)
    results = [play(env, range(5, 35)) for env in envs]
    assert dump_envs(envs) == dump_envs(envs) == [None, None]
    assert (first == [None, None]) == (kind in ("pickle", "left out", "load"))
    written = capsys.readouterr().err
    name = type(envs[0].unwrapped).__name__
    start = f"{name}: it begins a new episode when the run is resumed, since {sentence}"
    assert written.startswith(start) and written.count("\n") == 1
    assert results == [expected] * 2
    play(envs[0], range(35, 80))
    assert dump_envs(envs) == [None, None] and capsys.readouterr().err == ""


def test_trusted_copies(capsys):
    """exact_resume = True: no copy is tried, although this one would differ."""
    envs = [begun(lambda: walks.Trusted("reward"))]
    for _ in range(2):
        assert dump_envs(envs) != [None] and capsys.readouterr().err == ""
        play(envs[0], range(5, 35))


def test_who_begins_anew():
    """An environment that is in no checkpoint begins an episode, and its memory is told so; the one
    beside it goes on in the midst of its own."""
    makers = [walks.Walk, walks.LeftOut]
    envs = helpers.make_envs(makers)
    envs.reset(1)
    for _ in range(5):
        envs.step([0, 0])
    state = checkpoint.env_state(envs)
    state["envs"] = checkpoint.exact_dumps(state["envs"])
    resumed = helpers.make_envs(makers)
    _, begins = checkpoint.restore_envs(state, 7, resumed)
    assert begins.tolist() == [False, True]
    assert [env.unwrapped.t for env in resumed.envs] == [5, 0]
