"""The table of Taillard's 80 job shops from the files of `PARTS=taillard bash benchmark/job_shop.sh`.

    python benchmark/taillard.py     # writes table.md and table.csv in benchmark/results/taillard

Mean gaps (%) to the best known makespan per group of 10 instances, of the README's model of each seed, which has seen
random instances of 3 to 10 jobs and machines only; beside them the figures that others have published
(results/taillard/published.csv, measured on other machines). A seed with a group that was not played is left out.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import report
import tyro

GROUPS = ("15x15", "20x15", "20x20", "30x15", "30x20", "50x15", "50x20", "100x20")
SHORT = ("L2D", "ScheduleNet", "Residual", "SPN", "CP-SAT")  # columns of the short table
SOURCES = """Sources: [a] AndreaCorsini1/SelfLabelingJobShop on GitHub, output/Results.xlsx. [b] Ho et al., Residual
Scheduling, arXiv 2309.15517, tables 2 to 4. [c] zcaicaros/L2S on GitHub, test_results. [d] ScheduleOpt/benchmarks on
GitHub, jobshop/solutions. ScheduleNet's figures are those that others quote."""


@dataclass
class Args:
    results: str = str(Path(__file__).parent / "results")
    """folder of the tables"""


def gaps_of(folder: Path) -> dict[int, dict[str, np.ndarray]]:
    """seed -> suite -> gap (%) of each instance of its greedy schedule."""
    gaps = {}
    for path in sorted(folder.glob("*.json")):
        settings = json.loads(path.read_text())
        if settings["exit_code"] == 0:
            cost, best = (np.array(settings["eval"][name], float) for name in ("greedy", "best_known"))
            gaps.setdefault(settings["seed"], {})[settings["name"]] = 100 * (cost / best - 1)
    return {seed: suites for seed, suites in sorted(gaps.items()) if {"ta" + group for group in GROUPS} <= {*suites}}


def row_of(suites: dict[str, np.ndarray]) -> list[float]:
    """The mean of each group, and of all 80 instances."""
    groups = [suites["ta" + group] for group in GROUPS]
    return [*(float(group.mean()) for group in groups), float(np.concatenate(groups).mean())]


def document(ours: dict[str, list[float]], published: list[dict], settings: list[dict], la: str) -> str:
    """table.md: the short table, as the README has it, and all methods; the first row of `ours` is the mean."""
    names, (mean, *_) = [*GROUPS, "all 80"], ours.values()
    short = [row for row in published if row["method"].split()[0] in SHORT and "best" not in row["method"]]
    by_group = [["mean gap, %", "ours, greedy", *(row["method"].split(" (")[0] for row in short)]]
    for k, name in enumerate(names):
        by_group.append([name, f"{mean[k]:.1f}", *(row[name] for row in short)])
    lines = [["mean gap, %", *names], *([name, *(f"{value:.1f}" for value in row)] for name, row in ours.items())]
    lines += [[f"{row['method']} [{row['source']}]", *(row[name] for name in names)] for row in published]
    unique = lambda values: ", ".join(dict.fromkeys(values))
    about = f"{unique(entry['cpu'] for entry in settings)}, one core per run, torch " \
            f"{unique(entry['versions']['torch'] for entry in settings)}, commit " \
            f"{unique(report.short(entry['commit']) for entry in settings)}; {len(settings)} runs, " \
            f"{sum(entry['duration'] for entry in settings) / 60:.0f} minutes altogether, trainings not counted."
    parts = ["    PARTS=taillard bash benchmark/job_shop.sh", about,
             "The model of the README's first command (random instances of 3 to 10 jobs and machines, 400,000 "
             "decisions), played greedily, mean of its seeds; the others as published, on other machines. The last "
             "column is no dispatcher but an exact solver.", report.markdown(by_group), "All methods and seeds:",
             report.markdown(lines), f"la01-40, greedy: {la}.", SOURCES, "Commands:",
             "\n".join(f"    {entry['command']}" for entry in settings)]
    return "\n\n".join(parts) + "\n"


def main(args: Args) -> None:
    folder = Path(args.results) / "taillard"
    found = gaps_of(folder / "runs")
    if not found:
        raise SystemExit(f"{folder / 'runs'}: no seed has played all groups")
    seeds = {f"ppo_graph.py greedy, seed {seed}": row_of(suites) for seed, suites in found.items()}
    ours = {"**ppo_graph.py greedy, mean of the seeds**": np.mean(list(seeds.values()), 0).tolist(), **seeds}
    la = ", ".join(f"{suites['la'].mean():.1f} (seed {seed})" for seed, suites in found.items() if "la" in suites)
    settings = [json.loads(path.read_text()) for path in sorted((folder / "runs").glob("*.json"))]
    text = document(ours, report.read(folder / "published.csv"), settings, la)
    (folder / "table.md").write_text(text)
    with open(folder / "table.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([["seed", *GROUPS, "all 80"], *(
            [seed, *(f"{value:.3f}" for value in row_of(suites))] for seed, suites in found.items())])
    print(f"{text}\n{folder / 'table.md'}")


if __name__ == "__main__":
    main(tyro.cli(Args))
