"""benchmark/run.py (queue, restart, what a run leaves), fingerprint.py, report.py, the tables of
job shops and DagSchedule, cp_sat.py, and the commands of all tables, whose flags scripts have."""

import contextlib
import csv
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
import tyro
from PIL import Image
from processes import wait_for
from torch.utils.tensorboard import SummaryWriter

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmark"
sys.path[:0] = [
    str(BENCHMARK),
    *(str(BENCHMARK / name) for name in ("speed", "peers", "pogema", "traffic")),
]
import beside  # noqa: E402
import cp_sat  # noqa: E402
import dag_schedule  # noqa: E402
import delays  # noqa: E402
import film  # noqa: E402
import fingerprint  # noqa: E402
import flexible_job_shop  # noqa: E402
import graph_context  # noqa: E402
import job_shop  # noqa: E402
import public_tasks  # noqa: E402
import raw_data  # noqa: E402
import report  # noqa: E402
import routes  # noqa: E402
import run  # noqa: E402
import schedules  # noqa: E402
import scores  # noqa: E402
import tables  # noqa: E402
import third_party  # noqa: E402
import vertex_cover  # noqa: E402
import zoo  # noqa: E402

from cleanrl_graph.envs.pogema import PogemaEnv  # noqa: E402
from cleanrl_graph.services import sweep  # noqa: E402

PPO = (
    "cleanrl_graph/ppo_graph.py --total-timesteps 64 --num-envs 2 --num-steps 16 --hidden-dims "
    "8 --eval-episodes 2"
)


def arguments(folder, commands, **kwargs):
    return run.Args(
        table="t",
        commands=tuple(commands),
        results=str(folder / "results"),
        run_dir=str(folder / "runs"),
        **{"seeds": (1, 2), "env_ids": (), "workers": 1} | kwargs,
    )


def files_of(folder):
    """Name -> settings and rows of the runs of a table, whose files no temporary one is beside."""
    table = folder / "results" / "t"
    left = [path.suffix for path in table.rglob("*") if path.is_file()]
    assert set(left) <= {".csv", ".json", ".gz"}
    curves = tables.curves_of(table)
    return {name: (found, curves.get(name, [])) for name, found in tables.runs_of(table).items()}


def processes(folder):
    """Command lines of living processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text and str(os.getpid()) != path.parent.name:
            found.append(text)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Arguments of a tiny training that is finished."""
    args = arguments(
        tmp_path_factory.mktemp("finished"), [f"tiny={PPO}"], seeds=(1,), env_ids=("CartPole-v1",)
    )
    assert run.main(args) == 0
    return args


def test_a_finished_run(finished, monkeypatch, capsys):
    """It leaves episodes, settings, the largest mismatch and the first losses; it is not started
    again, and run.py --check says nothing of the same code."""
    ((name, (settings, episodes)),) = files_of(Path(finished.results).parent).items()
    assert name.startswith("tiny_CartPole-v1_s1_")
    assert episodes and all(row["return"] == row["length"] for row in episodes)
    assert all(1 <= int(row["step"]) <= 64 for row in episodes)
    assert settings["exit_code"] == 0 and len(settings["eval"]["return"]) == 2
    assert settings["steps"] == 64 and settings["SPS"] > 0
    assert 0 <= settings["collection_mismatch"] < 1e-5
    losses = settings["fingerprint"]
    assert [len(losses[name]) for name in fingerprint.LOSSES] == [2, 2, 2]
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "start", lambda *_: pytest.fail("a finished run was started"))
        assert run.main(finished) == 0
    (other,) = run.all_runs(dataclasses.replace(finished, commands=(f"tiny={PPO} --gamma 0.9",)))
    assert list(tables.finished(Path(finished.results, "t"))) == [name] != [other.key]
    capsys.readouterr()
    assert run.main(dataclasses.replace(finished, commands=(), check=True)) == 0
    assert capsys.readouterr().out == ""


def test_hash_is_that_of_the_normalised_command():
    """The order of flags, "_" or "-", "=" or a space and quotes change nothing; a value,
    environment or seed does."""
    key = lambda flags, env_id="m:E-v0", seed=1: (
        run.make_run("a", f"s.py {flags}", env_id, seed).key
    )
    name = key("--num-envs 2 --obs-shifts=-3:0 --env-kwargs '{\"a\": 1}'")
    assert name == key(" --env_kwargs='{\"a\": 1}' --obs-shifts -3:0 --num_envs 2")
    assert name.startswith("a_E-v0_s1_") and len(name.split("_")[-1]) == 8
    others = [key("--gamma 0"), key("--gamma 1", "m:E-v1"), key("--gamma 1", seed=2)]
    assert len({name.split("_")[-1] for name in (key("--gamma 1"), *others)}) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="runs are killed with it on Linux only")
def test_a_stopped_runner_goes_on_where_it_was(tmp_path):
    """Stopped in its second run: the first is kept, no process lives on, the restart ends with the
    files of both."""
    body = """import pathlib
seed, folder = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--seed", "--run-dir"))
time.sleep(600 if seed == "2" and not pathlib.Path(__file__ + ".fast").exists() else 0)
pathlib.Path(folder, "eval.csv").write_text("episode,return\\n0," + seed)"""
    command = f"fake={fake(tmp_path, body)}"
    flags = f"--table t --results {tmp_path}/results --run-dir {tmp_path}/runs --workers 1"
    words = [*flags.split(), "--seeds", "1", "2", "--commands", command]
    runner = subprocess.Popen(
        [sys.executable, BENCHMARK / "run.py", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: list(tmp_path.glob("runs/t/*_s2_*/stderr.txt")))
    runner.kill()
    runner.wait(60)
    wait_for(lambda: not processes(tmp_path))
    wait_for(lambda: is_free(tmp_path / "runs/t"))
    assert [name[:15] for name in files_of(tmp_path)] == ["fake_default_s1"]
    (tmp_path / "fake.py.fast").touch()
    assert run.main(arguments(tmp_path, [command])) == 0
    played = [settings["eval"] for settings, _ in files_of(tmp_path).values()]
    assert played == [{"episode": [0.0], "return": [seed]} for seed in (1.0, 2.0)]
    assert not list(tmp_path.glob("results/t/runs"))


def is_free(folder):
    """Whether no runner works in a folder."""
    with contextlib.suppress(SystemExit):
        run.lock(folder).close()
        return True


def fake(folder, body):
    """A script that the runner can start."""
    path = folder / "fake.py"
    path.write_text(f"import sys, time\n\n{body}\n")
    return str(path)


MINI = """import os, sys
from torch.utils.tensorboard import SummaryWriter
assert "--run-dir" not in sys.argv
factor = float(sys.argv[sys.argv.index("--env-kwargs") + 1])
import beside
with SummaryWriter("runs/E-v0__x_mini__1__0") as writer:
    for step in (16, 32, 48):
        writer.add_scalar("charts/episodic_return", step, step)
        writer.add_scalar("charts/episodic_length", 4, step)
        writer.add_scalar("charts/SPS", 100, step)
        writer.add_scalar("debug/collection_mismatch", step / 1e6, step)
        for name in ("policy_loss", "value_loss", "entropy"):
            writer.add_scalar(f"losses/{name}", factor * step, step)
"""


SMALL = "cleanrl_graph/x_mini.py --env-id m:E-v0 --env-kwargs 1"


def test_runs_of_small_scripts(tmp_path, monkeypatch, capsys):
    """x_mini.py has no --run-dir: it runs in its own folder, finds what PYTHONPATH names from
    here, leaves what other runs leave, and is checked like them."""
    for name in ("cleanrl_graph", "benchmark"):
        (tmp_path / name).mkdir()
    (tmp_path / "benchmark" / "beside.py").touch()
    script = tmp_path / "cleanrl_graph" / "x_mini.py"
    script.write_text(MINI)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "commit", lambda: "c0ffee")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "benchmark")
    args = arguments(Path("."), [f"x={SMALL}"], seeds=(1,))
    assert run.main(args) == 0
    ((name, (settings, episodes)),) = files_of(tmp_path).items()
    assert settings["command"] == f"python {SMALL} --seed 1"
    found = [(row["step"], row["return"], row["length"]) for row in episodes]
    assert found == [("16", "16", "4"), ("32", "32", "4"), ("48", "48", "4")]
    assert (settings["steps"], settings["SPS"]) == (48, 100)
    assert settings["collection_mismatch"] == pytest.approx(48e-6)
    assert settings["fingerprint"] == dict.fromkeys(fingerprint.LOSSES, [16, 32])
    assert list((tmp_path / "runs/t" / name / "runs").rglob("events.out.tfevents.*"))
    script.write_text(MINI.replace("factor *", "2 * factor *"))
    assert "policy_loss of update 1: 16 then, 32 now" in checked(args, tmp_path, capsys)[0]


def test_a_failed_run_is_recorded_and_the_others_go_on(tmp_path, capsys):
    script = fake(tmp_path, "sys.exit('no such luck' if '--seed 1' in ' '.join(sys.argv) else 0)")
    args = arguments(tmp_path, [f"fake={script}"])
    assert run.main(args) == sweep.FAILED
    first, second = run.all_runs(args)
    settings = tables.runs_of(tmp_path / "results/t")[first.key]
    assert settings["exit_code"] == 1 and settings["stderr"][-1] == "no such luck"
    assert list(tables.finished(tmp_path / "results/t")) == [second.key]
    assert "no such luck" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["", " --resume auto"])
def test_what_a_stopped_run_has_left(tmp_path, flags):
    """It is deleted, but for a run that goes on from its last checkpoint. A second runner of the
    table is refused."""
    args = arguments(tmp_path, [f"a=-c pass{flags}"], seeds=(1,))
    (each,) = run.all_runs(args)
    left = tmp_path / "runs" / "t" / each.key / "checkpoint"
    left.parent.mkdir(parents=True)
    left.touch()
    run.main(args)
    assert left.exists() == bool(flags)
    with run.lock(tmp_path / "runs" / "t"), pytest.raises(SystemExit, match="another runner wor"):
        run.main(args)


@contextlib.contextmanager
def event_file(folder, number):
    """A writer; what it has written becomes the file of that number (of different seconds)."""
    with SummaryWriter(folder / "new") as writer:
        yield writer
    (path,) = (folder / "new").iterdir()
    path.rename(folder / f"events.out.tfevents.{number}")


def test_event_files_of_a_resumed_run_are_merged(tmp_path):
    """The second part goes on from step 20: the first part's values after it are replaced, its time
    goes on. Losses are those of the first two updates, some of which were logged twice."""
    assert fingerprint.read(tmp_path) is None  # nothing was trained
    for number, (steps, ret) in enumerate([((10,), 1.0), ((10, 20, 30), 1.0), ((30, 40), 2.0)]):
        with event_file(tmp_path, number) as writer:
            writer.add_text("hyperparameters", "", walltime=100.0 * number)
            for step in steps:
                # two episodes end at the same step
                ended = {"charts/episodic_return": ret, "charts/episodic_length": 5}
                values = [*ended.items()] * 2 + [("charts/SPS", 7)]
                values += [("losses/value_loss", step / 10), ("losses/policy_loss", -step / 3)]
                values += [("losses/approx_kl", 7), ("losses/entropy", 1e-9 * step)]
                for name, value in values:
                    writer.add_scalar(name, value, step, walltime=100.0 * number + step)
    episodes, updates = run.events_of(tmp_path)
    found = [(step, ret) for step, _, ret, _ in episodes[::2]]
    assert found == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]
    assert [wall for _, wall, _, _ in episodes[::2]] == [10.0, 20.0, 50.0, 60.0]
    assert [step for step, _ in updates] == [10, 20, 30, 40]
    losses = {"policy_loss": [-3.33333, -6.66667], "value_loss": [1.0, 2.0]}
    assert fingerprint.read(tmp_path) == losses | {"entropy": [1e-8, 2e-8]}


def test_many_episodes_become_means_over_blocks_of_steps():
    """With 100 rows at most, 1,000 episodes of 7 steps become blocks of 128 steps; nothing is lost
    in the mean."""
    episodes = [(7 * i, 0.1 * i, float(i), 7) for i in range(1, 1001)]
    text = run.csv_text(episodes, [(3500, 50.0), (7000, 60.0)], 100)
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == len({-(-7 * i // 128) for i in range(1, 1001)}) <= 100
    assert sum(int(row["episodes"]) for row in rows) == 1000
    total = sum(float(row["return"]) * int(row["episodes"]) for row in rows)
    assert total / 1000 == pytest.approx(500.5, rel=1e-4)
    first = [rows[0][name] for name in ("step", "return", "SPS")]
    assert [*first, rows[-1]["SPS"]] == ["126", "9.5", "50", "60"]
    assert len(run.csv_text(episodes[:100], [], 100).splitlines()) == 101


# ---- fingerprint.py ----


def test_losses_that_differ():
    """By more than the tolerance of their update, relative to losses above 1. nan always does."""
    old = {"policy_loss": [0.01, 0.02], "value_loss": [100.0, 100.0], "entropy": [1.0, 1.0]}
    near = {"policy_loss": [0.01001, 0.0205], "value_loss": [100.001, 99.95], "entropy": [1.0, 1.0]}
    assert fingerprint.differences(old, old) == fingerprint.differences(old, near) == []
    far = {"policy_loss": [0.0101, 0.02], "value_loss": [100.0, 101.0], "entropy": [1, np.nan]}
    assert fingerprint.differences(old, far) == [
        "policy_loss of update 1: 0.01 then, 0.0101 now",
        "value_loss of update 2: 100 then, 101 now",
        "entropy of update 2: 1 then, nan now",
    ]
    shorter = {name: values[:1] for name, values in old.items()}
    assert fingerprint.differences(old, shorter) == ["2 updates then, 1 now"]


def checked(finished, root, capsys):
    """What the check prints of the code in `root`: stdout, stderr."""
    capsys.readouterr()
    number = fingerprint.check(dataclasses.replace(finished, table="", check=True), root)
    out, error = capsys.readouterr()
    assert number == len([line for line in out.split("\n") if line and line[0] != " "])
    return out, error


RENAMED = [  # flags of then, and of now
    ("--seed 1 --norm-vloss", "--seed 1 --norm-vloss 1"),
    ("--norm-vloss 0.01", "--norm-vloss 0.01"),
    ("--no-norm-vloss", "--norm-vloss 0"),
    ("--stay-solved 0", "--no-amsgrad --adv-floor 0.1 --adv-floor-decay 0"),
    ("--stay-solved 0.9 --gamma 1", "--amsgrad --adv-floor 0.1 --adv-floor-decay 0.9 --gamma 1"),
]


def test_flags_that_were_renamed(tmp_path):
    """Commands of earlier runs get the names of today, but not for the scripts of then."""
    script, of_then = ROOT / "cleanrl_graph/ppo_graph.py", tmp_path / "then.py"
    of_then.write_text("stay_solved: float | None = None")
    for then, now in RENAMED:
        assert fingerprint.as_now(then.split(), script) == now.split()
        assert parses(["ppo_graph", *now.split()])
        assert fingerprint.as_now(then.split(), of_then) == then.split()


# ---- tables.py ----
def test_files_of_runs_become_two(results):
    """The same settings and curves, the same report, and the same bytes in another year. Runs that
    come later join them; of a run that is there again, the new files count."""
    table = results / "t"
    odd = {"exit_code": 0, "a": "1", "b": "", "c": None, "d": [{"e": "x\n,"}], "f": "nan"}
    (table / "runs" / "odd.json").write_text(json.dumps(odd))
    settings, curves = tables.runs_of(table), tables.curves_of(table)
    report.main(report_args(results))
    text = (table / "table.md").read_text()
    copy = shutil.copytree(table, results / "copy")
    args = run.Args("t", pack=True, results=str(results), run_dir=str(results / "locks"))
    run.main(args)
    assert not (table / "runs").exists() and tables.pack(table) == 0
    assert tables.runs_of(table) == settings
    assert tables.curves_of(table) == {name: rows for name, rows in curves.items() if rows}
    report.main(report_args(results))
    assert (table / "table.md").read_text() == text
    os.utime(copy / "runs" / "p_1.csv", (0, 0))
    run.main(dataclasses.replace(args, table=""))  # all tables
    for name in ("runs.csv", "curves.csv.gz"):
        assert (copy / name).read_bytes() == (table / name).read_bytes()
    assert (copy / "curves.csv.gz").read_bytes()[4:8] == bytes(4)  # the time of packing
    (table / "runs").mkdir()
    (table / "runs" / "p_1.json").write_text('{"exit_code": 0, "seed": 5}')
    (table / "runs" / "p_1.csv").write_text("step\n7\n")
    (table / "runs" / "q_1.csv").write_text("step\n")  # a run that was just about to end
    assert tables.pack(table) == 1
    assert tables.runs_of(table)["p_1"] == {"exit_code": 0, "seed": 5}
    assert tables.curves_of(table)["p_1"] == [{"step": "7"}]
    assert (table / "runs" / "q_1.csv").exists() and len(tables.runs_of(table)) == len(settings)


# ---- report.py ----
@pytest.fixture
def results(tmp_path):
    """A table of two tasks, a system with three seeds and a peer with one. Seed s: return 10 * s *
    k after k episodes of 100 steps and k / s seconds, k = 1..50."""
    folder = tmp_path / "t" / "runs"
    folder.mkdir(parents=True)
    for task in ("A-v0", "B-v0"):
        for seed in (1, 2, 3):
            rows = [",".join(run.COLUMNS)]
            for k in range(1, 51):
                rows.append(f"{100 * k},{k / seed},{10 * seed * k},100,{100 * seed},1")
            (folder / f"ours_{task}_{seed}.csv").write_text("\n".join(rows))
            about = {"env_id": f"m:{task}", "gpu": None, "command": f"python x.py --seed {seed}"}
            played = {"return": [seed, seed + 1]}
            leave(folder, f"ours_{task}", seed, about | {"name": "ours"}, **played)
    (folder / "p_1.json").write_text('{"exit_code": 0}')
    curve = "step,wall_seconds,mean_return_100\n100,1,nan\n200,2,30\n300,3,40\n"
    (folder / "p_1.csv").write_text(curve)
    (folder / "ours_A-v0_4.csv").write_text("step\n1\n")
    (folder / "ours_A-v0_4.json").write_text('{"exit_code": 1}')
    return tmp_path


def leave(folder, name, seed, more=(), **played):
    """The json of a finished run."""
    about = {"exit_code": 0, "cpu": "C", "versions": {"torch": "2"}, "commit": "0123456789"}
    about |= {"name": name, "seed": seed, "command": f"ppo_x.py {name} {seed}"}
    about |= {"started": "2026-01-01T", "duration": 60, "eval": played} | dict(more)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}_{seed}.json").write_text(json.dumps(about))


def report_args(results, **kwargs):
    systems = ("ours=ours_*", "A|peer=p_*")
    return report.Args("t", systems, results=str(results), episodes=10, plot=False, **kwargs)


def groups_of(args):
    groups = {}
    for found in report.load_all(args):
        groups.setdefault((found.panel, found.label), []).append(found)
    return groups


def test_figures_of_a_table(results):
    """Against values computed here: the mean of the last 10 returns after k episodes is 10 s (k -
    4.5) for k >= 10."""
    columns = ("steps", "SPS", "final", "best", "MMER", "greedy")
    args = report_args(results, target=600.0, columns=columns)
    groups = groups_of(args)
    nums = {key: len(runs) for key, runs in groups.items()}
    assert nums == {("A", "ours"): 3, ("B", "ours"): 3, ("A", "peer"): 1}
    for found in groups["A", "ours"]:
        s = int(found.seed)
        k = np.ceil(60 / s + 4.5)
        k = k if k <= 50 else np.inf
        expected = {"steps": 5000, "minutes": 50 / s / 60, "SPS": 100 * s, "greedy": s + 0.5}
        expected |= {"final": 455 * s, "best": 455 * s, "MMER": 255 * s}
        expected |= {"steps to target": 100 * k, "seconds to target": k / s}
        assert report.stats(found, args) == pytest.approx(expected), s
    rows = report.table(groups, args)
    only = report.table(groups, dataclasses.replace(args, target_panel="B"))
    for found, panels in (rows, {"A", "B"}), (only, {"B"}):
        assert {line[0] for line in found[1:] if line[found[0].index("steps to 600")]} == panels
    row, peer = (dict(zip(rows[0], rows[k])) for k in (1, 3))
    assert row["final"] == "910.0 ± 262.7"  # 455, 910, 1365: standard deviation 455 over sqrt(3)
    assert row["greedy"] == "2.500 ± 0.577"
    assert row["steps to 600"] == "3,500 (not in 5,000 / 3,500 / 2,500)"
    assert row["seconds to 600"] == "17.5 (not in 50 / 17.5 / 8.3)"
    found = [peer[name] for name in ("final", "steps", "MMER", "steps to 600")]
    assert found == ["40.0", "300", "", "not in 300"]
    assert "6 runs, 6 minutes" in report.document(groups, args)


def test_picture_of_a_table(results, monkeypatch):
    pytest.importorskip("scipy")  # of benchmark/requirements.txt
    monkeypatch.setattr(report, "RESAMPLES", 20)
    report.main(dataclasses.replace(report_args(results, target=600.0), plot=True))
    assert (results / "t" / "table.png").stat().st_size > 10_000


def test_means():
    """The interquartile one as scipy has it; the bootstrap interval of that of three seeds (their
    mean) lies between them. Rows that stand for several episodes weigh that much; a window is at
    least as long as asked for."""
    returns, ended = np.array([1.0, 2, 3, 4]), np.array([3.0, 1, 2, 4])
    assert report.running_mean(returns, ended, 5) == pytest.approx([1, 5 / 4, 11 / 6, 22 / 6])
    steps = np.array([10.0, 20, 21, 40])
    found = report.Run("", "", "1", steps, np.arange(4.0), returns, returns, ended, {})
    assert report.mmer(found, 20) == pytest.approx((3 * 2 + 4 * 4) / 6)
    stats = pytest.importorskip("scipy.stats")
    many = np.random.default_rng(0).random((11, 4))
    for num in (3, 8, 11):
        expected = stats.trim_mean(many[:num], 0.25, axis=0)
        assert report.iqm(many[:num]) == pytest.approx(expected)
    values = np.array([[1.0, 10], [2, 20], [3, 30]])
    low, high = report.interval(values)
    order = np.stack([values.min(0), low, values.mean(0), high, values.max(0)])
    assert (np.diff(order, axis=0) >= 0).all() and (low < values.mean(0)).all()
    assert (values.mean(0) < high).all()


def test_pattern_without_runs(results, monkeypatch):
    """An error, but with --skip. OTHER/PATTERN takes the runs of the table OTHER; where this one
    was not made anew, too, they are the committed ones. Its own runs never are."""
    args = dataclasses.replace(report_args(results), table="new", systems=("B|ours=t/ours_B*",))
    assert [found.seed for found in report.load_all(args)] == ["1", "2", "3"]
    args.systems += ("A|ours=ours_A*",)
    with pytest.raises(ValueError, match="new: no finished run matches ours_A"):
        report.load_all(args)
    assert len(report.load_all(dataclasses.replace(args, skip=True))) == 3
    monkeypatch.setattr(tables, "COMMITTED", results)
    anew = dataclasses.replace(args, results=str(results / "anew"), systems=args.systems[:1])
    assert len(report.load_all(anew)) == 3
    with pytest.raises(ValueError, match="t: no finished run matches ours_B"):
        report.load_all(dataclasses.replace(anew, table="t", systems=("ours_B*",)))


@pytest.mark.parametrize(
    "module, table", [(job_shop, "job_shop"), (flexible_job_shop, "flexible_job_shop_suites")]
)
def test_published_rows_have_a_source(module, table):
    """The letter of each row is explained below the table, and no explanation is left over."""
    rows = tables.read(BENCHMARK / "results" / table / "published.csv")
    names = " ".join(getattr(module, "MAKESPANS", {}))
    used = {row["source"] for row in rows} | set(re.findall(r"\[(.)\]", names))
    assert all(len(row) == len(rows[0]) and None not in row for row in rows)
    assert used == set(re.findall(r"\[(\w)\] \w", module.SOURCES.replace("\n", " ")))


# ---- schedules.py and job_shop.py ----
@pytest.mark.slow
def test_schedules_go_on(tmp_path):
    """Each instance is played once, greedily as the script's own evaluation plays it; samples are
    at least as many."""
    kwargs = {"jobs": 3, "machines": 3, "lookahead": 2}
    flags = dict(env_id="envs:JobShop-v0", env_kwargs=kwargs, save_model=True)
    trained = helpers.run(tmp_path / "runs", **flags, eval_suite="ft", eval_samples=0)
    greedy, model = [row["greedy"] for row in trained.rows], str(trained.folder / "model.pt")
    args = schedules.Args(model, "m", 3, ["ft"], max_instances=2, results=str(tmp_path))

    def play(**changes):
        """The rows that are added."""
        before = tables.read(tmp_path / "schedules.csv")
        schedules.main(dataclasses.replace(args, **changes))
        after = tables.read(tmp_path / "schedules.csv")
        assert after[: len(before)] == before
        return after[len(before) :]

    rows = play()
    assert [float(row["cost"]) for row in rows] == greedy[:2]
    assert [row["instance"] for row in rows] == ["ft06", "ft10"]
    rows = play(max_instances=3, samples=[0, 5], batch=2)
    found = [(row["instance"], row["samples"]) for row in rows]
    assert found == [("ft20", "0"), ("ft06", "5"), ("ft10", "5"), ("ft20", "5")]
    for row in rows[1:]:
        costs = list(map(int, row["costs"].split()))
        assert len(costs) == 5 and len(set(costs)) > 1
        assert min(costs) == int(row["cost"]) >= int(row["best_known"])
    both = play(samples=[-1])  # both directions, of which the first is the greedy one
    for row, cost in zip(both, greedy):
        costs = list(map(int, row["costs"].split()))
        assert len(costs) == 2 and costs[0] == cost and row["samples"] == "-1"
        assert min(costs) == int(row["cost"])
    with pytest.raises(SystemExit, match="JobShop-v0 has"):
        play(suites=["taillard"])


def test_reversed_instances():
    """A schedule of the reversed instance, read from its end, is one of the instance: no machine
    has two jobs at once, no job is on two machines, and its operations are in order."""
    env = job_shop.job_shop.JobShopEnv(instance=schedules.reverse("ft06"), skip_forced=False)
    env.reset(seed=0)
    while env.num_left:
        env.step(int(np.random.default_rng(env.num_left).choice(np.flatnonzero(env.mask))))
    times, machines, best, _ = job_shop.job_shop.load_instance("ft06")
    start = (env.bound - env.op_start - env.op_time).reshape(times.shape)[:, ::-1]
    assert start.min() >= 0 and (start + times).max() <= env.bound and env.bound >= best
    assert (start[:, 1:] >= start[:, :-1] + times[:, :-1]).all()
    for machine in range(6):
        begin, end = start[machines == machine], (start + times)[machines == machine]
        assert (np.sort(begin)[1:] >= np.sort(end)[:-1]).all()


@pytest.mark.parametrize(
    "suite, digest", [("l2d6x6", "8f7f282db814"), ("l2d20x15", "39e6a72559d9")]
)
def test_sets_of_l2d(suite, digest):
    """The files that L2D has published, by their hash."""
    found = schedules.l2d_instances(suite).values()
    data = np.stack([[each["times"], each["machines"] + 1] for each in found]).astype(np.int64)
    assert hashlib.sha1(data.tobytes()).hexdigest()[:12] == digest


def test_a_model_of_job_shops(tmp_path):
    """The trained model that the repository holds finds what its rows say, but for another
    machine's rounding."""
    folder = BENCHMARK / "results" / "job_shop"
    flags = dict(name="quick", seed=1, suites=["la"], max_instances=2, results=str(tmp_path))
    schedules.main(schedules.Args(model=str(folder / "quick_s1.pt"), **flags))
    rows, known = (tables.read(path / "schedules.csv") for path in (tmp_path, folder))
    known = {schedules.key_of(row): float(row["cost"]) for row in known}
    ratios = [float(row["cost"]) / known[schedules.key_of(row)] for row in rows]
    assert len(ratios) == 2 and abs(np.mean(ratios) - 1) < 0.02


# ---- cp_sat.py ----


def test_cp_sat_solves():
    """Both kinds of instances: known optima, schedules without overlap, and eligible machines."""
    pytest.importorskip("ortools")
    ft06, mk01 = cp_sat.job_shop_instance("ft06"), cp_sat.flexible_instance("mk01")
    for jobs, num_machines, best_known in (ft06, mk01):
        found = cp_sat.solve(jobs, num_machines, 20, 1)
        assert found["status"] == "OPTIMAL" and found["makespan"] == best_known == found["bound"]
        schedule = found["schedule"]
        operations = [(j, k) for j, job in enumerate(jobs) for k in range(len(job))]
        assert [row[:2] for row in schedule] == operations
        assert all(jobs[j][k][m] == finish - start for j, k, m, start, finish in schedule)
        assert max(row[4] for row in schedule) == best_known
        for column in (0, 2):
            for key in {row[column] for row in schedule}:
                rows = sorted(row[3:] for row in schedule if row[column] == key)
                assert all(end <= start for (_, end), (start, _) in zip(rows, rows[1:]))


# ---- bash benchmark/NAME.sh --out DIR ----
TINY = """#!/bin/bash
# A table of one run.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
"$PYTHON" benchmark/run.py --table tiny --seeds 1 --workers 1 "$@" --commands "fake=fake.py"
"$PYTHON" benchmark/report.py --table tiny --columns steps final --no-plot
"""
# Writes a log without torch, whose import takes a second
FAKE = """import sys
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter(sys.argv[sys.argv.index("--run-dir") + 1])
for step in (1, 2):
    for name, value in (("return", 4.0), ("length", 1.0)):
        value = Summary.Value(tag="charts/episodic_" + name, simple_value=value)
        writer.add_event(Event(wall_time=step, step=step, summary=Summary(value=[value])))
writer.close()
"""


def test_a_table_is_made_anew_beside_the_committed_one(tmp_path):
    """--out DIR, a relative path from any folder, leaves benchmark/results as it is, runs all of
    the table, and says what stands in both."""
    copy = tmp_path / "clone" / "benchmark"
    committed = copy / "results" / "tiny" / "table.md"
    committed.parent.mkdir(parents=True)
    for name in ("setup.sh", *(path.name for path in BENCHMARK.glob("*.py"))):
        shutil.copy(BENCHMARK / name, copy)
    (copy / "tiny.sh").write_text(TINY)
    (tmp_path / "clone" / "fake.py").write_text(FAKE)
    text = (
        "| system | seeds | steps | final |\n| --- | --- | --- | --- |\n| fake | 1 | 2 | 3.000 |\n"
    )
    committed.write_text(text)

    def make(*words, python=sys.executable):
        env = os.environ | {"PYTHON": python, "PYTHONPATH": str(ROOT)}
        call = ["bash", str(copy / "tiny.sh"), *words]
        done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, said, _ = make("--out", "mine", "--seeds", "1")
    assert code == 0 and f"{tmp_path}/mine/tiny/table.md, committed: {copy}" in said
    rows = said[said.index("| | system |") :].split("\n")
    assert rows[1:3] == [
        "| committed | fake | 1 | 2 | 3.000 |",
        "| yours | fake | 1 | 2 | 4.000 |",
    ]
    assert list((copy / "results").rglob("*.*")) == [committed] and committed.read_text() == text
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"runs", "tiny"}
    code, said, _ = make("--out=other", "--seeds", "5", python="echo")
    assert code == 0 and "--workers 1 --seeds 5 --commands" in said
    assert f"benchmark/beside.py {tmp_path}/other" in said
    for words in (["--out"], ["--out", "a b"]):
        code, _, error = make(*words, python="echo")
        assert code == 2 and "--out" in error


def test_rows_beside_each_other():
    """Rows meet by the cells before their first number; those of one side stand alone; tables that
    only the committed text has are left out."""
    committed = (
        "# A\n\n| a | b |\n|---|---|\n| x | 1 |\n| y | 2 |\n| 8 | 3 |\n\n# B\n| c |\n|---|\n| 1 |\n"
    )
    own = "# A\n| a | b |\n| --- | --- |\n| **x** | 5 |\n| x | 6 |\n| 8 | 7 |\n"
    assert beside.beside(committed, own) == [
        "",
        "A",
        "| | a | b |",
        "| committed | x | 1 |",
        "| yours | x | 6 |",
        "| committed | y | 2 |",
        "| committed | 8 | 3 |",
        "| yours | 8 | 7 |",
        "| yours | **x** | 5 |",
    ]


# ---- The commands of the tables ----
def parses(command):
    """Whether a script has the flags of a command, given as words without the interpreter.
    SystemExit if not."""
    # Before it torchrun and its flags
    first = next((k for k, word in enumerate(command) if word.endswith(".py")), 0)
    name = Path(command[first]).stem
    flags = list(command[first + 1 :])
    if not name.startswith("ppo_"):  # a peer's folder is on sys.path
        peer = importlib.import_module(name)
        return tyro.cli(peer.Args, args=flags, console_outputs=False)
    if name.endswith("_mini"):  # without services
        script = importlib.import_module(f"cleanrl_graph.{name}")
        return tyro.cli(script.Args, args=flags, console_outputs=False)
    return helpers.parsed(name, flags)


SHELL_FILES = """actions async bounds cells critic_only dag_schedule demos entities envpool
    flexible_job_shop graph_context job_shop memory_lengths minigrid_memory pogema popgym
    ppo_framestack ppo_graph ppo_gtrxl ppo_lstm_sparse public_tasks recall routes set_layers skills
    speed stateless_cartpole third_party vectors vertex_cover""".split()
PARTS = {"job_shop": "quick greedy l2d families samples solver table"}
PARTS["stateless_cartpole"] = "ours table"


@pytest.mark.parametrize("script", SHELL_FILES)
def test_commands_of_the_shell_files(tmp_path, script):
    """Each is run with an interpreter that only notes what it is given; the flags of all runs
    exist, and the committed table is what the report makes of the committed runs."""
    copy, log, python = tmp_path / "benchmark", tmp_path / "log", tmp_path / "python"
    copy.mkdir()
    for name in (f"{script}.sh", "setup.sh"):
        shutil.copy(BENCHMARK / name, copy)
    python.write_text(f"""#!/bin/bash
[ "$1" = - ] || printf '%s\\0' "$@" END >> {log}
if [[ "$*" = *quick=* ]]; then
    folder=runs/job_shop_quick/quick_JobShop-v0_s1_0/JobShop-v0
    mkdir -p $folder && touch $folder/model.pt
fi
""")
    python.chmod(0o755)
    pythons = {f"{name}PYTHON": str(python) for name in ("", "PEER_", "TRXL_", "THIRD_PARTY_")}
    own = {"SEEDS": "1", "PARTS": PARTS.get(script, ""), "CLEANRL": "cleanrl"}
    for name in ("speed/tables.md", "stateless_cartpole/peers.md"):  # are read
        (copy / "results" / name).parent.mkdir(parents=True)
        shutil.copy(BENCHMARK / "results" / name, copy / "results" / name)
    words, env = ["bash", copy / f"{script}.sh"], os.environ | pythons | own
    result = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    calls = [part[:-1].split("\0") for part in log.read_text().split("END\0") if part]
    names = {Path(call[0]).name for call in calls}
    assert not [call for call in calls if call[0] != "-c" and not (ROOT / call[0]).exists()]
    if script not in ("async", "speed"):
        tables = {"report.py", "third_party.py", "dag_schedule.py", "scores.py"}
        tables |= {"graph_context.py", "routes.py", "vertex_cover.py"}
        assert "run.py" in names and names & tables
    for call in calls:
        if call[0].startswith("cleanrl_graph/"):
            parses(call)
        if call[0] == "benchmark/run.py":
            args = tyro.cli(run.Args, args=call[1:])
            tail = 4 if args.env_ids else 2  # the environment and the seed change no flag
            one = {shlex.join(each.command[:-tail]): each for each in run.all_runs(args)}
            for each in one.values():
                is_mini = sweep.mini_of(each.command) is not None
                parses(each.command if is_mini else [*each.command, "--run-dir", "x"])
        elif call[0] == "benchmark/report.py":
            args = tyro.cli(report.Args, args=call[1:])
            table = BENCHMARK / "results" / args.table / "table.md"
            assert report.document(report.groups_of(args), args) == table.read_text()
        elif re.match(
            r"benchmark/(cp_sat|public_tasks|routes|schedules|vertex_cover|speed/)", call[0]
        ):
            tyro.cli(importlib.import_module(Path(call[0]).stem).Args, args=call[1:])


def test_rules_of_the_densest_subgraph():
    """A star of node 0 with five leaves, and a triangle that hangs on one of them: the rules begin
    at the star, the triangle is denser. Rules and trainings have the same graphs."""
    edges = [(0, leaf) for leaf in range(1, 6)] + [(5, 6), (6, 7), (7, 8), (6, 8)]
    links = {pair for edge in edges for pair in (edge, edge[::-1])}
    assert public_tasks.density(links, (6, 7, 8)) == 1 == public_tasks.densest(links, 9, 3)
    assert public_tasks.by_degree(links, 9, 3) == 2 / 3  # 0, 6 and 5
    assert public_tasks.by_new_edges(links, 9, 3) == 2 / 3  # 0, 5 and 6
    assert public_tasks.by_new_edges(links, 9, 5) == 5 / 5 == public_tasks.densest(links, 9, 5)
    text = (BENCHMARK / "public_tasks.sh").read_text().replace("\\", "")
    assert f"--env-kwargs '{json.dumps(public_tasks.GRAPH)}'" in text


MAKERS = {
    "dag_schedule": dag_schedule,
    "flexible_job_shop_suites": flexible_job_shop,
    "graph_context": graph_context,
    "routes": routes,
    "vertex_cover": vertex_cover,
    "job_shop": job_shop,
}
SLOW = ("job_shop",)  # plays the rules of all instances


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in MAKERS]
)
def test_committed_tables_of_their_own_makers(name, tmp_path, monkeypatch):
    """Each is what its maker writes from the committed runs; without any it says so."""
    module, committed = MAKERS[name], BENCHMARK / "results"
    flags = {"plot": False} if name in ("routes", "vertex_cover") else {}
    args = module.Args(results=str(tmp_path), **flags)
    if name == "job_shop":
        monkeypatch.setattr(module, "plot", lambda *args: None)
    if name != "dag_schedule":
        with pytest.raises(SystemExit, match="has been played|has run"):
            module.main(args)
    for each in (name, "cp_sat"):
        shutil.copytree(committed / each, tmp_path / each, dirs_exist_ok=True)
    (tmp_path / name / "table.md").unlink()
    module.main(args)
    assert (tmp_path / name / "table.md").read_text() == (committed / name / "table.md").read_text()


def test_other_committed_tables(tmp_path, monkeypatch):
    """Of third_party.py, zoo.py, scores.py of POGEMA, which plays nothing again, and delays.py."""
    results = BENCHMARK / "results"
    args = third_party.Args()
    found = {each: third_party.rows_of(each, args) for each in third_party.PACKAGES}
    text = (results / "third_party" / "table.md").read_text()
    assert third_party.document(found, args) == text
    rows = tables.read(results / "zoo" / "ids.csv")
    assert zoo.document(rows).split() == (results / "zoo" / "table.md").read_text().split()
    for name in ("pogema", "traffic"):
        shutil.copytree(results / name, tmp_path / name)
    monkeypatch.setattr(scores, "score", lambda *args: pytest.fail("played again"))
    scores.main(scores.Args(results=str(tmp_path / "pogema"), runs=str(tmp_path)))
    monkeypatch.setattr(delays, "FOLDER", tmp_path / "traffic")
    delays.main()
    for path in ("pogema/tables.md", "traffic/delays.md"):
        assert (tmp_path / path).read_text() == (results / path).read_text()


def test_flags_of_the_speed_tables():
    load = importlib.import_module
    memory = load("proof_of_memory")
    for flags in memory.VARIANTS.values():
        parses(["ppo_gtrxl", *memory.FLAGS.split(), *flags.split()])
    parses(["ppo_graph", *load("time_to_475").FLAGS.split()])


TRIES = {
    "layout": "--num-stored 512 --repeats 1",
    "views": "--num-envs 2 --num-steps 32 --episode-length 10 --repeats 1",
    "attention": "--parts memory --memory-lengths 4 16 --num-steps 32 --repeats 1",
    "lstm_kernels": "--densities 0.02 --repeats 1 --lstm-dim 8",
    "sps": "--total-timesteps 256 --rounds 1 --num-envs 2 --gnn-dim 8 --peer-python PEER",
    "async": "--cases 0.1 --rounds 1 --num-updates 2 --curve-steps 0",
    "message_passing": "--repeats 1 --size 20",
    "compile": "--cases CartPole-v1 --repeats 1 --rounds 1 --scale 0.05 --mode none",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIES)
def test_speed_tables_can_be_made(tmp_path, name):
    """Each with a few steps; the peers' place is taken by an interpreter that prints what they
    would."""
    peer = tmp_path / "peer"
    peer.write_text("#!/bin/sh\necho SPS 100\necho mean return 1.0\n")
    peer.chmod(0o755)
    flags = TRIES[name].replace("PEER", str(peer)).split()
    command = [sys.executable, BENCHMARK / "speed" / f"{name}.py", *flags]
    result = subprocess.run(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, check=True)
    assert "| --- |" in result.stdout and "nan" not in result.stdout


# ---- zoo.py ----
ZOO = """package,environment,module,yours,pattern,most,kwargs,flags
gymnasium,main,,,CartPole-v1|Blackjack-v1,2,,
torch,main,made_for_zoo,,.*,9,,
numpy,other,numpy,,.*,9,,
"""
MADE = """
import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

class TwoRewards(CartPoleEnv):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward, 0.0]), *rest

class Broken(CartPoleEnv):
    def reset(self, **kwargs):
        raise RuntimeError("no data")

gym.register("Made-TwoRewards-v0", TwoRewards)
gym.register("Made-Unfinished-v0", Broken)
"""


def run_zoo(folder):
    command = [sys.executable, str(ROOT / "benchmark" / "zoo.py"), "--workers", "2"]
    command += ["--list", str(folder / "packages.csv"), "--results", str(folder)]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=True)
    return tables.read(folder / "ids.csv"), done.stdout


@pytest.mark.slow
def test_environments_of_others(tmp_path):
    (tmp_path / "packages.csv").write_text(ZOO)
    (tmp_path / "made_for_zoo.py").write_text(MADE)
    rows, _ = run_zoo(tmp_path)
    found = {(row["id"].split(":")[-1], row["script"]): row for row in rows}
    assert {key: row["outcome"] for key, row in found.items()} == {
        ("Blackjack-v1", "ppo_graph.py"): "trains",
        ("CartPole-v1", "ppo_lstm_sparse.py"): "trains",
        ("CartPole-v1", "ppo_graph.py"): "trains",
        ("Made-TwoRewards-v0", "ppo_graph.py"): "trains with a flag",
        ("Made-Unfinished-v0", "ppo_graph.py"): "package fails",
        ("Made-Unfinished-v0", "ppo_gtrxl.py"): "package fails",
    }
    assert float(found["CartPole-v1", "ppo_graph.py"]["collection_mismatch"]) <= 1e-5
    assert found["Made-Unfinished-v0", "ppo_graph.py"]["message"] == "RuntimeError: no data"
    (tmp_path / "ids.csv").write_text((tmp_path / "ids.csv").read_text().replace("no data", "x"))
    rows, said = run_zoo(tmp_path)
    assert len(rows) == 6 and "6 runs, 0 of them are missing" in said
    assert "| **all 2** |  | 4 | 2 | 1 |  |  | 1 | 6 |" in (tmp_path / "table.md").read_text()


# ---- pogema/ ----
SHORT = [{"num_robots": 8, "map_seed": k, "task_seed": 0, "episode_length": 6} for k in range(2)]
SUITES = {"random_8": SHORT, "one_shot_random_8": [task | {"task": "one-shot"} for task in SHORT]}


@pytest.fixture
def short_suites(monkeypatch):
    monkeypatch.setattr(PogemaEnv, "eval_suites", SUITES)


def saved(path, **flags):
    """A model.pt with random weights."""
    script = importlib.import_module("cleanrl_graph.ppo_graph_agents")
    args = helpers.small_args(script, env_id="cleanrl_graph.envs:Pogema-v0", gnn_layers=1, **flags)
    env = script.make_env(args)
    agent = script.Agent(script.Envs([lambda: env]).leaves, env.action_space, args)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": agent.state_dict(), "args": vars(args), "script": args.exp_name}, path)
    return str(path)


def test_scores_are_played_once(short_suites, tmp_path, monkeypatch):
    """Rules and the models of two seeds on each suite; of what stands in scores.csv nothing is
    played again; the table has means over seeds, and theirs. A model can be filmed."""
    for seed in (1, 2):
        model = tmp_path / "runs" / f"agents_Pogema-v0_s{seed}_0a" / "run" / "model.pt"
        saved(model)
    film.main(film.Args(str(model), str(tmp_path / "film.gif"), "random_8", pictures=3))
    with Image.open(tmp_path / "film.gif") as picture:
        assert picture.n_frames == 3 and picture.width > 2 * 200
    theirs = ["QMIX,random_8,128,256,0.57,,", "DCC,one_shot_random_8,128,128,,1,1"]
    text = "\n".join([",".join(raw_data.COLUMNS), *theirs, ""])
    (tmp_path / "theirs.csv").write_text(text)
    args = scores.Args(tuple(SUITES), 2, str(tmp_path / "runs"), str(tmp_path))
    scores.main(args)
    rows = scores.read(tmp_path / "scores.csv")
    assert len(rows) == 2 * (3 + 2 * 2)
    for row in rows:
        values, one_shot = json.loads(row["values"]), row["suite"].startswith("one_shot")
        shown = float(row["success" if one_shot else "throughput"])
        assert len(values) == 2 and shown == pytest.approx(np.mean(values), abs=1e-4)
        assert bool(row["arrived"]) == one_shot
    text = (tmp_path / "tables.md").read_text()
    lifelong, success, arrived = text.split("| --- | --- |")[1:]
    assert "| QMIX (theirs) | 0.57 |" in lifelong and "| DCC (theirs) | 1.00 |" in success
    sampled = [r for r in rows if r["mode"] == "sampled" and r["suite"] == "random_8"]
    assert [row["seed"] for row in sampled] == ["1", "2"]
    means = [float(row["throughput"]) for row in sampled]
    each = ", ".join(f"{mean:.2f}" for mean in means)
    assert f"ppo_graph_agents.py**, sampled | {np.mean(means):.2f} ({each}) |" in lifelong
    assert "| random |" in arrived
    monkeypatch.setattr(scores, "score", lambda *args: pytest.fail("played again"))
    scores.main(args)
    assert scores.read(tmp_path / "scores.csv") == rows
