"""The table of the flexible job shops from the files of `bash benchmark/flexible_job_shop.sh`.

    python benchmark/flexible_job_shop.py

It writes table.md in benchmark/results/flexible_job_shop_suites.

Mean gaps (%) per suite: of the random sets to the makespans of OR-Tools with up to 1,800 s, of the
public instances to the best known ones. Ours are greedy schedules of each seed's model and the best
of 100 samples; the rules run in the same environment; CP-SAT's rows are of benchmark/cp_sat.py; the
published rows are of results/flexible_job_shop_suites/ published.csv, measured on other machines.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tables
import tyro

RANDOM = ("sd10x5", "sd20x5", "sd15x10", "sd20x10", "sd30x10", "sd40x10")
PUBLIC = ("mk", "edata", "rdata", "vdata")
RULES = ("SPT", "MWKR", "MOPNR", "FIFO", "EFT", "random")
SOURCES = """Sources: [b] Ho et al., Residual Scheduling, arXiv 2309.15517, tables 3 and 4. [e]
wrqccc/FJSP-DRL on GitHub, test_results; DANIEL is Wang et al. 2023, its rows of the public
instances are of the model of 10x5 and are gaps to what OR-Tools found. [f] Liao et al., BOPO, arXiv
2503.07580, as others quote it: it has 6.9 for Residual Scheduling's best of 100 on edata. [r]
ReSched, ICLR 2026, arXiv 2603.07020: its checkpoints of PPO, played with its code and its data; its
15x10 is of a model that was trained at that size."""
LARGER = {
    "larger": "larger instances in the training",
    "largest": "trained on 10 to 30 jobs and 8 to 10 machines",
}


@dataclass
class Args:
    results: str = str(tables.RESULTS)
    """folder of the tables"""


def gaps(run: dict, column: str) -> np.ndarray:
    """The gap (%) of each instance of a suite."""
    cost, best = (np.array(run["eval"][name], float) for name in (column, "best_known"))
    return 100 * (cost / best - 1)


def our_rows(runs: list[dict]) -> dict[str, dict[str, float]]:
    """Method -> suite -> mean gap: greedy of each seed and their mean, of the trainings with
    larger instances, the best samples, and the rules."""
    rows, by_seed = {}, {}
    for run in runs:
        kind, suite = run["name"].split("-")
        if kind in LARGER:
            name = f"ppo_graph.py greedy, {LARGER[kind]}, seed {run['seed']}"
            rows.setdefault(name, {})[suite] = gaps(run, "greedy").mean()
        elif kind == "greedy":
            by_seed.setdefault(run["seed"], {})[suite] = gaps(run, "greedy").mean()
            for rule in (name for name in run["eval"] if name.split()[-1] in RULES):
                *other, name = rule.split()  # a bare name is in the builder of the environment
                own = rows.setdefault(f"{name}, {(*other, 'nondelay')[0]}", {})
                own[suite] = gaps(run, rule).mean()
        else:
            best = next(name for name in run["eval"] if name.startswith("best of"))
            # of a model with other rounding: its training was not kept
            own = rows.setdefault(f"ppo_graph.py {best}, one seed of an earlier training", {})
            own[suite] = gaps(run, best).mean()
    mean = {
        suite: np.mean([row[suite] for row in by_seed.values() if suite in row])
        for suite in dict.fromkeys(suite for row in by_seed.values() for suite in row)
    }
    ours = {f"**ppo_graph.py greedy, mean of {len(by_seed)} seed{'s' * (len(by_seed) > 1)}**": mean}
    ours |= {f"ppo_graph.py greedy, seed {seed}": row for seed, row in by_seed.items()}
    rules = sorted(name for name in rows if name.split(",")[0] in RULES)
    return (
        ours
        | {name: row for name, row in rows.items() if name not in rules}
        | {name: rows[name] for name in rules}
    )


def solver_rows(path: Path) -> dict[str, dict[str, float]]:
    """Time limit -> suite -> mean gap of CP-SAT, where it has solved all instances of the suite."""
    found = {}
    for row in tables.read(path):
        threads = f"{row['workers']} worker{'s' * (row['workers'] != '1')}"
        name = f"CP-SAT {row['version']}, {float(row['seconds']):g} s, {threads}"
        gap = 100 * (float(row["makespan"] or "nan") / float(row["best_known"]) - 1)
        found.setdefault(name, {}).setdefault(row["suite"], []).append(gap)
    return {
        name: {suite: float(np.mean(values)) for suite, values in row.items()}
        for name, row in found.items()
    }


def table(rows: dict[str, dict[str, float]], suites: tuple[str, ...]) -> str:
    """A markdown table; rows without any figure of these suites are left out."""
    lines = [["mean gap, %", *(suite.removeprefix("sd") for suite in suites)]]
    for name, row in rows.items():
        cells = [
            f"{row[suite]:.1f}" if np.isfinite(row.get(suite, np.nan)) else "" for suite in suites
        ]
        lines += [[name, *cells]] if any(cells) else []
    return tables.markdown(lines)


def main(args: Args) -> None:
    folder = Path(args.results) / "flexible_job_shop_suites"
    runs = sorted(tables.finished(folder).values(), key=lambda run: run["seed"])
    if not runs:
        raise SystemExit(f"{folder}: no suite has been played")
    published = {}
    for row in tables.read(tables.place(args.results, "flexible_job_shop_suites/published.csv")):
        found = {suite: float(row[suite]) for suite in (*RANDOM, *PUBLIC) if row[suite]}
        published[f"{row['method']} [{row['source']}]"] = found
    ours = our_rows(runs)
    rows = ours | solver_rows(Path(args.results) / "cp_sat" / "FlexibleJobShop-v0.csv") | published
    parts = [
        "    bash benchmark/flexible_job_shop.sh",
        f"{tables.about(runs)} Trainings are not counted.",
        "Test sets of Song et al. (100 random instances each), gap to OR-Tools with up to 1,800 s:",
        table(rows, RANDOM),
        "Public instances (Brandimarte's mk01-10, Hurink's la01-40), gap to the best known "
        "makespan:",
        table(rows, PUBLIC),
        SOURCES,
        *tables.commands(runs),
    ]
    tables.publish(folder, parts)


if __name__ == "__main__":
    main(tyro.cli(Args))
