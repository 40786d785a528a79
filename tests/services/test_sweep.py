"""services/sweep.py and services/plot.py: many runs from a folder of one's own, their curves and
their table."""

import csv
import json
import os
import shlex
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from cleanrl_graph.services import plot, sweep

SCRIPT = """
import os
import sys
from dataclasses import dataclass

@dataclass
class Args:
    env_id: str = "Nothing-v0"
    seed: int = 1
    run_dir: str = "runs"
    learning_rate: float = 1e-3
    anneal_lr: bool = True
    hidden_dims: tuple[int, ...] = (8,)

if __name__ == "__main__":
    print(os.environ["OMP_NUM_THREADS"], *os.sched_getaffinity(0))
    if "--learning-rate 2" in " ".join(sys.argv):
        sys.exit("it is out of range")
"""
MINE = """
import gymnasium as gym

gym.register("Mine-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=50)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A folder of one's own with a script in it, the signals as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_ppo.py").write_text(SCRIPT)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield "mine_ppo.py"
    for number, handler in handlers.items():
        signal.signal(number, handler)


def jobs_of(words):
    """The jobs of a command, and the flags that have several values."""
    (script,), flags = sweep.words_of(shlex.split(words))
    return sweep.jobs_of(script, sweep.OWN | flags)


# ---- The command of a sweep ----
@pytest.mark.parametrize(
    "words, expected",
    [
        ("--learning-rate 1 -3", ["--learning-rate 1", "--learning-rate -3"]),
        ("--no-anneal-lr --learning_rate=1", ["--no-anneal-lr --learning-rate 1"]),
        ("--anneal-lr True False", ["--anneal-lr", "--no-anneal-lr"]),
        ("--hidden-dims 8 9 --wrap a b", ["--hidden-dims 8 9 --wrap a b"]),  # stay together
        ("--hidden-dims '8 9' 7", ["--hidden-dims 8 9", "--hidden-dims 7"]),
    ],
)
def test_choices_of_a_flag(words, expected, script):
    jobs, _ = jobs_of(f"{script} {words} --seeds 4")
    assert [" ".join(job.command[2:-6]) for job in jobs] == expected
    assert not [word for job in jobs for word in job.command[2:-6] if " " in word]
    for job in jobs:
        assert job.command[:2] == [sys.executable, str(Path(script).absolute())]
        own = ["--seed", "4", "--resume", "auto", "--run-dir", str(job.folder)]
        assert job.command[-6:] == own


def test_combinations(script):
    """Each value of a flag with each of the others, the first seed of all first; runs and folders
    differ. In another order of flags they are the same runs."""
    words = "--learning-rate 1 3 --anneal-lr True False --env-id m:A-v0 B-v0"
    jobs, names = jobs_of(f"{script} {words} --seeds 4 5")
    assert len({job.folder for job in jobs}) == len(jobs) == 16
    assert names == ["learning-rate", "anneal-lr", "env-id"]
    assert jobs[0].about == "--learning-rate 1 --anneal-lr --env-id m:A-v0"
    assert {job.key.split("_s")[0] for job in jobs} == {"mine_ppo_A-v0", "mine_ppo_B-v0"}
    assert ["_s4_" in job.key for job in jobs] == [True] * 8 + [False] * 8
    words = "--seeds 5 4 --env-id B-v0 m:A-v0 --anneal-lr False True --learning-rate 3 1"
    again, _ = jobs_of(f"mine_ppo {words}")  # its name is enough
    assert {job.key for job in again} == {job.key for job in jobs}


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("mine_ppo.py --lr 1", "--lr: mine_ppo.py has no such flag"),
        ("nowhere.py", "nowhere.py: there is no such script"),
        ("mine_ppo.py --help", "python -m cleanrl_graph.services.sweep"),
    ],
)
def test_wrong_command(words, sentence, script):
    with pytest.raises(SystemExit, match=sentence):
        sweep.main(words.split())


def test_failed_run(script, capsys):
    """The others go on, and only it runs again. Each run has one thread on its own cores."""
    words = [script, "--learning-rate", "1", "2", "--seeds", "1", "--workers", "2"]
    assert sweep.main(words) == sweep.FAILED
    out = capsys.readouterr().out
    assert "2 runs in runs, 0 are finished already" in out and "it is out of range" in out
    assert "curves: python -m cleanrl_graph.services.plot runs --by learning-rate" in out
    codes = [path.read_text() for path in sorted(Path("runs").glob("*/exit_code"))]
    assert sorted(codes) == ["0", "1"]
    threads, cores = zip(*[p.read_text().split(" ", 1) for p in Path("runs").glob("*/stdout.txt")])
    assert threads == ("1", "1")
    assert len(set(cores)) == min(2, len(os.sched_getaffinity(0)))
    assert sweep.main(words) == sweep.FAILED
    assert "2 runs in runs, 1 are finished already" in capsys.readouterr().out


def test_sweep_of_an_own_environment(script, capsys):
    """A script of the package by its name, with a module of the current folder."""
    Path("mine.py").write_text(MINE)
    words = "ppo_graph --env-id mine:Mine-v0 --seeds 1 --learning-rate 1e-2 --no-cuda"
    words += " --total-timesteps 256 --num-steps 32 --hidden-dims 8 8 --eval-episodes 1"
    assert sweep.main(words.split()) == 0
    assert "0 runs are left, 0 failed" in capsys.readouterr().out
    (run,) = plot.find(["runs"], 100)
    assert 0 < run.steps[-1] <= 256 and run.flags["hidden_dims"] == [8, 8]
    assert run.flags["learning_rate"] == 0.01


MINI = """
import sys
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Args:
    env_id: str = "mine:Mine-v0"
    seed: int = 1
    gamma: float = 0.9

if __name__ == "__main__":
    import mine
    Path("runs").mkdir()
    Path("runs/given").write_text(" ".join(sys.argv[1:]))
    Path("runs/E-v0__x_mini__1__7").mkdir()
    Path("runs/E-v0__x_mini__1__7/events.out.tfevents.1").touch()
"""


def test_sweep_of_a_small_script(script):
    """x_mini.py has neither --run-dir nor --resume: it runs in the run's folder, and finds modules
    of this one; what a stopped run has left is gone."""
    Path("x_mini.py").write_text(MINI)
    Path("mine.py").touch()
    words = "x_mini --gamma 0.8 0.9 --seeds 1"
    jobs, _ = jobs_of(words)
    (jobs[0].folder / "runs").mkdir(parents=True)
    assert sweep.main(words.split()) == 0
    for job, gamma in zip(jobs, ("0.8", "0.9")):
        given = (job.folder / "runs" / "given").read_text()
        assert given == f"--gamma {gamma} --seed 1" and sweep.is_finished(job)
        flags = plot.flags_of(job.folder / "runs" / "E-v0__x_mini__1__7")
        assert flags["gamma"] == gamma and flags["env_id"] == "E-v0" and flags["seed"] == "1"


# ---- Curves ----
def made_run(folder, returns, steps=10, **flags):
    """A run whose episodes have these returns, one after every `steps` steps and second."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.out.tfevents.1").touch()
    flags = {"env_id": "m:E-v0", "seed": 1, "learning_rate": 0.1, "track": False} | flags
    (folder / "args.json").write_text(json.dumps(flags))
    rows = [f"{(k + 1) * steps},{k + 1}.00,{ret},{steps},," for k, ret in enumerate(returns)]
    text = "step,seconds,return,length,group,task"
    (folder / "episodes.csv").write_text("\n".join([text, *rows]) + "\n")


def test_a_run_that_ended_earlier_is_named(tmp_path, capsys):
    made_run(tmp_path / "a", [1.0] * 20)
    made_run(tmp_path / "b", [2.0] * 5, seed=2)
    plot.curves_of(plot.find([str(tmp_path)], 100), ())
    assert "b: ends at step 50 of 200, its last value counts on" in capsys.readouterr().err


def curves_csv(folder):
    with open(folder / "curves.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_mean_and_deviation_over_seeds(tmp_path, capsys):
    """Of two seeds and two learning rates, by hand: the mean of the last two episodes, after each
    step and second. The deviation is that of a sample; one run has none. The picture is there."""
    made_run(tmp_path / "a/1", [0, 2, 4], seed=1)
    made_run(tmp_path / "a/2", [2, 4, 10], seed=2, track=True)
    made_run(tmp_path / "b/1", [5, 5, 5], learning_rate=0.2)
    out = tmp_path / "out"
    plot.main(plot.Args(runs=(str(tmp_path),), episodes=2, out=str(out)))
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = curves_csv(out)
    assert len(rows) == 2 * 2 * len({row["x"] for row in rows if row["axis"] == "steps"})
    own = [row for row in rows if row["curve"] == "learning_rate 0.1" and row["axis"] == "steps"]
    assert {row["env_id"] for row in rows} == {"m:E-v0"} and {row["runs"] for row in own} == {"2"}
    at = {float(row["x"]): (float(row["mean"]), float(row["deviation"])) for row in own}
    one = pytest.approx(2**0.5, rel=1e-5)  # of values that differ by 2
    assert at[10] == (1, one) and at[20] == (2, one) and at[29.8] == (2, one)
    assert at[30] == (5, pytest.approx(8**0.5, rel=1e-5))
    last = [row for row in rows if row["axis"] == "seconds"][-1]
    assert float(last["x"]) == 3 and (last["mean"], last["deviation"]) == ("5", "")
    assert last["curve"] == "learning_rate 0.2"
    table = (out / "table.md").read_text()
    assert table.strip() in capsys.readouterr().out
    assert "| m:E-v0 | learning_rate 0.1 | 2 | 30 | 3 | 5 ± 2.8 |" in table
    assert "| m:E-v0 | learning_rate 0.2 | 1 | 30 | 3 | 5 |" in table


def test_grid_of_a_curve():
    """It begins where all its runs have a mean. One that ends earlier keeps its last."""
    pairs = [([5, 20], [1, 2]), ([10, 15], [3, 4])]
    runs = [plot.Run(None, {}, *map(np.array, (steps, steps, means))) for steps, means in pairs]
    grid, rows = plot.on_grid(runs, "steps")
    assert 10 <= grid[0] < 10.2 and rows[:, 0].tolist() == [1, 3]
    assert grid[-1] == 20 and rows[:, -1].tolist() == [2, 4]


def test_which_runs_are_one_curve(tmp_path, capsys):
    """Those that are alike in the flags of --by, or in all; in which others they differ is said.
    Runs of other environments, arguments of them or wrappers are never one curve. Versions of
    packages make no other curve."""

    def sizes(by=()):
        curves = plot.curves_of(plot.find([str(tmp_path)], 100), by)
        return {key: len(own) for key, own in curves.items()}

    for k, (rate, gamma) in enumerate([(1, 0.9), (1, 0.8), (2, 0.9), (2, 0.9)]):
        more = dict(seed=k, commit=f"{k}", versions={"torch": f"2.{k}"}, num_envs=4)
        made_run(tmp_path / f"{k}", [1, 2], learning_rate=rate, gamma=gamma, **more)
    made_run(tmp_path / "4", [1, 2], env_id="F-v0", learning_rate=3, gamma=0.9, num_envs=8)
    names = {"m:E-v0, gamma 0.8": 1, "m:E-v0, gamma 0.9": 3, "F-v0, gamma 0.9": 1}
    assert {", ".join(key): num for key, num in sizes(["--gamma"]).items()} == names
    assert capsys.readouterr().err == "m:E-v0, gamma 0.9: its runs differ in learning_rate\n"
    assert sorted(sizes().values()) == [1, 1, 1, 2] and capsys.readouterr().err == ""
    with pytest.raises(SystemExit, match="--by lr: .* no such flag; the runs differ in .*rate$"):
        sizes(["lr"])
    for k, kwargs in enumerate([{"jobs": 3}, {"jobs": 9}]):
        made_run(tmp_path / f"task {k}", [1], env_id="G-v0", env_kwargs=kwargs)
    assert [key for key in sizes(["learning_rate"]) if key[0] == "G-v0"] == [
        ("G-v0", "env_kwargs {'jobs': 3}, learning_rate 0.1"),
        ("G-v0", "env_kwargs {'jobs': 9}, learning_rate 0.1"),
    ]


def test_run_of_a_script_alone(tmp_path):
    """Without services: the log of TensorBoard, and the name of the folder."""
    folder = tmp_path / "CartPole-v1__my_ppo__3__123"
    with SummaryWriter(folder) as writer:
        for step in (5, 9):
            writer.add_scalar("charts/episodic_return", 2.0 * step, step, walltime=100 + step)
            writer.add_scalar("charts/episodic_length", step, step, walltime=100 + step)
    (run,) = plot.find([str(folder)], 1)
    assert run.flags == {"env_id": "CartPole-v1", "exp_name": "my_ppo", "seed": "3"}
    assert run.steps.tolist() == [5, 9] and run.means.tolist() == [10, 18]
    assert run.seconds.tolist() == [0, 4]


def test_nothing_to_plot(tmp_path, capsys):
    """A run without episodes is said, unless it was an evaluation alone."""
    for flags, err in (({}, f"{tmp_path}/a: no episode has ended\n"), ({"total_timesteps": 0}, "")):
        made_run(tmp_path / "a", [], **flags)
        with pytest.raises(SystemExit, match="there is no run with an episode in"):
            plot.find([str(tmp_path)], 100)
        assert capsys.readouterr().err == err


def test_bands(tmp_path, monkeypatch):
    """Each panel has its curves against steps and seconds, with the deviation around the mean."""
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **kwargs: saved.append(figure))
    for seed in (1, 2):
        made_run(tmp_path / str(seed), np.arange(5) * seed, seed=seed)
    runs = plot.find([str(tmp_path)], 1)
    curves = {("A", label): runs for label in ("one", "two")}
    plot.draw(tmp_path / "a.png", curves, plot.around_mean, plot.Look("points"))
    (figure,) = saved
    assert len(figure.axes) == 2
    for axis in figure.axes:
        assert [line.get_ydata()[-1] for line in axis.lines[:2]] == [6, 6]  # mean of 4 and 8
        band = axis.collections[0].get_datalim(axis.transData)
        assert band.y1 == pytest.approx(6 + 8**0.5)
