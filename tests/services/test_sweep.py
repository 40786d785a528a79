"""services/sweep.py and services/plot.py: many runs from a folder of one's own, their curves and
their table."""

import csv
import json
import shlex
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from cleanrl_graph.services import plot, sweep

SCRIPT = """
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
    print(*sys.argv[1:])
    if "--learning-rate 2" in " ".join(sys.argv):
        sys.exit("it is out of range")
"""
MINE = """
import gymnasium as gym
import numpy as np

class Mine(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action), True, False, {}

gym.register("Mine-v0", Mine)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A folder of one's own with a script in it, the signals as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_ppo.py").write_text(SCRIPT)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield "mine_ppo.py"
    sys.modules.pop("mine_ppo", None)
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ---- The command of a sweep ----
@pytest.mark.parametrize(
    "words, expected",
    [
        ("--learning-rate 1 3", ["--learning-rate 1", "--learning-rate 3"]),
        ("--no-anneal-lr", ["--no-anneal-lr"]),
        ("--anneal-lr True False", ["--anneal-lr", "--no-anneal-lr"]),
        ("--hidden-dims 8 9", ["--hidden-dims 8 9"]),  # values that stay together
        ("--hidden-dims '8 9' 7", ["--hidden-dims 8 9", "--hidden-dims 7"]),
        ("--learning_rate=1", ["--learning-rate 1"]),
        ("--learning-rate -1", ["--learning-rate -1"]),
    ],
)
def test_choices_of_a_flag(words, expected, script):
    scripts, flags = sweep.words_of([script, *shlex.split(words)])
    assert scripts == [script]
    jobs, _ = sweep.jobs_of(script, sweep.OWN | flags)
    own = ["--seed", "--resume", "--run-dir"]
    found = []
    for job in jobs:
        assert job.command[:2] == [sys.executable, str(Path(script).absolute())]
        assert job.command[-6::2] == own and Path(job.command[-1]) == job.folder
        found.append(" ".join(job.command[2:-6]))
    assert found == expected * 3
    assert [job.command[-5] for job in jobs] == sorted(["1", "2", "3"] * len(expected))


def test_combinations(script):
    """Each value of a flag with each of the others, the first seed of all first; runs and folders
    differ."""
    words = f"{script} --learning-rate 1 3 --anneal-lr True False --env-id m:A-v0 B-v0 --seeds 4 5"
    _, flags = sweep.words_of(words.split())
    jobs, names = sweep.jobs_of(script, sweep.OWN | flags)
    assert len({job.folder for job in jobs}) == len(jobs) == 16
    assert names == ["learning-rate", "anneal-lr", "env-id"]
    assert jobs[0].about == "--learning-rate 1 --anneal-lr --env-id m:A-v0"
    assert sweep.jobs_of("mine_ppo", sweep.OWN | flags)[0] == jobs  # its name is enough
    assert {job.key.split("_s")[0] for job in jobs} == {"mine_ppo_A-v0", "mine_ppo_B-v0"}
    assert ["_s4_" in job.key for job in jobs] == [True] * 8 + [False] * 8


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("mine_ppo.py --lr 1", "--lr: mine_ppo.py has no such flag"),
        ("nowhere.py", "nowhere.py: there is no such script"),
        ("mine_ppo.py --seeds 1 1", "the same run would be made twice"),
        ("--seeds 1", "python -m cleanrl_graph.services.sweep"),
        ("mine_ppo.py --help", "python -m cleanrl_graph.services.sweep"),
    ],
)
def test_wrong_command(words, sentence, script):
    with pytest.raises(SystemExit, match=sentence):
        sweep.main(words.split())


def test_failed_run(script, capsys):
    """The others go on, and only it runs again."""
    words = [script, "--learning-rate", "1", "2", "--seeds", "1", "--workers", "2"]
    assert sweep.main(words) == sweep.FAILED
    out = capsys.readouterr().out
    assert "2 runs in runs, 0 are finished already" in out and "it is out of range" in out
    assert "curves: python -m cleanrl_graph.services.plot runs --by learning-rate" in out
    codes = [path.read_text() for path in sorted(Path("runs").glob("*/exit_code"))]
    assert sorted(codes) == ["0", "1"]
    assert sweep.main(words) == sweep.FAILED
    assert "2 runs in runs, 1 are finished already" in capsys.readouterr().out


def test_sweep_and_curves_of_an_own_environment(script, tmp_path, capsys):
    """A script of the package by its name, with a module of the current folder; then curves, by the
    flags that differ."""
    Path("mine.py").write_text(MINE)
    words = "ppo_graph --env-id mine:Mine-v0 --seeds 1 --learning-rate 1e-3 1e-2 --workers 2"
    words += " --total-timesteps 256 --num-steps 32 --hidden-dims 8 8 --eval-episodes 1 --no-cuda"
    assert sweep.main(words.split()) == 0
    assert "0 runs are left, 0 failed" in capsys.readouterr().out
    for path in Path("runs").glob("*/*/args.json"):
        assert json.loads(path.read_text())["hidden_dims"] == [8, 8]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "start", lambda *_: pytest.fail("a finished run was started"))
        assert sweep.main(words.split()) == 0
    runs = plot.find(["runs"], 100)
    assert [run.steps[-1] for run in runs] == [256, 256]
    curves = plot.curves_of(runs, [])
    labels = {("mine:Mine-v0", f"learning_rate {rate}") for rate in (0.001, 0.01)}
    assert set(curves) == labels == set(plot.curves_of(runs, ["--learning-rate"]))


# ---- Curves ----
def made_run(folder, returns, steps=10, **flags):
    """A run whose episodes have these returns, one after every `steps` steps and second."""
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.1").touch()
    flags = {"env_id": "m:E-v0", "seed": 1, "learning_rate": 0.1, "track": False} | flags
    (folder / "args.json").write_text(json.dumps(flags))
    rows = [f"{(k + 1) * steps},{k + 1}.00,{ret},{steps},," for k, ret in enumerate(returns)]
    text = "step,seconds,return,length,group,task"
    (folder / "episodes.csv").write_text("\n".join([text, *rows]) + "\n")


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


def test_by_one_flag(tmp_path, capsys):
    """Runs that differ otherwise are one curve, which is said; runs of two environments are not."""
    for k, (rate, gamma) in enumerate([(1, 0.9), (1, 0.8), (2, 0.9)]):
        made_run(tmp_path / f"{k}", [1, 2], learning_rate=rate, gamma=gamma)
    made_run(tmp_path / "3", [1, 2], env_id="F-v0", learning_rate=3, gamma=0.9)
    runs = plot.find([str(tmp_path)], 100)
    assert plot.differing(runs) == ["gamma", "learning_rate"]
    curves = plot.curves_of(runs, ["gamma"])
    assert {key: len(own) for key, own in curves.items()} == {
        ("m:E-v0", "gamma 0.9"): 2,
        ("m:E-v0", "gamma 0.8"): 1,
        ("F-v0", "gamma 0.9"): 1,
    }
    assert capsys.readouterr().err == "m:E-v0, gamma 0.9: its runs differ in learning_rate\n"
    assert len(plot.curves_of(runs, [])) == 4 and capsys.readouterr().err == ""
    with pytest.raises(SystemExit, match="--by lr: .* no such flag; the runs differ in gamma, lea"):
        plot.curves_of(runs, ["lr"])


def test_tasks_are_told_apart(tmp_path, capsys):
    """Runs with other arguments of the environment, or other wrappers, are never one curve. Other
    versions of packages make no other curve."""
    tasks = [({"jobs": 3}, []), ({"jobs": 9}, []), ({"jobs": 3}, ["hide:1"]), ({"jobs": 3}, [])]
    for k, (kwargs, wrap) in enumerate(tasks):
        more = dict(seed=k, commit=f"{k}", versions={"torch": f"2.{k}"})
        made_run(tmp_path / f"{k}", [1], env_kwargs=kwargs, wrap=wrap, **more)
    runs = plot.find([str(tmp_path)], 100)
    curves = plot.curves_of(runs, ["learning_rate"])
    assert {label: len(own) for (_, label), own in curves.items()} == {
        "env_kwargs {'jobs': 3}, wrap [], learning_rate 0.1": 2,
        "env_kwargs {'jobs': 9}, wrap [], learning_rate 0.1": 1,
        "env_kwargs {'jobs': 3}, wrap ['hide:1'], learning_rate 0.1": 1,
    }
    assert capsys.readouterr().err == ""


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
    made_run(tmp_path / "empty", [])
    with pytest.raises(SystemExit, match="there is no run with an episode in"):
        plot.find([str(tmp_path)], 100)
    assert f"{tmp_path}/empty: no episode has ended" in capsys.readouterr().err
    (tmp_path / "empty" / "args.json").write_text('{"total_timesteps": 0}')  # of an evaluation
    with pytest.raises(SystemExit, match="there is no run with an episode in"):
        plot.find([str(tmp_path)], 100)
    assert capsys.readouterr().err == ""


def test_picture_of_many(tmp_path, monkeypatch):
    """Each panel has its curves against steps and seconds with their bands, lines where they were
    asked for, and the note below."""
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **kwargs: saved.append(figure))
    runs = {}
    for panel in ("A", "B"):
        for label in ("one", "two"):
            folders = [tmp_path / panel / label / str(seed) for seed in (1, 2)]
            for seed, folder in enumerate(folders, 1):
                made_run(folder, np.arange(5) * seed, seed=seed)
            runs[panel, label] = plot.find(map(str, folders), 1)
    lines = ((3.0, "target", "A"), (1.0, "random", None))
    look = plot.Look("points", note="what it shows", lines=lines)
    plot.draw(tmp_path / "a.png", runs, plot.around_mean, look)
    (figure,) = saved
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["A", "", "B", ""]
    for k, axis in enumerate(figure.axes):
        assert axis.get_xlabel().startswith(("environment steps", "seconds")[k % 2])
        assert len(axis.collections) == 2 and len(axis.lines) == 2 + (2 if k < 2 else 1)
        assert [line.get_ydata()[-1] for line in axis.lines[:2]] == [6, 6]  # mean of 4 and 8
        band = axis.collections[0].get_datalim(axis.transData)
        assert band.y1 == pytest.approx(6 + 8**0.5)
    assert figure.axes[0].get_ylabel() == "points" and figure._supxlabel.get_text() == look.note
    names = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert names == ["target", "random", "random"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]


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
"""


def test_sweep_of_a_small_script(script):
    """x_mini.py has neither --run-dir nor --resume: it runs in the run's folder, and finds modules
    of this one; what a stopped run has left is gone."""
    Path("x_mini.py").write_text(MINI)
    Path("mine.py").touch()
    words = ["x_mini", "--gamma", "0.8", "0.9", "--seeds", "1"]
    scripts, flags = sweep.words_of(words)
    jobs, _ = sweep.jobs_of(*scripts, sweep.OWN | flags)
    (jobs[0].folder / "runs").mkdir(parents=True)
    assert sweep.main(words) == 0
    for job, gamma in zip(jobs, ("0.8", "0.9")):
        given = (job.folder / "runs" / "given").read_text()
        assert given == f"--gamma {gamma} --seed 1" and sweep.is_finished(job)


def test_order_of_flags(script):
    """The same runs by flags in another order, or with "_" and "=": they are finished already."""
    keys = []
    for words in ("--learning-rate 1 --hidden-dims 8 9", "--hidden_dims 8 9 --learning_rate=1"):
        scripts, flags = sweep.words_of(["mine_ppo.py", *words.split()])
        keys.append([job.key for job in sweep.jobs_of(*scripts, sweep.OWN | flags)[0]])
    assert keys[0] == keys[1] and len(set(keys[0])) == 3
