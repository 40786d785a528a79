"""The table of --graph-context from the runs of benchmark/graph_context.sh and, without the flag,
of other tables.

    python benchmark/graph_context.py

It writes table.md in benchmark/results/graph_context: one row per test, greedy
actions, each seed's figure and their means. Where nothing has run there is no row.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import report
import tables
import tyro


@dataclass
class Args:
    results: str = str(tables.RESULTS)
    """folder of the tables"""


class Test(NamedTuple):
    """What is compared. The runs of a seed are found by their names in `table` (without) and in
    graph_context (with)."""

    task: str
    tested_on: str
    table: str
    without: str
    name: str
    column: str = "greedy"
    instances: str = ""  # of a suite those that begin so


GAP = "gap, %"
LIGHTS = "delay, s"
LARGER = ("ta15x15", "ta20x20", "ta30x20", "ta50x20", "swv")
MAPS = ("grid4x4", "cologne3", "cologne8", "ingolstadt7", "arterial4x4", "ingolstadt21")
EXPLORE = ("share of new nodes", "ppo_lstm_sparse", "per_node", "explore", "return")
TESTS = [Test("GraphExplore-v0", *EXPLORE)]
for name in ("batch", "continuous"):
    run = "completion time, s", "dag_schedule", name, name
    TESTS.append(Test(f"DagSchedule-v0, {name}", *run))
TESTS.append(Test("TrafficLights-v0, grid4x4", LIGHTS, "traffic", "grid4x4", "grid4x4"))
for name in MAPS:
    run = LIGHTS, "traffic", "unseen", "unseen"
    TESTS.append(Test(f"TrafficLights-v0, four maps, {name}", *run, instances=name))
for name in ("sd15x10", "sd30x10", "sd40x10", "mk", "edata", "rdata", "vdata"):
    run = GAP, "flexible_job_shop_suites", f"greedy-{name}", f"flexible-{name}"
    TESTS.append(Test(f"FlexibleJobShop-v0, {name}", *run))
for name in ("la", *LARGER):
    end = "" if name == "la" else f"-{name}"
    run = GAP, "graph_context", f"jobs_without{end}", f"jobs{end}"
    TESTS.append(Test(f"JobShop-v0, {name}", *run))


def figure(test: Test, run: dict) -> float:
    """The mean of a run's test; of a suite with best known costs the mean gap (%)."""
    played = run["eval"]
    values = np.array(played[test.column], float)
    if "best_known" in played:
        values = 100 * (values / np.array(played["best_known"], float) - 1)
    if test.instances:
        values = values[[name.startswith(f"{test.instances} ") for name in played["instance"]]]
    return float(values.mean())


def of_runs(test: Test, runs: list[dict], name: str) -> dict[int, float]:
    """Seed -> figure."""
    return {run["seed"]: figure(test, run) for run in runs if run["name"] == name and run["eval"]}


def rows_of(folder: Path) -> list[dict]:
    """One row per test that has run with the flag: task, what is measured, and seed -> figure
    without and with it."""
    own = list(tables.finished(folder / "graph_context").values())
    found = []
    for test in TESTS:
        without = of_runs(
            test, list(tables.finished(tables.place(folder, test.table)).values()), test.without
        )
        context = of_runs(test, own, test.name)
        if context:
            found.append({"test": test, "without": without, "with": context})
    return found


def cells(figures: dict[int, float]) -> list[str]:
    """Mean and standard error over seeds, and each seed."""
    values = [figures[seed] for seed in sorted(figures)]
    each = ", ".join(f"{value:.3g}" if value < 1 else f"{value:.1f}" for value in values)
    return [report.mean_and_error(values), each]


def document(rows: list[dict], runs: list[dict]) -> list[str]:
    """The paragraphs of table.md."""
    lines = [["task and test", "mean", "without", "seeds", "with", "seeds"]]
    for row in rows:
        test = row["test"]
        lines.append([test.task, test.tested_on, *cells(row["without"]), *cells(row["with"])])
    return [
        "    bash benchmark/graph_context.sh",
        f"{tables.about(runs)} Without the flag: the runs of "
        "[GraphExplore](../ppo_lstm_sparse/table.md), [DagSchedule](../dag_schedule/table.md), "
        "[TrafficLights](../traffic/table.md) and "
        "[FlexibleJobShop](../flexible_job_shop_suites/table.md), whose commands are the same but "
        "for the flag, and JobShop's below.",
        "Greedy actions. Gaps are means over the instances to the best known makespan, or to that "
        "of OR-Tools. Less is better, but for the share of new nodes. ± is the standard error over "
        "seeds, which begin with 1. GraphExplore with the flag was trained before actor and critic "
        "saw what is remembered of the visible nodes: without the flag it had 0.721 then.",
        tables.markdown(lines),
        *tables.commands(runs),
    ]


def main(args: Args) -> None:
    results = Path(args.results)
    folder = results / "graph_context"
    rows = rows_of(results)
    if not rows:
        raise SystemExit(f"{folder}: nothing has run")
    runs = sorted(tables.finished(folder).values(), key=lambda run: run["seed"])
    tables.publish(folder, document(rows, runs))


if __name__ == "__main__":
    main(tyro.cli(Args))
