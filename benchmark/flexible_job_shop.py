"""The table of the flexible job shops from the files of `bash benchmark/flexible_job_shop.sh`.

    python benchmark/flexible_job_shop.py

It writes table.md in benchmark/results/flexible_job_shop_suites.

Mean gaps (%) per suite: of the random sets to the makespans of OR-Tools with up to 1,800 s, of the
public instances to the best known ones. Ours are greedy schedules of each seed's model and the best
of 100 samples; the rules run in the same environment; CP-SAT's rows are of benchmark/cp_sat.py; the
published rows are of results/flexible_job_shop_suites/published.csv, measured on other machines.
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
2503.07580, as others quote it: it has 6.9 for Residual Scheduling's best of 100 on edata. [m]
Luttmann and Xie, MACSIM, ICLR 2026, arXiv 2510.12273, as others quote its main table, in which
DANIEL has 10.8, 5.0 and 12.4. [r] ReSched, ICLR 2026, arXiv 2603.07020: its checkpoints of PPO,
played with its code and its data; its 15x10 is of a model that was trained at that size.

Training: ours is that of flexible_job_shop/runs.csv, one model for all sizes; that of others has
the defaults of their repositories, Song et al.'s is that of DANIEL. An episode of 10x5 has 50
decisions, one of 15x10 150. Empty: no training, or not known."""
# name of the commands -> what is different about the training
KINDS = {
    "greedy": "",
    "active": "trained with conflict sets on 5 to 30 jobs, played with active pairs",
    "conflict": "trained with conflict sets on 5 to 30 jobs, played with them",
    "longer": "trained on with up to 40 jobs, played with active pairs",
    "largest": "trained on 10 to 30 jobs and 8 to 10 machines",
}
Rows = dict[str, dict[str, float]]  # method -> suite -> mean gap


@dataclass
class Args:
    results: str = str(tables.RESULTS)
    """folder of the tables"""


def gaps(run: dict, column: str) -> np.ndarray:
    """The gap (%) of each instance of a suite."""
    cost, best = (np.array(run["eval"][name], float) for name in (column, "best_known"))
    return 100 * (cost / best - 1)


def our_rows(runs: list[dict]) -> Rows:
    """Method -> suite -> mean gap: greedy of each seed and their mean for each kind of training,
    the best samples, and the rules."""
    rows, rules = {}, {}
    greedy = {kind: {} for kind in KINDS}  # kind -> seed -> suite -> mean gap
    for run in runs:
        kind, suite = run["name"].split("-")
        if kind in KINDS:
            greedy[kind].setdefault(run["seed"], {})[suite] = gaps(run, "greedy").mean()
        else:
            best = next(name for name in run["eval"] if name.startswith("best of"))
            # of a model with other rounding: its training was not kept
            own = rows.setdefault(f"ppo_graph.py {best}, one seed of an earlier training", {})
            own[suite] = gaps(run, best).mean()
        if kind == "greedy":
            for rule in (name for name in run["eval"] if name.split()[-1] in RULES):
                *other, name = rule.split()  # a bare name is in the builder of the environment
                own = rules.setdefault(f"{name}, {(*other, 'nondelay')[0]}", {})
                own[suite] = gaps(run, rule).mean()
    ours = {}
    for kind, by_seed in greedy.items():
        name = "ppo_graph.py greedy" + f", {KINDS[kind]}" * (kind != "greedy")
        if len(by_seed) > 1 or by_seed and kind == "greedy":
            num = f"{len(by_seed)} seed{'s' * (len(by_seed) > 1)}"
            ours[f"**{name}, mean of {num}**"] = {
                suite: np.mean([row[suite] for row in by_seed.values() if suite in row])
                for suite in dict.fromkeys(suite for row in by_seed.values() for suite in row)
            }
        ours |= {f"{name}, seed {seed}": row for seed, row in by_seed.items()}
    return ours | rows | dict(sorted(rules.items()))


def solver_rows(path: Path) -> Rows:
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


def our_trainings(results: str, names: list[str]) -> dict[str, str]:
    """Method -> what its training took. Of the one of the samples no run is left."""
    folder = tables.place(results, "flexible_job_shop/runs.csv").parent

    def budget_of(kind: str) -> str:
        return tables.budget(tables.finished(folder, f"{kind}_*").values(), "decisions")

    found = {}
    for name in names:
        if name.strip("*").startswith("ppo_graph.py greedy"):
            kind = next((key for key, text in KINDS.items() if text and text in name), "train")
            kind = "conflict" if kind == "active" else kind  # the same models
            found[name] = budget_of(kind)
            if kind == "longer":
                found[name] = f"{budget_of('conflict')}; then {found[name]}"
    return found


def table(rows: Rows, suites: tuple[str, ...], trainings: dict[str, str]) -> str:
    """A markdown table; rows without any figure of these suites are left out."""
    lines = [["mean gap, %", *(suite.removeprefix("sd") for suite in suites), "training"]]
    for name, row in rows.items():
        cells = [
            f"{row[suite]:.1f}" if np.isfinite(row.get(suite, np.nan)) else "" for suite in suites
        ]
        lines += [[name, *cells, trainings.get(name, "")]] if any(cells) else []
    return tables.markdown(lines)


def main(args: Args) -> None:
    folder = Path(args.results) / "flexible_job_shop_suites"
    runs = sorted(tables.finished(folder).values(), key=lambda run: run["seed"])
    if not runs:
        raise SystemExit(f"{folder}: no suite has been played")
    ours, published = our_rows(runs), {}
    trainings = our_trainings(args.results, list(ours))
    for row in tables.read(tables.place(args.results, "flexible_job_shop_suites/published.csv")):
        found = {suite: float(row[suite]) for suite in (*RANDOM, *PUBLIC) if row[suite]}
        name = f"{row['method']} [{row['source']}]"
        published[name], trainings[name] = found, row["training"]
    rows = ours | solver_rows(Path(args.results) / "cp_sat" / "FlexibleJobShop-v0.csv") | published
    parts = [
        "    bash benchmark/flexible_job_shop.sh",
        f"{tables.about(runs)} Trainings are not counted.",
        "Test sets of Song et al. (100 random instances each), gap to OR-Tools with up to 1,800 s:",
        table(rows, RANDOM, trainings),
        "Public instances (Brandimarte's mk01-10, Hurink's la01-40), gap to the best known "
        "makespan:",
        table(rows, PUBLIC, trainings),
        SOURCES,
    ]
    tables.publish(folder, parts)


if __name__ == "__main__":
    main(tyro.cli(Args))
