"""cleanrl_graph, curves and a table of any runs, from any folder.

    python -m cleanrl_graph.services.plot runs --by learning_rate --out curves

It finds all runs in these folders. Runs of an environment that are alike in the flags of --by are
one curve: after each step, and each second, the mean return of the last --episodes episodes, as
mean and standard deviation over its runs, the seeds. Without --by these are all flags in which the
runs differ. It writes curves.csv, table.md and, with matplotlib, curves.png.

A run has args.json and episodes.csv where services trained it. Of a script alone the flags are what
the name of the folder says, and episodes those of TensorBoard's log.
"""

import csv
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro

from cleanrl_graph.services.checkpoint import FREE

SAME = FREE - {"exp_name"} | {"seed", "env_id"}  # flags that make no other curve
NUM_POINTS = 150  # of a curve
AXES = ("steps", "seconds")


@dataclass
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """folders of runs, or folders with such folders in them"""
    by: tuple[str, ...] = ()
    """flags whose values are told apart, as learning_rate; none: all that differ"""
    episodes: int = 100
    """episodes of a running mean"""
    out: str = "."
    """folder of curves.csv, curves.png and table.md"""


class Run(NamedTuple):
    """After each episode: `steps` and `seconds` of the training, the mean return of the last
    ones."""

    folder: Path
    flags: dict
    steps: np.ndarray
    seconds: np.ndarray
    means: np.ndarray

    @property
    def env_id(self) -> str:
        return str(self.flags.get("env_id"))


# ---- What a run left ----
def events_of(folder: Path) -> tuple[list[tuple], list[tuple]]:
    """(step, seconds of training, return, length) of every episode and (step, SPS) of every update.
    A newer event file replaces what older ones hold after the last update before its first step;
    its time goes on from there."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    episodes = []
    updates = []  # (step, SPS, seconds)
    paths = folder.rglob("events.out.tfevents.*")
    for path in sorted(paths, key=lambda path: path.name):  # by time
        values = {"episodic_return": [], "episodic_length": [], "SPS": []}
        start = None
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if start is None:
                    start = event.wall_time
                name = value.tag.removeprefix("charts/")
                if name in values:
                    row = event.step, event.wall_time - start, value.simple_value
                    values[name].append(row)
        steps = [row[0] for row in sum(values.values(), [])]
        if not steps:
            continue
        updates = [row for row in updates if row[0] < min(steps)]
        resumed, _, before = updates[-1] if updates else (0, 0, 0.0)
        episodes = [row for row in episodes if row[0] <= resumed]
        lengths = [row[2] for row in values["episodic_length"]]
        for (step, seconds, ret), length in zip(values["episodic_return"], lengths):
            episodes.append((step, before + seconds, ret, length))
        for step, seconds, sps in values["SPS"]:
            updates.append((step, sps, before + seconds))
    return episodes, [row[:2] for row in updates]


def episodes_of(folder: Path) -> list[tuple]:
    """(step, seconds of training, return, length) of every episode."""
    path = folder / "episodes.csv"
    if not path.exists():
        return events_of(folder)[0]
    with open(path, newline="") as file:
        _, *rows = csv.reader(file)
    return [tuple(map(float, row[:4])) for row in rows]


def flags_of(folder: Path) -> dict:
    """The flags of a run; without args.json those that its name has, ENV__EXP__SEED__TIME."""
    path = folder / "args.json"
    if path.exists():
        return json.loads(path.read_text())
    return dict(zip(("env_id", "exp_name", "seed"), folder.name.split("__")))


def running_mean(returns: np.ndarray, ended: np.ndarray, window: int) -> np.ndarray:
    """After each row the mean over the last `window` episodes; over a few more where a row holds
    several, over all where they are fewer."""
    num = np.cumsum(ended)
    total = np.cumsum(ended * returns)
    before = np.searchsorted(num, num - window, side="right")  # rows that are not in the window
    num_before = np.append(0, num)[before]
    total_before = np.append(0, total)[before]
    return (total - total_before) / (num - num_before)


def find(folders: Iterable[str], window: int) -> list[Run]:
    """The runs in these folders. SystemExit if there are none; those without an episode are
    said."""
    found = set()
    for folder in folders:
        found |= {path.parent for path in Path(folder).rglob("events.out.tfevents.*")}
    runs = []
    for folder in sorted(found):
        episodes = episodes_of(folder)
        if not episodes:
            if flags_of(folder).get("total_timesteps") != 0:  # 0: only an evaluation
                print(f"{folder}: no episode has ended", file=sys.stderr)
            continue
        steps, seconds, returns, _ = np.array(episodes, float).T
        means = running_mean(returns, np.ones(len(returns)), window)
        runs.append(Run(folder, flags_of(folder), steps, seconds, means))
    if not runs:
        raise SystemExit(f"there is no run with an episode in {' '.join(folders)}")
    return runs


# ---- Curves ----
def differing(runs: list[Run]) -> list[str]:
    """The flags in which runs of an environment differ."""
    values = {}  # environment and flag -> value, in JSON
    found = {}  # names of flags
    for run in runs:
        for name, value in run.flags.items():
            text = json.dumps(value)
            if text != values.setdefault((run.env_id, name), text) and name not in SAME:
                found[name] = True
    return list(found)


def curves_of(runs: list[Run], by: Iterable[str]) -> dict[tuple[str, str], list[Run]]:
    """(environment, values of the flags `by`) -> its runs. SystemExit for an unknown flag."""
    differ = differing(runs)
    names = [name.lstrip("-").replace("-", "_") for name in by] or differ
    curves = {}
    for run in runs:
        label = []
        for name in names:
            if name not in run.flags:
                others = f"the runs differ in {', '.join(differ) or 'no flag'}"
                raise SystemExit(f"--by {name}: {run.folder} has no such flag; {others}")
            label.append(f"{name} {run.flags[name]}")
        curves.setdefault((run.env_id, ", ".join(label) or "all"), []).append(run)
    return curves


def on_grid(points: list[np.ndarray], means: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(x [points], means [runs, points]) from where all runs have a mean. A run that ends earlier
    than the longest keeps its last one."""
    grid = np.linspace(0, max(own[-1] for own in points), NUM_POINTS + 1)[1:]
    grid = grid[grid >= max(own[0] for own in points)]
    rows = []
    for own, values in zip(points, means):
        rows.append(values[np.searchsorted(own, grid, side="right") - 1])
    return grid, np.array(rows)


def band(runs: list[Run], axis: str) -> np.ndarray:
    """x, mean and standard deviation over the runs, [3, points], against "steps" or "seconds"."""
    points = [getattr(run, axis) for run in runs]
    grid, rows = on_grid(points, [run.means for run in runs])
    return np.stack([grid, rows.mean(0), rows.std(0)])


def write_curves(path: Path, curves: dict) -> None:
    """A row per curve, axis and point."""
    with open(path, "w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["env_id", "curve", "axis", "x", "mean", "deviation", "runs"])
        for key, runs in curves.items():
            for axis in AXES:
                for point in band(runs, axis).T:
                    numbers = [f"{value:.6g}" for value in point]
                    lines.writerow(list(key) + [axis] + numbers + [len(runs)])


def table(curves: dict, window: int) -> str:
    """A markdown table with a row per curve."""
    last = f"return of the last {window} episodes"
    lines = [f"| environment | curve | runs | steps | seconds | {last} |", "|" + " --- |" * 6]
    for (env_id, label), runs in curves.items():
        ends = np.array([run.means[-1] for run in runs])
        steps = np.mean([run.steps[-1] for run in runs])
        seconds = np.mean([run.seconds[-1] for run in runs])
        value = f"{ends.mean():.5g} ± {ends.std():.2g}"
        lines.append(
            f"| {env_id} | {label} | {len(runs)} | {steps:.0f} | {seconds:.0f} | {value} |"
        )
    return "\n".join(lines)


def draw(path: Path, curves: dict, window: int) -> None:
    """Two pictures per environment, against steps and against seconds, which say what they show.
    SystemExit without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        done = "curves.csv and table.md are written"
        raise SystemExit(f"curves.png needs matplotlib: pip install matplotlib ({done})") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    envs = list(dict.fromkeys(env_id for env_id, _ in curves))
    size = 10, 3.5 * len(envs)
    figure, axes = pyplot.subplots(len(envs), 2, squeeze=False, figsize=size, layout="constrained")
    for (env_id, label), runs in curves.items():
        for axis, name in zip(axes[envs.index(env_id)], AXES):
            grid, mean, deviation = band(runs, name)
            (line,) = axis.plot(grid, mean, label=f"{label}, runs: {len(runs)}")
            colour = line.get_color()
            axis.fill_between(grid, mean - deviation, mean + deviation, color=colour, alpha=0.2)
            axis.set(xlabel=name, ylabel="return", title=env_id)
            axis.legend(fontsize=8)
    note = f"mean and standard deviation over runs of the last {window} episodes' mean return"
    figure.supxlabel(note, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(args: Args) -> None:
    curves = curves_of(find(args.runs, args.episodes), args.by)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    write_curves(out / "curves.csv", curves)
    text = table(curves, args.episodes)
    (out / "table.md").write_text(text + "\n")
    print(text)
    draw(out / "curves.png", curves, args.episodes)
    print(f"in {out}: curves.csv, curves.png, table.md")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
