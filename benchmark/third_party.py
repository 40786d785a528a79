"""The table of benchmark/third_party.sh from its runs: environments that nobody of
this project wrote.

    python benchmark/third_party.py

It writes table.md and table.png in benchmark/results/third_party.

A training has a return at its start (mean of the first 50 episodes) and at its end (of the
last ones, with sampled actions). The short runs, one update each, show that an environment
constructs and steps. Exit code 1 if a run is missing or its collection_mismatch is not below 1e-5.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import report
import tables
import tyro

NOTE = (
    "Other jobs shared the two cores with these runs, so the steps per second say little; 80,000 "
    "steps are few for Breakout."
)
EPISODES = 50  # of the means at the start and at the end
LIMIT = 1e-5  # of debug/collection_mismatch
COLUMNS = tuple(
    "package,version,environment,script,steps,SPS,collection mismatch,return at the start,"
    "at the end,greedy".split(",")
)


@dataclass
class Args:
    results: str = str(tables.RESULTS)
    """folder of the tables"""


class Package(NamedTuple):
    name: str  # on PyPI
    pattern: str  # of its runs
    num_runs: int
    trained: bool  # or just constructed and stepped


PACKAGES = (
    Package("job-shop-lib", "jobshoplib_*", 1, True),
    Package("graph-jsp-env", "graphjsp_*", 1, True),
    Package("minigrid", "minigrid_*", 3, True),
    Package("nasim", "nasim_*", 1, True),
    Package("ale-py", "atari_*", 1, True),
    Package("popgym", "popgym_*", 48, False),
)
NOTES = {  # what is theirs
    "job-shop-lib": (
        "1.7.2 has arrays as large as the instance, pairs (job, machine) as actions, and what is "
        "allowed in info; [job_shop_lib_graphs.py](../../third_party/job_shop_lib_graphs.py) makes "
        "a Graph, an `action_mask` and the choice of a node of it. The action space lacks the last "
        "machine (start -1, but as many values as machines), so machine -1, which stands for the "
        "only one of an operation, is given. `MultiJobShopGraphEnv.reset(seed=...)` does not seed "
        "the instances; the adapter does."
    ),
    "graph-jsp-env": (
        '1.1.1 as it is, with the mask that `env_transform="mask"` offers, on ft06 (optimum 55; '
        "the return is "
        "minus the makespan); its constructor wants arrays, so "
        "[graph_jsp.py](../../third_party/graph_jsp.py) registers it. It calls what matplotlib 3.9 "
        "removed, hence matplotlib 3.8. Its observation is a matrix."
    ),
    "minigrid": (
        "the mission of 3.2.0 is a Text, which is read as words. Its own ImgObsWrapper and "
        "gymnasium's FilterObservation leave it out, its FlatObsWrapper makes numbers of it "
        "([minigrid_wrapped.py](../../third_party/minigrid_wrapped.py))."
    ),
    "nasim": (
        "0.12.0 by `--env-id nasim:Tiny-v0`. Its action space derives from Discrete, and its "
        "`step` refuses NumPy's integers, hence the wrapper PythonInts. It is partially "
        "observed: the greedy policy without a memory repeats an action that changes nothing until "
        "the step limit, sampled it wins."
    ),
    "ale-py": (
        "0.12.1 brings the games along; [atari.py](../../../cleanrl_graph/envs/atari.py) needs "
        "opencv too. Return and length are those of whole games; the reward that is learned from "
        "is its sign, and a life is an episode. `--obs-shifts -3:0` stores each frame once, 7,056 "
        "bytes a step; four frames in one observation (`frames`) take 28,224."
    ),
    "popgym": (
        "1.0.7 registers 48 environments with mazelib (`popgym[navigation]`) and 42 without, and "
        "spells VelocityOnlyCartpole unlike its other CartPoles."
    ),
}


def mean_of_first(returns: np.ndarray, ended: np.ndarray, num: int) -> float:
    """Mean return of the first `num` episodes, of a few more where a row holds several."""
    rows = np.searchsorted(ended.cumsum(), num) + 1
    return float(np.average(returns[:rows], weights=ended[:rows]))


def rows_of(package: Package, args: Args) -> list[dict]:
    """One row per finished run, with its `settings`."""
    rows, folder = [], Path(args.results) / "third_party"
    curves = tables.curves_of(folder) if package.trained else {}
    for key, settings in tables.finished(folder, package.pattern).items():
        kwargs = re.search(r"--env-kwargs '(.*?)'", settings["command"])
        row = {
            "package": package.name,
            "version": settings["versions"].get(package.name, ""),
            "environment": settings["env_id"].split(":")[-1] + (f" {kwargs[1]}" if kwargs else ""),
            "script": re.search(r"ppo_\w+\.py", settings["command"])[0],
            "steps": settings["steps"],
            "SPS": settings["SPS"],
            "collection mismatch": settings["collection_mismatch"],
            "settings": settings,
        }
        if package.trained:
            column = lambda name: np.array([float(line[name]) for line in curves[key]])
            ended, returns = column("episodes"), column("return")
            row["return at the start"] = mean_of_first(returns, ended, EPISODES)
            row["at the end"] = mean_of_first(returns[::-1], ended[::-1], EPISODES)
            table = settings["eval"] or {}
            row["greedy"] = float(np.mean(table["return"])) if "return" in table else None
        rows.append(row)
    return rows


def cell(name: str, value) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    form = {"collection mismatch": ".1e", "steps": ",.0f", "SPS": ",.0f"}.get(name, ".4g")
    return f"{value:{form}}"


def markdown(rows: list[dict], names: tuple[str, ...]) -> str:
    lines = [[cell(name, row.get(name)) for name in names] for row in rows]
    return tables.markdown([list(names), *lines])


def gaps(rows: list[dict]) -> list[str]:
    """A sentence for each run with an --eval-suite."""
    lines = []
    for row in rows:
        if found := report.gaps(row["settings"]["eval"] or {}):
            num = len(row["settings"]["eval"]["best_known"])
            lines.append(
                f"{row['environment']}, mean gap to the best known makespan of {num} benchmark "
                f"instances: {', '.join(f'{name} {gap:.1f}%' for name, gap in found.items())}."
            )
    return lines


def document(found_of: dict[Package, list[dict]], args: Args) -> str:
    """table.md."""
    rows = [row for found in found_of.values() for row in found]
    about = [row["settings"] for row in rows]
    gymnasium = tables.unique(entry["versions"].get("gymnasium") for entry in about)
    trained = [row for package, found in found_of.items() for row in found if package.trained]
    stepped = [row for package, found in found_of.items() for row in found if not package.trained]
    commands = dict.fromkeys(row["settings"]["command"] for row in trained)
    for settings in [row["settings"] for row in stepped[:1]]:
        commands[settings["command"].replace(settings["env_id"], "ID")] = None
    parts = [
        "    bash benchmark/third_party.sh",
        f"{tables.about(about, f', gymnasium {gymnasium}')} The packages come from PyPI into a "
        "virtual environment of their own.",
        NOTE,
        "Trainings, one seed each:",
        markdown(trained, COLUMNS),
        "SPS: steps per second of the training, everything included; collection mismatch: the "
        "largest |ratio - 1| of all updates; return: mean of the first and of the last "
        f"{EPISODES} episodes of the training (sampled actions); greedy: mean of the "
        "evaluation after it.",
        *gaps(trained),
    ]
    parts += [
        "![learning curves](table.png)",
        "Constructs and steps: one update each, all losses finite.",
        markdown(stepped, COLUMNS[:7]),
        "What is theirs:",
        "\n".join(f"- **{each.name}**: {NOTES[each.name]}" for each in found_of),
        "Commands:",
        "\n".join(f"    {command}" for command in commands),
    ]
    return "\n\n".join(parts) + "\n"


def draw(args: Args) -> None:
    """The learning curves of the trainings, a panel per environment."""
    patterns, groups = tuple(each.pattern for each in PACKAGES if each.trained), {}
    options = report.Args("third_party", patterns, results=args.results, episodes=EPISODES)
    for run in report.load_all(options):
        script = re.search(r"ppo_\w+\.py", run.settings["command"])[0]
        groups.setdefault((run.panel, script), []).append(run)
    report.plot(groups, options)


def main(args: Args) -> int:
    found_of = {package: rows_of(package, args) for package in PACKAGES}
    folder = Path(args.results) / "third_party"
    rows = [row for found in found_of.values() for row in found]
    (folder / "table.md").write_text(document(found_of, args))
    draw(args)
    problems = []
    for package, found in found_of.items():
        if len(found) != package.num_runs:
            counts = f"{len(found)} of {package.num_runs}"
            problems.append(f"{package.name}: {counts} runs are finished")
    for row in rows:
        if not (mismatch := row["collection mismatch"]) < LIMIT:
            problems.append(f"{row['environment']}: collection_mismatch {mismatch}")
    print("\n".join([str(folder / "table.md"), *problems]))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
