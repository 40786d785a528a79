"""cleanrl_graph, curves and a table of any runs, from any folder.

    python -m cleanrl_graph.services.plot runs --by learning_rate --out curves

It finds all runs in these folders. Runs of an environment that are alike in the flags of --by are
one curve: after each step, and each second, the mean return of the last --episodes episodes, as
mean and standard deviation over its runs, the seeds; the deviation is that of a sample (n - 1), and
a single run has none. Without --by these are all flags in which the runs differ. Runs with other
--env-kwargs or --wrap are never one curve, and a line names the other flags in which runs of a
curve differ. It writes curves.csv, table.md and curves.png.

With --evaluations return, or another column of evaluations.csv, the curves are what a run with
--eval-every measured while it trained, as it is; each evaluation is a point.

A run has args.json and episodes.csv where services trained it. Of a script alone the flags are what
the name of the folder says, and episodes are the values of TensorBoard's log: a whole script has
one for each rollout, the mean of its episodes, so --episodes 10 is then a mean over ten rollouts.
"""

import csv
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from cleanrl_graph.services.arguments import FREE
from cleanrl_graph.services.csv_file import read

# Flags that make no other curve, and what args.json has beside flags
SAME = FREE - {"exp_name"} | {"seed", "env_id", "versions", "commit"}
TASK = ("env_kwargs", "wrap")  # flags that make another task of an environment
NUM_POINTS = 150  # of a curve
AXES = ("steps", "seconds")
UNITS = {1000: "environment steps (thousands)", 60: "minutes of training", 1: "seconds of training"}
# Okabe and Ito
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #999999".split()


@dataclass
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """folders of runs, or folders with such folders in them"""
    by: tuple[str, ...] = ()
    """flags whose values are told apart, as learning_rate; none: all that differ"""
    evaluations: str | None = None
    """column of evaluations.csv (--eval-every), as return or gap, which is drawn in the place of
    the training's returns"""
    episodes: int = 100
    """episodes of a running mean"""
    out: str = "."
    """folder of curves.csv, curves.png and table.md"""


class Run(NamedTuple):
    """After each episode, or evaluation: `steps` and `seconds` of the training, the mean return of
    the last episodes, or what was measured, which `is_marked` in a picture."""

    folder: Path
    flags: dict
    steps: np.ndarray
    seconds: np.ndarray
    means: np.ndarray
    is_marked: bool = False

    @property
    def env_id(self) -> str:
        return str(self.flags.get("env_id"))


# ---- What a run left ----
def event_files(folder: Path) -> list[Path]:
    """TensorBoard's files below `folder`, the oldest first."""
    return sorted(folder.rglob("events.out.tfevents.*"), key=lambda path: path.name)


def values_of(path: Path) -> Iterator[tuple[str, int, float, float]]:
    """(tag, step, time, value) of all that a file of TensorBoard holds."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            yield value.tag, event.step, event.wall_time, value.simple_value


def scalars(folder: Path, *tags: str) -> Iterator[tuple[str, int, float, float]]:
    """(tag, step, time, value) of these tags, from all files below `folder`, the oldest first."""
    for path in event_files(folder):
        yield from (row for row in values_of(path) if row[0] in tags)


def events_of(folder: Path) -> tuple[list[tuple], list[tuple]]:
    """(step, seconds of training, return, length) of every episode and (step, SPS) of every update.
    Without episodes.csv, episodes are what the log has, see above. A newer event file replaces what
    older ones hold after the last update before its first step; its time goes on from there."""
    episodes = []
    updates = []  # (step, SPS, seconds)
    for path in event_files(folder):
        values = {"episodic_return": [], "episodic_length": [], "SPS": []}
        start = None
        for tag, step, time, value in values_of(path):
            start = time if start is None else start
            name = tag.removeprefix("charts/")
            if name in values:
                values[name].append((step, time - start, value))
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
    return rows_of_csv(folder) or episodes, [row[:2] for row in updates]


def episodes_of(folder: Path) -> list[tuple]:
    """(step, seconds of training, return, length) of every episode, as `events_of` has them."""
    return rows_of_csv(folder) or events_of(folder)[0]


def rows_of_csv(folder: Path) -> list[tuple]:
    """Those in the episodes.csv of the newest run below `folder`; none if it has no such file."""
    rows = []
    for path in event_files(folder)[-1:]:
        for row in read(path.with_name("episodes.csv")):
            numbers = [float(row[name]) for name in ("seconds", "return", "length")]
            rows.append((int(row["step"]), *numbers))
    return rows


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


def evaluations_of(folder: Path, name: str) -> list[tuple]:
    """(step, seconds of training, value) of each evaluation that has this column."""
    rows = read(folder / "evaluations.csv")
    return [
        tuple(float(row[k]) for k in ("step", "seconds", name)) for row in rows if row.get(name)
    ]


def find(folders: Iterable[str], window: int, evaluations: str | None = None) -> list[Run]:
    """The runs in these folders, with their episodes or a column of their evaluations. SystemExit
    if there are none; those without are said."""
    what = f"evaluation with '{evaluations}'" if evaluations else "episode"
    found = set()
    for folder in folders:
        found |= {path.parent for path in event_files(Path(folder))}
    runs = []
    for folder in sorted(found):
        points = evaluations_of(folder, evaluations) if evaluations else episodes_of(folder)
        if not points:
            if flags_of(folder).get("total_timesteps") != 0:  # 0: only an evaluation
                hint = " (--eval-every makes them)" if evaluations else ""
                print(f"{folder}: no {what} has ended{hint}", file=sys.stderr)
            continue
        steps, seconds, values = np.array(points, float).T[:3]
        means = values if evaluations else running_mean(values, np.ones(len(values)), window)
        is_marked = evaluations is not None
        runs.append(Run(folder, flags_of(folder), steps, seconds, means, is_marked))
    if not runs:
        raise SystemExit(f"there is no run with an {what} in {' '.join(folders)}")
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
    """(environment, values of the flags `by`, and of --env-kwargs and --wrap where runs of an
    environment differ in them) -> its runs. Says in which other flags runs of a curve differ.
    SystemExit for an unknown flag."""
    differ = differing(runs)
    names = [name.lstrip("-").replace("-", "_") for name in by] or differ
    tasks = [name for name in TASK if name in differ and name not in names]
    curves = {}
    for run in runs:
        label = []
        for name in tasks:
            if name in run.flags:  # not of a script alone
                label.append(f"{name} {run.flags[name]}")
        for name in names:
            if name not in run.flags:
                others = f"the runs differ in {', '.join(differ) or 'no flag'}"
                raise SystemExit(f"--by {name}: {run.folder} has no such flag; {others}")
            label.append(f"{name} {run.flags[name]}")
        name = ", ".join(label) or str(run.flags.get("exp_name", "all"))
        curves.setdefault((run.env_id, name), []).append(run)
    for (env_id, label), own in curves.items():
        merged = differing(own)
        if merged:
            print(f"{env_id}, {label}: its runs differ in {', '.join(merged)}", file=sys.stderr)
        most = max(run.steps[-1] for run in own)
        for run in own:
            last = run.steps[-1]
            if last < 0.9 * most:  # it was stopped, or has longer episodes
                ends = f"ends at step {last:,.0f} of {most:,.0f}, its last value counts on"
                print(f"{run.folder}: {ends}", file=sys.stderr)
    return curves


def on_grid(runs: list[Run], axis: str) -> tuple[np.ndarray, np.ndarray]:
    """(x [points], means [runs, points]) from where all runs have a mean. A run that ends earlier
    than the longest keeps its last one. The points of evaluations are their own."""
    points = [getattr(run, axis) for run in runs]
    if runs[0].is_marked:
        grid = np.unique(np.concatenate(points))
    else:
        grid = np.linspace(0, max(own[-1] for own in points), NUM_POINTS + 1)[1:]
    grid = grid[grid >= max(own[0] for own in points)]
    rows = []
    for own, run in zip(points, runs):
        rows.append(run.means[np.searchsorted(own, grid, side="right") - 1])
    return grid, np.array(rows)


def mean_and_deviation(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over axis 0, that of a sample; nan for a single row."""
    if len(rows) == 1:
        return rows[0], np.full_like(rows[0], np.nan)
    return rows.mean(0), rows.std(0, ddof=1)


def around_mean(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Line, lower and upper border of the band of a curve from [runs, points]."""
    mean, deviation = mean_and_deviation(rows)
    return mean, mean - deviation, mean + deviation


def write_curves(path: Path, curves: dict) -> None:
    """A row per curve, axis and point."""
    with open(path, "w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["env_id", "curve", "axis", "x", "mean", "deviation", "runs"])
        for key, runs in curves.items():
            for axis in AXES:
                grid, rows = on_grid(runs, axis)
                for x, mean, deviation in zip(grid, *mean_and_deviation(rows)):
                    spread = "" if np.isnan(deviation) else f"{deviation:.6g}"
                    lines.writerow([*key, axis, f"{x:.10g}", f"{mean:.6g}", spread, len(runs)])


def table(curves: dict, last: str, what: str = "episode") -> str:
    """A markdown table with a row per curve, whose last value is called `last`, and where it was:
    mean step and second of the last `what`."""
    at = f"last {what} at step | at second"
    lines = [f"| environment | curve | runs | {at} | {last} |", "|" + " --- |" * 6]
    for (env_id, label), runs in curves.items():
        ends = np.array([run.means[-1] for run in runs])
        steps = np.mean([run.steps[-1] for run in runs])
        seconds = np.mean([run.seconds[-1] for run in runs])
        mean, deviation = mean_and_deviation(ends)
        value = f"{mean:.5g}" + f" ± {deviation:.2g}" * (len(runs) > 1)
        lines.append(
            f"| {env_id} | {label} | {len(runs)} | {steps:.0f} | {seconds:.0f} | {value} |"
        )
    return "\n".join(lines)


class Look(NamedTuple):
    """What a picture shows beside its curves."""

    ylabel: str = "return"
    title: str = ""  # of a picture with one panel that has no name
    note: str = ""  # below
    lines: tuple[tuple[float, str, str | None], ...] = ()  # (height, name, panel or None: all)
    is_log: bool = False  # logarithmic steps and seconds


def draw_curve(
    axis: Any, runs: list, x: str, unit: float, band: Callable, colour: str, style: str
) -> None:
    """Draws a line and its band from the step or second on at which all runs have a mean."""
    grid, rows = on_grid(runs, x)
    line, low, high = band(rows)
    look = dict(color=colour, linestyle=style, linewidth=1.6)
    axis.plot(grid / unit, line, marker="." if runs[0].is_marked else None, **look)
    axis.fill_between(grid / unit, low, high, color=colour, alpha=0.18, linewidth=0)


def draw_lines(axis: Any, panel: str, look: Look, is_named: bool) -> None:
    """Horizontal lines, named at one end."""
    for height, name, of_panel in look.lines:
        if of_panel not in (None, panel):
            continue
        axis.axhline(height, color="black", linewidth=0.8, linestyle=":")
        if is_named:
            at, dy, ha, va = (0.01, 1, "left", "bottom") if look.is_log else (1, -3, "right", "top")
            places = dict(xycoords=("axes fraction", "data"), textcoords="offset points")
            axis.annotate(name, (at, height), (0, dy), **places, fontsize=7.5, ha=ha, va=va)


def draw(path: Path, curves: dict[tuple[str, str], list], band: Callable, look: Look) -> None:
    """A picture with two axes per panel, steps and seconds. `curves` has (panel, label) -> runs;
    `band` makes line, lower and upper border of [runs, points]."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(panel for panel, _ in curves))
    labels = list(dict.fromkeys(label for _, label in curves))
    styles = {}
    for k, label in enumerate(labels):
        styles[label] = COLOURS[k % len(COLOURS)], "-" if k < len(COLOURS) else "--"
    beside_each_other = 1 if len(panels) <= 3 else 2
    num_rows = -(-len(panels) // beside_each_other)
    width = 9.6 if len(panels) == 1 else 7.6 * beside_each_other
    size = width, 3.7 if num_rows == 1 else 2.5 * num_rows + 0.7
    figure, axes = pyplot.subplots(
        num_rows, 2 * beside_each_other, figsize=size, layout="constrained", squeeze=False
    )
    pairs = axes.reshape(-1, 2)
    for axis in pairs[len(panels) :].flat:
        axis.set_visible(False)
    for panel, (left, right) in zip(panels, pairs):
        own = {label: runs for (name, label), runs in curves.items() if name == panel}
        longest = max(run.seconds[-1] for runs in own.values() for run in runs)
        units = {"steps": 1000, "seconds": 60 if longest > 100 else 1}
        right.sharey(left)
        for axis, (x, unit) in zip((left, right), units.items()):
            for label, runs in own.items():
                draw_curve(axis, runs, x, unit, band, *styles[label])
            axis.set(xlabel=UNITS[unit])
            if look.is_log:
                axis.set_xscale("log")
                axis.xaxis.set_major_formatter("{x:g}")
            axis.grid(alpha=0.25, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
            draw_lines(axis, panel, look, axis is right)
        left.set(ylabel=look.ylabel)
        left.set_title(panel or look.title, loc="left", fontsize=10)
        right.tick_params(labelleft=False)
    if len(panels) == 1 or len(labels) > 1:
        handles = []
        for label, (colour, style) in styles.items():
            handles.append(pyplot.Line2D([], [], color=colour, linestyle=style, label=label))
        fit = 130 // (max(map(len, labels)) + 8)  # labels side by side
        place = dict(loc="outside upper center", ncols=max(1, min(4, fit, len(labels))))
        if len(panels) == 1:
            place = dict(loc="outside right center")
        figure.legend(handles=handles, frameon=False, fontsize=9, **place)
    figure.supxlabel("\n".join(textwrap.wrap(look.note, int(16 * width))), fontsize=7.5)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(args: Args) -> None:
    curves = curves_of(find(args.runs, args.episodes, args.evaluations), args.by)
    what = "episode"
    last = f"return of the last {args.episodes} episodes"
    drawn = f"the mean {last}"
    if args.evaluations:
        what = "evaluation"
        last = drawn = f"{args.evaluations} of the last evaluation"
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    write_curves(out / "curves.csv", curves)
    text = table(curves, last, what)
    (out / "table.md").write_text(text + "\n")
    print(text)
    counts = dict.fromkeys(str(len(runs)) for runs in curves.values())
    note = (
        f"Lines: mean over runs of {drawn}; bands: standard deviation over runs. Runs of a curve: "
        f"{', '.join(counts)}."
    )
    ylabel = args.evaluations or "return"
    draw(out / "curves.png", curves, around_mean, Look(ylabel=ylabel, note=note))
    print(f"in {out}: curves.csv, curves.png, table.md")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
