"""services/plot.py: curves of a few evaluations, and how a single curve is called."""

import csv
import json
import subprocess
import sys

import numpy as np

from cleanrl_graph.services import plot


def made_run(folder, seed, evaluations=()):
    """A run of five episodes, with these (step, return) in evaluations.csv."""
    folder.mkdir()
    (folder / "events.out.tfevents.1").touch()
    flags = {"env_id": "m:E-v0", "seed": seed, "exp_name": "my_ppo"}
    (folder / "args.json").write_text(json.dumps(flags))
    rows = [f"{10 * k},{k},{seed},10,," for k in range(1, 6)]
    text = "\n".join(["step,seconds,return,length,group,task", *rows])
    (folder / "episodes.csv").write_text(text + "\n")
    rows = [f"{step},{step / 1000},{ret}" for step, ret in evaluations]
    (folder / "evaluations.csv").write_text("\n".join(["step,seconds,return", *rows]) + "\n")


def drawn(tmp_path, monkeypatch, **args):
    """(the picture, the rows of curves.csv, the table) of the runs in this folder."""
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **kwargs: saved.append(figure))
    plot.main(plot.Args(runs=(str(tmp_path),), out=str(tmp_path / "out"), **args))
    with open(tmp_path / "out" / "curves.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return saved[0], rows, (tmp_path / "out" / "table.md").read_text()


def test_each_evaluation_is_a_point(tmp_path, monkeypatch):
    """A single one is seen, too, and a step is as it was written."""
    made_run(tmp_path / "0", 0, [(1_234_584, 0.5), (2_000_000, 0.5)])
    made_run(tmp_path / "1", 1, [(1_234_584, 1.5)])
    picture, rows, table = drawn(tmp_path, monkeypatch, evaluations="return")
    line = picture.axes[0].lines[0]
    assert line.get_marker() == "." and np.allclose(line.get_xdata(), [1234.584, 2000])
    assert line.get_ydata().tolist() == [1, 1]
    assert [row["x"] for row in rows if row["axis"] == "steps"] == ["1234584", "2000000"]
    assert "last evaluation at step" in table
    (tmp_path / "0" / "evaluations.csv").unlink()  # the other run has one evaluation
    picture, _, _ = drawn(tmp_path, monkeypatch, evaluations="return")
    assert picture.axes[0].lines[0].get_xdata().tolist() == [1234.584]


def test_name_of_a_single_curve(tmp_path, monkeypatch):
    """It is that of its runs; the step is said to be the last episode's."""
    for seed in (1, 2):
        made_run(tmp_path / str(seed), seed)
    picture, rows, table = drawn(tmp_path, monkeypatch)
    assert {row["curve"] for row in rows} == {"my_ppo"}
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["my_ppo"]
    assert picture.axes[0].lines[0].get_marker() == "None" and "last episode at step" in table


def test_it_starts_without_torch():
    code = "import sys\nfrom cleanrl_graph.services import plot\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
