"""The table of DagSchedule-v0: mean job completion time of the rules, and of the runs of
benchmark/dag_schedule.sh.

    python benchmark/dag_schedule.py

It writes rules.csv and table.md in benchmark/results/dag_schedule.

A suite is 100 fixed sets of jobs (workload 0 to 99; task durations are noisy). The exponent of
"weighted fair" is tuned on the workloads from 1000 on. What stands in rules.csv is not played
again; without runs the table has the rules alone.
"""

import csv
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tables
import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from cleanrl_graph.envs.dag_schedule import RULES, DagScheduleEnv, play_rule  # noqa: E402

SUITES = ("batch", "continuous")
EPISODES = 100  # sets of jobs of each suite, and for tuning
ALPHAS = np.arange(-2, 2.25, 0.25).tolist()  # exponents that weighted fair is tried with


@dataclass
class Args:
    results: str = str(tables.RESULTS)
    """folder of the tables"""


def systems_of() -> list[tuple[str, str, float, bool]]:
    """(suite, rule, alpha, tuning) of everything that is played; alpha is 0 where the rule has
    none."""
    tuning = [(suite, "weighted fair", alpha, True) for suite in SUITES for alpha in ALPHAS]
    return tuning + [
        (suite, rule, 0.0, False) for suite in SUITES for rule in RULES if rule != "weighted fair"
    ]


def best_alpha(costs: dict, suite: str) -> float:
    tried = [(np.mean(cost), key[2]) for key, cost in costs.items() if key[3] and key[0] == suite]
    return min(tried)[1]


def play_rules(path: Path) -> dict[tuple, np.ndarray]:
    """(suite, rule, alpha, tuning) -> mean job completion time (s) of each episode, from `path` and
    then played."""
    costs = {}
    for row in tables.read(path) if path.exists() else []:
        key = row["suite"], row["rule"], float(row["alpha"]), row["tuning"] == "True"
        costs[key] = np.array(json.loads(row["cost"]))

    def play(suite: str, rule: str, alpha: float, tuning: bool) -> None:
        if len(costs.get((suite, rule, alpha, tuning), ())) >= EPISODES:
            return
        played = []
        for entry in DagScheduleEnv.eval_suites[suite][:EPISODES]:
            workload = entry["workload"] + 1000 * tuning
            played.append(play_rule(rule, alpha=alpha, **entry | {"workload": workload}))
        costs[suite, rule, alpha, tuning] = np.array(played)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["suite", "rule", "alpha", "tuning", "cost"])
            for key, cost in costs.items():
                writer.writerow([*key, json.dumps(cost.round(3).tolist())])

    for system in tqdm(systems_of(), desc="rules", mininterval=1):
        play(*system)
    for suite in SUITES:
        for alpha in {0.0, -1.0, best_alpha(costs, suite)} - {0.0}:
            play(suite, "weighted fair", alpha, False)
    return {key: cost[:EPISODES] for key, cost in costs.items()}


def rows_of(costs: dict, runs: list[dict]) -> list[dict]:
    """One row per suite and system, the best first: mean job completion time and its standard error
    over the episodes (of the policy over the seeds), and the difference to the best rule in
    percent."""
    rows = []
    for suite in SUITES:
        found, tuned = [], best_alpha(costs, suite)
        for (of, rule, alpha, tuning), cost in costs.items():
            if of == suite and not tuning:
                tried = f", alpha {alpha:g}" + " (tuned)" * (alpha == tuned)
                system = rule + (tried if rule == "weighted fair" else "")
                error = np.std(cost) / len(cost) ** 0.5
                found.append({"system": system, "mean": np.mean(cost), "error": error, "seeds": ""})
        best = min(row["mean"] for row in found)
        played = [run["eval"]["greedy"] for run in runs if run["name"] == suite]
        seeds = [np.mean(np.array(costs, float)[:EPISODES]) for costs in played]
        if seeds:
            error = np.std(seeds, ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else np.nan
            row = {"system": f"**{script_of(runs)}, greedy**", "mean": np.mean(seeds)}
            each = ", ".join(f"{seed:.1f}" for seed in seeds)
            found.append(row | {"error": error, "seeds": each})
        for row in sorted(found, key=lambda row: row["mean"]):
            rows.append(row | {"suite": suite, "change": 100 * (row["mean"] / best - 1)})
    return rows


def script_of(runs: list[dict]) -> str:
    """The script of the runs: ppo_graph.py."""
    return ", ".join(dict.fromkeys(re.search(r"ppo_\w+\.py", run["command"])[0] for run in runs))


def document(rows: list[dict], runs: list[dict]) -> list[str]:
    """The paragraphs of table.md."""
    lines = [["suite", "system", "mean JCT, s", "beside the best rule, %", "seeds"]]
    for row in rows:
        error = "" if np.isnan(row["error"]) else f" ± {row['error']:.1f}"
        cells = [row["suite"], row["system"], f"{row['mean']:.1f}{error}"]
        lines.append([*cells, f"{row['change']:+.1f}", row["seeds"]])
    parts = [
        "    bash benchmark/dag_schedule.sh",
        f"Mean job completion time (JCT) in seconds on {EPISODES} fixed sets of jobs per "
        "suite: 20 jobs that are all there at the beginning (batch), or 50 that arrive in a "
        "Poisson process (continuous, load 0.75); 50 executors. ± is the standard error over the "
        "sets of jobs, of the policy over its seeds. The exponent of weighted fair is tuned on "
        f"{EPISODES} other sets.",
        tables.markdown(lines),
    ]
    if runs:
        parts.append(f"{tables.about(runs)} Other jobs shared the cores.")
        parts += tables.commands(runs)
    return parts


def main(args: Args) -> None:
    folder = Path(args.results) / "dag_schedule"
    costs = play_rules(folder / "rules.csv")
    runs = list(tables.finished(folder).values())
    rows = rows_of(costs, runs)
    tables.publish(folder, document(rows, runs))


if __name__ == "__main__":
    main(tyro.cli(Args))
