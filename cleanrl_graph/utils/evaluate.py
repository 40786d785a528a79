"""cleanrl_graph, what a trained agent is worth: suites of instances, tables, a video.

The functions are handed a script's `play(makers, greedy)`, which returns the first episode of each
environment, and its `make(more)`, which makes the environment of the flags with more keyword
arguments.
"""

import contextlib
import csv
import math
from collections import deque
from functools import partial
from itertools import groupby, islice
from numbers import Real
from pathlib import Path
from typing import Any, Callable, Iterator

import gymnasium as gym
import numpy as np
from PIL import Image
from tqdm import tqdm

NOT_MEASURED = (
    "instance",
    "episode",
    "group",
    "best_known",
    "lower_bound",
)  # columns that have no mean


def suite_entries(make: Callable[..., gym.Env], args: Any) -> list[dict]:
    """The keyword arguments of each instance of --eval-suite. SystemExit if the env's `eval_suites`
    lack it."""
    env = make()
    suites = getattr(env.unwrapped, "eval_suites", {})
    env.close()
    if args.eval_suite not in suites:
        raise SystemExit(
            f"--eval-suite {args.eval_suite}: {args.env_id} has the suites {sorted(suites)}"
        )
    return suites[args.eval_suite]


def batches(
    make: Callable[..., gym.Env], entries: list[dict], size: int = 16
) -> Iterator[list[dict]]:
    """Neighbours whose environments have the same spaces, at most `size` together."""

    def spaces(kwargs: dict) -> tuple:
        with contextlib.closing(make(kwargs)) as env:
            return env.observation_space, env.action_space

    for _, same in groupby(entries, spaces):
        while batch := list(islice(same, size)):
            yield batch


def run_suite(play: Callable, make: Callable[..., gym.Env], args: Any) -> list[dict]:
    """One row per instance: the cost (info["eval"]["cost"], else minus the return) of a greedy
    episode, the best of --eval-samples sampled ones, and what else is in info["eval"]. Greedy
    episodes of instances that are alike are played side by side."""
    rows, entries = [], suite_entries(make, args)
    bar = tqdm(total=len(entries), desc="evaluation", unit="instance", leave=False, mininterval=1)
    for batch in batches(make, entries):
        for kwargs, episode in zip(batch, play([partial(make, kwargs) for kwargs in batch], True)):
            sampled = (
                play([partial(make, kwargs)] * args.eval_samples, False)
                if args.eval_samples
                else []
            )
            row, others = {"instance": " ".join(map(str, kwargs.values()))}, {}
            for name, episodes in (
                ("greedy", [episode]),
                (f"best of {args.eval_samples}", sampled),
            ):
                for episode in episodes:
                    row[name] = min(row.get(name, math.inf), episode.eval.get("cost", -episode.ret))
                    others = {k: v for k, v in episode.eval.items() if k != "cost"} | others
            rows.append(row | others)
            bar.update()
    bar.close()
    return rows


def eval_table(rows: list[dict]) -> str:
    """A markdown table of the rows, the mean of each "group", and the mean of all. Where there is a
    column "best_known", all other costs are given as gaps to it in percent."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    gaps = [name for name in names if "best_known" in names and name not in NOT_MEASURED]

    def value(name: str, row: dict) -> Any:
        cost, best = row.get(name), row.get("best_known")
        if name not in gaps or not isinstance(cost, Real):
            return cost
        return 100 * (cost - best) / (abs(best) or math.nan) if isinstance(best, Real) else None

    def cell(name: str, value: Any) -> str:
        if isinstance(value, (float, np.floating)):
            return f"{value:.1f}" if name in gaps else f"{value:.5g}"
        return "" if value is None else str(value)

    table = [{name: value(name, row) for name in names} for row in rows]
    groups = sorted(
        {row["group"] for row in rows if row.get("group") is not None},
        key=lambda g: (len(str(g)), str(g)),
    )
    lines = [[f"{name} gap %" if name in gaps else name for name in names], ["---"] * len(names)]
    lines += [[cell(name, row[name]) for name in names] for row in table]
    for group in [*groups, None] if 1 < len(groups) < len(rows) else [None]:
        part, mean = (
            [row for row in table if group in (None, row.get("group"))],
            {names[0]: "mean", "group": group},
        )
        for name in (name for name in names if name not in NOT_MEASURED):
            numbers = [row[name] for row in part if isinstance(row[name], Real)]
            mean[name] = float(np.mean(numbers)) if numbers else None
        lines.append(
            [
                f"**{cell(name, mean[name])}**" if mean.get(name) is not None else ""
                for name in names
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save_table(rows: list[dict], folder: str, writer: Any, step: int) -> None:
    """Prints and logs the table of the rows; eval.md in `folder` holds it too, eval.csv the costs
    themselves. SystemExit if they cannot be written."""
    print(table := eval_table(rows), flush=True)
    writer.add_text("evaluation", table, step)
    try:
        Path(folder, "eval.md").write_text(table + "\n")
        with open(Path(folder, "eval.csv"), "w", newline="") as file:
            lines = csv.DictWriter(
                file, dict.fromkeys(name for row in rows for name in row), lineterminator="\n"
            )
            lines.writeheader()
            lines.writerows(rows)
    except OSError as error:
        raise SystemExit(f"cannot write the evaluation's table: {error}") from None


class Filmed(gym.Wrapper):
    """Keeps the pictures of each episode, at most the last 1000."""

    def reset(self, **kwargs) -> tuple:
        result, self.episodes = self.env.reset(**kwargs), getattr(self, "episodes", [])
        self.episodes.append(deque([self.render()], maxlen=1000))
        return result

    def step(self, action: Any) -> tuple:
        result = self.env.step(action)
        self.episodes[-1].append(self.render())
        return result

    def render(self) -> Image.Image:
        return Image.fromarray(np.asarray(self.env.render(), np.uint8))


def check_video(make: Callable[..., gym.Env]) -> None:
    """SystemExit if the environment does not render arrays [height, width, 3]."""
    try:
        env = make({"render_mode": "rgb_array"})
        env.reset()
        modes, frame = list(env.metadata.get("render_modes", [])), env.render()
        env.close()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[
            -1
        ]  # after the frames of the environment
        raise SystemExit(f"--capture-video: the environment cannot render: {problem}") from None
    if "rgb_array" not in modes or np.ndim(frame) != 3:
        raise SystemExit(
            f"--capture-video: render() must return an array [H, W, 3]; the render modes are {modes}"
        )


def save_video(path: str, play: Callable, make: Callable[..., gym.Env]) -> None:
    """One greedy episode as an animated GIF. SystemExit if it cannot be written."""
    env = Filmed(make({"render_mode": "rgb_array"}))
    play([lambda: env], True)
    first, *others = max(env.episodes, key=len)  # another one may have begun
    try:
        first.save(
            path, save_all=True, append_images=others, duration=[100] * len(others) + [3000], loop=0
        )
    except OSError as error:
        raise SystemExit(f"cannot write {path}: {error}") from None


def check(make: Callable[..., gym.Env], args: Any) -> None:
    """SystemExit before the training for what could not be evaluated after it."""
    make = partial(make, args, 0)
    if args.eval_suite:
        suite_entries(make, args)
    if args.capture_video:
        check_video(make)


def evaluate(
    play: Callable, make: Callable[..., gym.Env], args: Any, folder: str, writer: Any, step: int
) -> list:
    """Plays what the flags say, --eval-suite or --eval-episodes of each entry of --env-kwargs,
    saves table and video. The rows of the table; their "group" is the entry's number, or
    info["group"] at the episode's end."""
    rows, num_tasks = [], len(args.env_kwargs) if isinstance(args.env_kwargs, list) else 1
    if args.eval_suite:
        rows = run_suite(play, partial(make, args, 0), args)
    for k in range(num_tasks if args.eval_episodes and not args.eval_suite else 0):
        for i, episode in enumerate(play([partial(make, args, k)] * args.eval_episodes, True)):
            group = f"task_{k}" if num_tasks > 1 else episode.group
            rows.append(
                {"episode": i, "group": group, "length": episode.length, "return": episode.ret}
            )
    if all(row.get("group") is None for row in rows):
        rows = [{name: value for name, value in row.items() if name != "group"} for row in rows]
    if rows:
        save_table(rows, folder, writer, step)
    if args.capture_video:
        save_video(str(Path(folder, "episode.gif")), play, partial(make, args, 0))
    return rows
