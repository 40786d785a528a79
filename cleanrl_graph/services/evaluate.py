"""cleanrl_graph, what a trained agent is worth. A run ends with a table, a row for each episode of
--eval-episodes or instance of --eval-suite, in eval.md and eval.csv; --capture-video adds
episode.gif.

The functions are handed `play(makers, greedy)`, which returns the last info of the first episode in
each environment, and `make(**more)`, which makes the environment of the flags with more keyword
arguments.
"""

import contextlib
import csv
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from PIL import Image

from cleanrl_graph.services import process
from cleanrl_graph.services.check import close, entries
from cleanrl_graph.services.process import whole

CUT = ("cut", "sampled cut")  # columns that count episodes
# columns without a mean; the last row counts what was cut
NAMES = ("instance", "episode", "task", "group", "best_known", "lower_bound", *CUT)
METRICS = ("metrics", "sampled metrics")  # names of the numbers of a row that are no costs
OWN = ("length", "return", "sampled length", "sampled return")  # no costs: they have no gap
GAP = " gap %"  # ends the name of a column that compares costs with the best known
SHOWN = 20  # rows that are printed; of more the means are


# ---- What the flags ask for ----
def check(make: Callable[..., gym.Env], args: Any) -> None:
    """SystemExit before the training for what could not be evaluated after it."""
    make = partial(make, args, 0)
    with contextlib.chdir("."):  # an environment may change the current folder
        if args.eval_suite:
            suite_entries(make, args)
        if args.capture_video:
            check_video(make)


def evaluate(run: Any, play: Callable, make: Callable[..., gym.Env]) -> list[dict]:
    """Plays what the flags of a Run say, --eval-suite or --eval-episodes of each entry of
    --env-kwargs, saves table and video. Returns the rows of the table. After an error the table has
    the rows before it. An episode of --eval-episodes has at most ten times the steps of the longest
    one of the training."""
    args = run.args
    most = args.eval_max_steps
    if run.longest and not args.eval_suite:
        args.eval_max_steps = min(most, 10 * run.longest)
    if args.eval_suite:
        played = run_suite(play, partial(make, args, 0), args)
    else:
        played = run_episodes(play, make, args)
    rows = []
    try:
        for row in played:
            rows.append(row)
    finally:
        if rows:
            save_table(rows, run.folder, run.writer, run.global_step)
            print_cut(rows, args)
        args.eval_max_steps = most
    if args.capture_video:
        save_video(str(Path(run.folder, "episode.gif")), play, partial(make, args, 0))
    return rows


def run_episodes(play: Callable, make: Callable[..., gym.Env], args: Any) -> Iterator[dict]:
    """A row per greedy episode, --eval-episodes of each entry of --env-kwargs. Its "task" is
    "task_k" of entry k, if there are several; its "group" info["group"] at the episode's end, if
    there is one. "cut" is 1 where it did not end. If one did not, as many episodes with the same
    seeds are sampled: "sampled return" and so on are theirs."""
    num_tasks = len(entries(args))
    for k in range(num_tasks):
        makers = [partial(make, args, k)] * args.eval_episodes
        infos = play(makers, True) if makers else []
        sampled = []
        if any("cut" in info for info in infos):
            sampled = play(makers, False)
        for i, info in enumerate(infos):
            row = {"episode": i}
            if num_tasks > 1:
                row["task"] = f"task_{k}"
            if info.get("group") is not None:
                row["group"] = info["group"]
            row |= outcome(info)
            if sampled:
                row |= outcome(sampled[i], "sampled ")
            yield row


def outcome(info: dict, kind: str = "") -> dict:
    """Length and return of an episode, "cut" if it did not end, and what else is in info["eval"]
    and info["metrics"], with names of this kind."""
    row = {f"{kind}length": info["episode"]["l"], f"{kind}return": info["episode"]["r"]}
    if "cut" in info:
        row[f"{kind}cut"] = 1
    for name, value in info.get("eval", {}).items():
        if not kind or name not in NAMES:  # a sampled episode has the instance of the greedy one
            row.setdefault(f"{kind}{name}", value)
    return row | metrics_of(info, kind)


def print_cut(rows: list[dict], args: Any) -> None:
    """Says how many episodes did not end, if any did not."""
    mean = mean_of(rows)
    if not mean.get("cut"):
        return
    num = len(rows)
    text = f"{num} greedy episodes"
    if args.eval_suite:
        text = f"{num * (1 + args.eval_samples)} episodes"
    elif "sampled return" in mean:
        text += f", and {mean.get('sampled cut', 0)} sampled ones"
    print(f"did not end in {args.eval_max_steps:,} steps: {mean['cut']} of {text}", flush=True)


# ---- Suites of instances ----
def run_suite(play: Callable, make: Callable[..., gym.Env], args: Any) -> Iterator[dict]:
    """One row per instance: the cost of a greedy episode, the best of --eval-samples sampled ones
    (of those that ended, if any did), what else is in info["eval"], the metrics of the greedy one,
    and under "cut" how many did not end. Greedy episodes of instances that are alike are played
    side by side."""
    entries = suite_entries(make, args)
    more = {"desc": "evaluation", "unit": "instance", "leave": False, "mininterval": 1}
    bar = process.bar(total=len(entries), **more)
    for batch in batches(make, entries):
        greedy = play([partial(make, **entry) for entry in batch], True)
        for entry, info in zip(batch, greedy):
            row = {"instance": " ".join(map(str, entry.values())), "greedy": cost(info)}
            row |= metrics_of(info)
            infos = [info]
            if args.eval_samples:
                infos += play([partial(make, **entry)] * args.eval_samples, False)
                _, row[f"best of {args.eval_samples}"] = min(
                    ("cut" in info, cost(info)) for info in infos[1:]
                )
            for info in infos:
                for name, value in info.get("eval", {}).items():
                    if name != "cost":
                        row.setdefault(name, value)
            num_cut = sum("cut" in info for info in infos)
            yield row | ({"cut": num_cut} if num_cut else {})
            bar.update()
    bar.close()


def suite_entries(make: Callable[..., gym.Env], args: Any) -> list[dict]:
    """The keyword arguments of each instance of --eval-suite. SystemExit if the env's `eval_suites`
    lack it."""
    env = make()
    suites = getattr(env.unwrapped, "eval_suites", {})
    close(env)
    if args.eval_suite not in suites:
        raise SystemExit(
            f"--eval-suite {args.eval_suite}: {args.env_id} has the suites {sorted(suites)}"
        )
    return suites[args.eval_suite]


def batches(
    make: Callable[..., gym.Env], entries: list[dict], size: int = 16
) -> Iterator[list[dict]]:
    """Neighbours whose environments have the same spaces, at most `size` together."""

    def spaces_of(entry: dict) -> tuple:
        env = make(**entry)
        found = env.observation_space, env.action_space
        close(env)
        return found

    for _, alike in itertools.groupby(entries, spaces_of):
        alike = list(alike)
        for k in range(0, len(alike), size):
            yield alike[k : k + size]


def cost(info: dict) -> float:
    """info["eval"]["cost"], else minus the return, of an episode that was cut off the return until
    then."""
    value = info.get("eval", {}).get("cost", -info["episode"]["r"])
    return np.ravel(value).item()


def metrics_of(info: dict, kind: str = "") -> dict[str, dict]:
    """info["metrics"], if there are any, with names of this kind, apart from what may be costs. NaN
    is no value."""
    found = info.get("metrics", {}).items()
    metrics = {f"{kind}{name}": value for name, value in found if not math.isnan(value)}
    return {f"{kind}metrics": metrics} if metrics else {}


# ---- Tables ----
def columns_of(rows: list[dict]) -> list[str]:
    """The names of all columns in the order in which they come."""
    return list(dict.fromkeys(name for row in rows for name in row))


def flat(rows: list[dict]) -> tuple[list[dict], set[str]]:
    """Rows whose metrics are columns like the others, and the names of these."""
    table = []
    metrics = set()
    for row in rows:
        row = dict(row)
        for name in METRICS:
            own = row.pop(name, {})
            row |= own
            metrics |= set(own)
        table.append(row)
    return table, metrics


def with_gaps(rows: list[dict]) -> list[dict]:
    """The rows, flat; where there is a column "best_known" all other costs are gaps to it in
    percent, None if it is unknown. Lengths, returns, metrics and columns without a number stay as
    they are."""
    rows, metrics = flat(rows)
    columns = columns_of(rows)
    if "best_known" not in columns:
        return rows
    costs = set()
    for name in set(columns) - {*NAMES, *OWN, *metrics}:
        if any(isinstance(row.get(name), Real) for row in rows):
            costs.add(name)
    table = []
    for row in rows:
        gaps = {}
        for name, value in row.items():
            if name in costs:
                gaps[name + GAP] = gap(value, row.get("best_known"))
            else:
                gaps[name] = value
        table.append(gaps)
    return table


def gap(cost: Any, best: Any) -> float | None:
    """A cost's distance from the best known one in percent; None if one of them is no number."""
    if not (isinstance(cost, Real) and isinstance(best, Real)):
        return None
    return 100 * (cost - best) / (abs(best) or math.nan)


def means_of(rows: list[dict]) -> list[dict]:
    """A row with the means of all rows. Before it, if there are several and fewer than rows, one of
    each "task", then of each "group", task_2 before task_10."""
    means = []
    for name in ("task", "group"):
        groups = {row.get(name) for row in rows} - {None}
        if 1 < len(groups) < len(rows):
            for group in sorted(groups, key=lambda group: (len(str(group)), str(group))):
                own = mean_of([row for row in rows if row.get(name) == group])
                means.append(own | {name: group})
    return [*means, mean_of(rows)]


def mean_of(rows: list[dict]) -> dict:
    columns = columns_of(rows)
    mean = {columns[0]: "mean"}
    for name in columns:
        numbers = [row[name] for row in rows if isinstance(row.get(name), Real)]
        if numbers and name not in NAMES:
            mean[name] = float(np.mean(numbers))
    for name in CUT:
        if name in columns:
            mean[name] = sum(row.get(name, 0) for row in rows)
    return mean


def cell(name: str, value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:.1f}" if name.endswith(GAP) else f"{value:.5g}"
    return "" if value is None else str(value)


def eval_table(rows: list[dict]) -> str:
    """A markdown table of the rows, of the mean of each "group", and of the mean of all. Where
    there is a column "best_known", all other costs are given as gaps to it in percent. All rows
    count, with what they have; a column "cut" marks the episodes that did not end, and counts
    them."""
    rows = with_gaps(rows)
    columns = columns_of(rows)
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        lines.append([cell(name, row.get(name)) for name in columns])
    for mean in means_of(rows):
        cells = [cell(name, mean.get(name)) for name in columns]
        lines.append([text and f"**{text}**" for text in cells])
    return markdown(lines)


def mean_table(rows: list[dict]) -> str:
    """A markdown table of the means alone: a line for each column of `eval_table`, a column for
    each group and one for all. Gaps are sorted, the smallest first."""
    rows = with_gaps(rows)
    means = means_of(rows)
    overall = means[-1]
    titles = [""]
    for mean in means[:-1]:
        titles.append(str(mean.get("task", mean.get("group"))))
    titles.append(f"mean of {len(rows)}")
    names = [name for name in overall if name not in NAMES]
    if "best_known" in columns_of(rows):  # gaps come last
        names.sort(key=lambda name: overall[name] if name.endswith(GAP) else -math.inf)
    for name in CUT:
        if name in overall:
            names.append(name)
    lines = [titles, ["---"] * len(titles)]
    for name in names:
        lines.append([name])
        for mean in means:
            lines[-1].append(cell(name, mean.get(name)))
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save_table(rows: list[dict], folder: str, writer: Any, step: int) -> None:
    """Prints and logs the table of the rows, and saves it as eval.md in `folder`; eval.csv has the
    costs themselves. Of many rows the means are printed."""
    table = eval_table(rows)
    print(table if len(rows) <= SHOWN else mean_table(rows), flush=True)
    writer.add_text("evaluation", table, step)
    with whole(Path(folder, "eval.md")) as unfinished:
        Path(unfinished).write_text(table + "\n")
    rows, _ = flat(rows)
    with whole(Path(folder, "eval.csv")) as unfinished, open(unfinished, "w", newline="") as file:
        lines = csv.DictWriter(file, columns_of(rows), lineterminator="\n")
        lines.writeheader()
        lines.writerows(rows)


# ---- Videos ----
class Filmed(gym.Wrapper):
    """Keeps the pictures of the first episode, at most the last 500."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.pictures = deque(maxlen=500)
        self.is_first = True

    def reset(self, **kwargs) -> tuple:
        result = self.env.reset(**kwargs)
        if self.pictures:
            self.is_first = False
        self.film()
        return result

    def step(self, action: Any) -> tuple:
        result = self.env.step(action)
        self.film()
        return result

    def film(self) -> None:
        if self.is_first:
            frame = np.asarray(self.env.render())
            if frame.ndim != 3 or frame.dtype != np.uint8:
                found = f"{frame.dtype} {frame.shape}"
                raise ValueError(f"render() must return an array [H, W, 3] of uint8, not {found}")
            self.pictures.append(Image.fromarray(frame))


def check_video(make: Callable[..., gym.Env]) -> None:
    """SystemExit if the environment does not render arrays [height, width, 3]."""
    try:
        env = Filmed(make(render_mode="rgb_array"))
        modes = list(env.metadata.get("render_modes", []))
        if "rgb_array" not in modes:
            raise ValueError(f"rgb_array is needed, its render modes are {modes}")
        env.reset()
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()  # frames of the environment first
        raise SystemExit(f"--capture-video: the environment cannot render: {lines[-1]}") from None
    close(env)


def save_video(path: str, play: Callable, make: Callable[..., gym.Env]) -> None:
    """Three greedy episodes, one after the other as an animated GIF, at the environment's
    render_fps."""
    films = [Filmed(make(render_mode="rgb_array")) for _ in range(3)]
    play([lambda film=film: film for film in films], True)
    fps = films[0].metadata.get("render_fps") or 10
    duration = max(20, round(1000 / fps))  # milliseconds; viewers slow down what is faster
    pictures = []
    durations = []
    for film in films:
        pictures += film.pictures
        durations += [duration] * (len(film.pictures) - 1) + [3000]
    size = pictures[0].size
    first, *others = [picture.resize(size) for picture in pictures]
    timing = {"duration": durations, "loop": 0}
    with whole(path) as unfinished:
        first.save(unfinished, "GIF", save_all=True, append_images=others, **timing)
