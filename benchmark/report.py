"""The table and the picture of benchmark/results/TABLE from its runs.csv and curves.csv.gz
(benchmark/run.py) and nothing else.

    python benchmark/report.py --table stateless_cartpole --target 475 \
        --systems "LSTM=lstm_*" "RLlib=rllib_*"

Writes TABLE/table.md and table.png: learning curves against steps
(sample efficiency) and against wall time, the interquartile mean over seeds with its 95% bootstrap
interval (a curve of fewer than three seeds has no band). That needs scipy, of
benchmark/requirements.txt; the table (--no-plot) does not.

The curve of a peer has the columns step, wall_seconds and mean_return_100 instead of one row per
episode.
"""

import os
import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import tables  # noqa: E402
from tables import markdown, read  # noqa: E402

from cleanrl_graph.services.plot import Look, draw, running_mean  # noqa: E402

RESAMPLES = 2000


@dataclass
class Args:
    table: str
    """folder in --results"""
    systems: tuple[str, ...] = ("*",)
    """LABEL=PATTERN or PANEL|LABEL=PATTERN of the runs of the table, or of OTHER/PATTERN of another
    one; PANEL is the environment by default; a PATTERN alone takes the names of the runs as
    labels"""
    skip: bool = False
    """if toggled, leave out systems without a finished run"""
    columns: tuple[str, ...] = ("steps", "SPS", "final", "greedy")
    """columns of the table: steps, SPS, minutes, final, best, MMER, greedy, and "greedy 0", "greedy
    1" and so on for the groups z_0, z_1 or task_0, task_1 of the evaluation ("greedy NAME" for a
    group of another name)"""
    target: float | None = None
    """adds the steps and seconds until the mean of --episodes reaches it"""
    target_panel: str | None = None
    """the panel that the target is of; by default it is of all"""
    episodes: int = 100
    """episodes of a running mean"""
    scale: float = 1.0
    """returns are shown as scale * return + --offset"""
    offset: float = 0.0
    """see --scale"""
    beside: str | None = None
    """csv in TABLE with the columns panel, label and further ones, which are put beside the rows of
    the table; of a csv with a column table, the rows of this one"""
    bounds: str | None = None
    """the same with the columns panel, low, high: adds means over tasks of the normalised MMER"""
    note: tuple[str, ...] = ()
    """paragraphs above the table"""
    ylabel: str = "episodic return"
    """of the picture"""
    reference: tuple[float, str] | None = None
    """height and name of a horizontal line"""
    log_seconds: bool = False
    """logarithmic axes of steps and wall time"""
    plot: bool = True
    """if toggled, draw the picture"""
    results: str = str(tables.RESULTS)
    """folder of the tables"""


class Run(NamedTuple):
    """After `steps` and `seconds`: the mean of the last episodes. `ended` and `returns` are the
    number of episodes of each row and their mean (of a peer: None)."""

    panel: str
    label: str
    seed: str
    steps: np.ndarray
    seconds: np.ndarray
    means: np.ndarray
    returns: np.ndarray | None
    ended: np.ndarray | None
    settings: dict
    is_marked: bool = False  # no evaluations


# ---- Files ----
def load(
    key: str, settings: dict, rows: list[dict], panel: str | None, label: str | None, args: Args
) -> Run | None:
    """None if no episode has ended."""
    column = lambda name: np.array([float(row[name]) for row in rows])
    shown = lambda values: args.scale * values + args.offset
    if not rows:
        return None
    if "mean_return_100" in rows[0]:
        curve = column("step"), column("wall_seconds"), shown(column("mean_return_100"))
        keep = np.isfinite(curve[2])
        name, _, seed = key.rpartition("_")
        return Run(panel or "", label or name, seed, *(x[keep] for x in curve), None, None, {})
    returns, ended = shown(column("return")), column("episodes")
    env = re.sub(r"^popgym-|-v\d+$", "", settings["env_id"].split(":")[-1])
    names = env if panel is None else panel, label or settings["name"], str(settings["seed"])
    means = running_mean(returns, ended, args.episodes)
    return Run(*names, column("step"), column("wall_time"), means, returns, ended, settings)


def load_all(args: Args) -> list[Run]:
    """Raises ValueError for a pattern without a finished run, but with --skip."""
    runs = []
    known = {}  # folder of a table -> its finished runs and their curves
    for system in args.systems:
        name, _, pattern = system.rpartition("=")
        other, _, pattern = pattern.rpartition("/")
        panel, bar, label = name.rpartition("|")
        folder = Path(args.results) / args.table
        if other:
            folder = tables.place(args.results, other)
        if folder not in known:
            known[folder] = tables.finished(folder), tables.curves_of(folder)
        finished, curves = known[folder]
        keys = [key for key in finished if fnmatchcase(key, pattern)]
        names = panel if bar else None, label
        found = [load(key, finished[key], curves.get(key, []), *names, args) for key in keys]
        if not any(found) and not args.skip:
            raise ValueError(f"{args.table}: no finished run matches {pattern}")
        runs += [run for run in found if run]
    if len({run.panel for run in runs if run.settings}) == 1:
        runs = [run._replace(panel="") for run in runs]
    return runs


# ---- Figures ----
def iqm(values: np.ndarray) -> np.ndarray:
    """Interquartile mean over axis 0: without the lowest and highest quarter, rounded down as in
    scipy's trim_mean."""
    cut = len(values) // 4
    return np.sort(values, 0)[cut : len(values) - cut].mean(0)


def mmer(run: Run, iteration: int = 65_536) -> float:
    """Maximum over iterations of the mean return of the episodes that ended in it (POPGym)."""
    index = ((run.steps - 1) // iteration).astype(int)
    num, total = np.bincount(index, run.ended), np.bincount(index, run.ended * run.returns)
    return (total[num > 0] / num[num > 0]).max()


def gaps(table: dict[str, list]) -> dict[str, float]:
    """Mean gap to best_known in percent of every cost of an evaluation with a suite; of others
    none."""
    fixed = ("instance", "group", "best_known", "lower_bound", "cut")
    best = np.array(table.get("best_known", []))
    costs = {name: np.array(cost) for name, cost in table.items() if name not in fixed}
    return {name: float(np.mean(100 * (x / best - 1))) for name, x in costs.items() if len(best)}


def stats(run: Run, args: Args) -> dict[str, float]:
    """The figures of a run; inf for a target that was not reached."""
    out = {
        "steps": run.steps[-1],
        "minutes": run.seconds[-1] / 60,
        "SPS": run.steps[-1] / run.seconds[-1],
        "final": run.means[-1],
    }
    valid = run.means
    if run.ended is not None:
        valid = np.where(np.cumsum(run.ended) >= args.episodes, run.means, -np.inf)
    out["best"] = valid.max() if np.isfinite(valid.max()) else run.means.max()
    if run.ended is not None:
        out["MMER"] = mmer(run)
    played = run.settings.get("eval") or {}
    if "return" in played:
        out["greedy"] = args.scale * np.mean(played["return"]) + args.offset
        of_each = {}
        groups = played.get("task", played.get("group", []))
        for group, ret in zip(groups, played["return"]):
            of_each.setdefault(re.sub(r"^(z|task)_(?=\d)", "", str(group)), []).append(ret)
        for group, ret in of_each.items():
            out[f"greedy {group}"] = args.scale * np.mean(ret) + args.offset
    if args.target is not None:
        hit = np.flatnonzero(valid >= args.target)
        out["steps to target"] = run.steps[hit[0]] if len(hit) else np.inf
        out["seconds to target"] = run.seconds[hit[0]] if len(hit) else np.inf
    return out


def mean_and_error(values: list[float]) -> str:
    """Mean ± standard error over seeds, with the same number of digits."""
    if not values:
        return ""
    mean = np.mean(values)
    digits = 0 if abs(mean) >= 1000 else 1 if abs(mean) >= 20 else 3
    if len(values) == 1:
        return f"{mean:,.{digits}f}"
    return f"{mean:,.{digits}f} ± {np.std(values, ddof=1) / np.sqrt(len(values)):,.{digits}f}"


def times(values: list[float], ends: list[float], digits: int) -> str:
    """Median over seeds, and each seed."""
    if np.isinf(values).all():
        least_and_most = [f"{end:,.0f}" for end in (min(ends), max(ends))]
        return "not in " + " to ".join(dict.fromkeys(least_and_most))
    text = lambda value, other: f"{value:,.{digits}f}" if np.isfinite(value) else other
    each = [text(value, f"not in {end:,.0f}") for value, end in zip(values, ends)]
    if len(each) == 1:
        return each[0]
    return f"{text(np.median(values), 'not reached')} ({' / '.join(each)})"


MEANING = {
    "steps": "steps: environment steps of the training",
    "SPS": "SPS: steps per second of training, everything included",
    "final": "final: mean return of the last {episodes} episodes of the training (sampled actions)",
    "best": "best: the highest mean return of {episodes} consecutive episodes of the training",
    "MMER": "MMER: the highest mean return of an iteration of 65,536 steps",
    "greedy": "greedy: mean return of the evaluation after the training (greedy actions)",
}


def rows_beside(args: Args, name: str) -> list[dict]:
    """The rows of a csv in the folder of the table, or of this table in a csv of several ones."""
    rows = read(tables.place(args.results, os.path.normpath(f"{args.table}/{name}")))
    return [row for row in rows if row.pop("table", args.table) == args.table]


def table(groups: dict[tuple, list[Run]], args: Args) -> list[list[str]]:
    """Header and rows: one per panel and system."""
    extra, rows = rows_beside(args, args.beside) if args.beside else [], []
    titles = [name for name in (extra[0] if extra else {}) if name not in ("panel", "label")]
    more = {(row["panel"], row["label"]): row for row in extra}
    targets = ["steps to target", "seconds to target"] if args.target is not None else []
    for key in [*groups, *(key for key in more if key not in groups)]:
        runs = groups.get(key, [])
        figures = [stats(run, args) for run in runs]
        row = dict(zip(("task", "system"), key)) | {"seeds": str(len(runs) or "")}
        for name in args.columns:
            values = [figure[name] for figure in figures if name in figure]
            is_whole = name in ("steps", "SPS") and values
            row[name] = f"{np.mean(values):,.0f}" if is_whole else mean_and_error(values)
        for name, end, digits in zip(targets, ("steps", "minutes"), (0, 1)):
            ends = [figure[end] * (60 if end == "minutes" else 1) for figure in figures]
            row[name] = times([figure[name] for figure in figures], ends, digits) if figures else ""
            if args.target_panel not in (None, key[0]):
                row[name] = ""
        rows.append(row | {title: more.get(key, {}).get(title, "") for title in titles})
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    title = lambda name: name.replace("target", f"{args.target:g}") if name in targets else name
    return [[title(name) for name in names], *([row[name] for name in names] for row in rows)]


def aggregate(groups: dict[tuple, list[Run]], args: Args) -> list[list[str]]:
    """Mean and interquartile mean over all tasks and seeds of (x - low) / (high - low), for systems
    with all tasks."""
    bounds = {}
    for row in rows_beside(args, args.bounds):
        bounds[row["panel"]] = float(row["low"]), float(row["high"])
    rows, scores = [["system", "tasks", "mean of normalised MMER", "interquartile mean"]], {}
    for (panel, label), runs in groups.items():
        if panel in bounds and runs[0].ended is not None:
            low, high = bounds[panel]
            scores.setdefault(label, []).append([(mmer(run) - low) / (high - low) for run in runs])
    for label, tasks in scores.items():
        if len(tasks) == len(bounds):
            values = np.concatenate(tasks)
            rows.append([label, str(len(tasks)), f"{values.mean():.3f}", f"{iqm(values):.3f}"])
    return rows


def gap_table(groups: dict[tuple, list[Run]]) -> list[list[str]]:
    """One row per cost of the --eval-suite, one column per seed."""
    runs = [run for runs in groups.values() for run in runs]
    found = [gaps(run.settings.get("eval") or {}) for run in runs]
    runs, columns = [run for run, own in zip(runs, found) if own], [own for own in found if own]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [["mean gap to the best known, %"]]
    rows[0] += [f"{run.label}, seed {run.seed}" for run in runs]
    for name in names:
        cells = [f"{column[name]:.1f}" if name in column else "" for column in columns]
        rows.append([name, *cells])
    return rows


def document(groups: dict[tuple, list[Run]], args: Args) -> str:
    settings = [run.settings for runs in groups.values() for run in runs if run.settings]
    parts = [f"    bash benchmark/{re.sub('_(quick|long)$', '', args.table)}.sh"]
    if settings:
        parts += [tables.about(settings)]
    parts += args.note
    main = table(groups, args)
    parts += [markdown(main)]
    meaning = [MEANING[name].format(episodes=args.episodes) for name in main[0] if name in MEANING]
    if args.target is not None:
        meaning.append(
            f"steps and seconds of training until the mean return of {args.episodes} episodes is "
            f"{args.target:g}: median (each seed)"
        )
    parts += [f"± is the standard error over seeds. {'; '.join(meaning)}."]
    if args.bounds:
        parts += [markdown(aggregate(groups, args))]
    if len(gap_table(groups)) > 1:
        parts += [markdown(gap_table(groups))]
    if args.plot:
        parts += ["![learning curves](table.png)", caption(groups, args)]
    commands = dict.fromkeys(re.sub(r" --seed \d+", "", entry["command"]) for entry in settings)
    parts += ["Commands (with --seed):", "\n".join(f"    {command}" for command in commands)]
    return "\n\n".join(parts) + "\n"


# ---- Picture ----
def caption(groups: dict[tuple, list[Run]], args: Args) -> str:
    """What the picture shows."""
    seeds = {}  # of each label
    for (_, label), runs in groups.items():
        seeds.setdefault(label, []).append(len(runs))
    words = {}
    for label, nums in seeds.items():
        words[label] = " to ".join(map(str, dict.fromkeys([min(nums), max(nums)])))
    one = set(words.values())
    if one == {"1"}:
        return f"Lines: mean return of the last {args.episodes} episodes; one seed."
    each = "; ".join(f"{num} of {label}" for label, num in words.items())
    return (
        f"Lines: interquartile mean over seeds of the mean return of the last {args.episodes} "
        "episodes; bands, from three seeds on: its 95% bootstrap interval. A run that ends earlier "
        f"keeps its last value. Seeds: {one.pop() if len(one) == 1 else each}."
    )


def interval(values: np.ndarray) -> np.ndarray:
    """[2, points]: 95% percentile bootstrap interval of the interquartile mean over runs."""
    from scipy.stats import bootstrap, trim_mean

    mean, rng = (lambda x, axis: trim_mean(x, 0.25, axis)), np.random.default_rng(0)
    options = dict(axis=0, vectorized=True, batch=100, n_resamples=RESAMPLES, method="percentile")
    return np.array(bootstrap((values,), mean, rng=rng, **options).confidence_interval)


def band(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Interquartile mean and its interval; no interval of fewer than three runs."""
    if len(rows) < 3:
        nothing = np.full(rows.shape[1], np.nan)
        return iqm(rows), nothing, nothing
    return iqm(rows), *interval(rows)


def look_of(groups: dict[tuple, list[Run]], args: Args) -> Look:
    envs = [run.settings["env_id"] for runs in groups.values() for run in runs if run.settings]
    task = max([env_id.split(":")[-1] for env_id in envs], default="")
    lines = [(*args.reference, None)] if args.reference else []
    if args.target is not None:
        lines.append((args.target, "target", args.target_panel))
    return Look(args.ylabel, task, caption(groups, args), tuple(lines), args.log_seconds)


def plot(groups: dict[tuple, list[Run]], args: Args) -> None:
    path = Path(args.results) / args.table / "table.png"
    draw(path, groups, band, look_of(groups, args))


def groups_of(args: Args) -> dict[tuple[str, str], list[Run]]:
    """(panel, label) -> its runs, panel by panel."""
    groups, runs = {}, load_all(args)
    panels = list(dict.fromkeys(run.panel for run in runs))
    for run in sorted(runs, key=lambda run: panels.index(run.panel)):
        groups.setdefault((run.panel, run.label), []).append(run)
    return groups


def main(args: Args) -> None:
    groups = groups_of(args)
    folder = Path(args.results) / args.table
    text = document(groups, args)
    (folder / "table.md").write_text(text)
    if args.plot:
        plot(groups, args)
    print(f"{text}\n{folder / 'table.md'}")


if __name__ == "__main__":
    main(tyro.cli(Args))
