"""The tables and the plot of the job shops from the files of `bash benchmark/job_shop.sh`.

    python benchmark/job_shop.py

It writes table.md, table.csv and gaps.png in benchmark/results/job_shop.

Mean gaps (%) to the best known makespans per group of instances. Ours are of schedules.csv
(benchmark/schedules.py); the best of n is the mean over the disjoint groups of n among the samples
that were drawn; the rules run in the same environment; CP-SAT's rows are of benchmark/cp_sat.py;
what others have published, on other machines, stands in results/job_shop/published.csv and,
instance by instance, in envs/job_shop_published.csv. A group has a figure where all its instances
have one.
"""

import csv
import itertools
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import schedules
import tyro
from tables import RESULTS, budget, finished, markdown, place, publish, read, unique

sys.path.insert(0, str(Path(__file__).parents[1]))
from cleanrl_graph.envs import job_shop  # noqa: E402

# Taillard's, 10 instances each
GROUPS = tuple("15x15 20x15 20x20 30x15 30x20 50x15 50x20 100x20".split())
OTHERS = ("la", "orb", "swv", "abz", "yn")
L2D = {"l2d6x6": 574.1, "l2d10x10": 988.6, "l2d15x15": 1504.8, "l2d20x20": 2007.8}
L2D["l2d30x20"] = 2508.3
MAKESPANS = {  # as published
    "L2D greedy (Zhang et al. 2020)": L2D,
    "Poppy, one policy, best of 16 [p]": {"l2d10x10": 866.0},
    "Poppy, 16 policies [p]": {"l2d10x10": 857.7},
    "optimum [p]": {"l2d10x10": 807.6},
}
SUITES = {
    suite: [kwargs["instance"] for kwargs in job_shop.JobShopEnv.eval_suites[suite]]
    for suite in (*("ta" + group for group in GROUPS), *OTHERS)
}
SUITES |= {"all ta": [name for group in GROUPS for name in SUITES["ta" + group]]}
THREE = {f"ta{group}": SUITES[f"ta{group}"][:3] for group in GROUPS[3:]}
NUMBERS = (16, 128, 512)
# of the short table
SHORT = ("L2D greedy", "ScheduleNet", "Residual", "SPN greedy", "CP-SAT")
SHORT += ("Gumbeldore greedy", "TaSaR greedy")
SOURCES = """Sources: [a] AndreaCorsini1/SelfLabelingJobShop on GitHub, output/Results.xlsx. [b] Ho
et al., Residual Scheduling, arXiv 2309.15517, tables 2 to 4. [c] zcaicaros/L2S on GitHub,
test_results. [d] ScheduleOpt/benchmarks on GitHub, jobshop/solutions. [f] Liao et al., BOPO,
arXiv 2503.07580. [g] Pirnay and Grimm, arXiv 2403.15180 and 2407.17206 (TaSaR: Take a Step and
Reconsider), table 2, the groups that others quote; its whole table was not at hand. [p] Grinsztajn
et al., Poppy, NeurIPS 2023. The figures of [f], [g] and ScheduleNet are those that others quote.

Training: ours is that of job_shop_quick/runs.csv; L2D, SPN, BOPO and L2S have the defaults of their
repositories; TaSaR's is of [g]. An episode of 15x15 has 225 decisions. Empty: no training, or not
known."""
TEN = """On 128 other instances of 10x10 GOAL (ICLR 2025, table 1) has a gap of 2.7%, Gumbeldore
3.2% and COMPASS 4.7%. GOAL imitates the solutions of a million instances; its model of eight
problems was trained for 7 days on 8 servers with V100."""


@dataclass
class Args:
    results: str = str(RESULTS)
    """folder of the tables"""


Costs = dict[str, float]  # instance -> makespan


def kind_of(row: dict) -> str:
    """What the schedules of a row are."""
    sampled = f"{row['samples']} samples{heat(row)}"
    return {0: "greedy", -1: "greedy in both directions"}.get(int(row["samples"]), sampled)


def heat(row: dict) -> str:
    """At which temperature its samples were drawn, if not at 1."""
    return "" if float(row["temperature"] or 1) == 1 else f" at temperature {row['temperature']}"


def best_of(row: dict, number: int) -> float:
    """The expected best of `number` of a row's samples, nan if it has fewer; of a greedy row its
    cost."""
    costs = np.array(row["costs"].split(), float)
    groups = costs[: len(costs) // number * number].reshape(-1, number)
    return float(groups.min(axis=1).mean()) if len(groups) else np.nan


def our_costs(rows: list[dict], numbers: Iterable[int] = NUMBERS) -> dict[str, dict[str, Costs]]:
    """Method -> "seed N" -> makespans: greedy of each model, in both directions, and its best of so
    many."""
    found = {}
    for row in sorted(rows, key=lambda row: abs(int(row["samples"]))):
        sampled = int(row["samples"]) > 0
        for number in numbers if sampled else [0]:
            kind = f"best of {number}{heat(row)}" if sampled else kind_of(row)
            cost = best_of(row, number) if sampled else float(row["cost"])
            if np.isfinite(cost):
                seeds = found.setdefault(f"ours, {row['name']}, {kind}", {})
                seeds.setdefault(f"seed {row['seed']}", {})[row["instance"]] = cost
    return found


def solver_costs(path: Path) -> dict[str, Costs]:
    """Time limit -> makespans of CP-SAT; no solution in time is inf."""
    found = {}
    for row in read(path):
        name = f"CP-SAT {row['version']}, {float(row['seconds']):g} s, {row['workers']} thread"
        found.setdefault(name, {})[row["instance"]] = float(row["makespan"] or "inf")
    return found


def rule_costs(names: list[str]) -> dict[str, Costs]:
    """Rule and builder -> makespans."""
    found = {}
    for dispatch in ("nondelay", "active"):
        for name in names:
            for rule, cost in job_shop.rule_makespans(name, dispatch).items():
                found.setdefault(f"{rule}, {dispatch}", {})[name] = cost
    return found


def gap(costs: Costs, names: list[str]) -> float:
    """Mean gap (%) to the best known makespan, nan if one is missing."""
    best = np.array([job_shop.load_instance(name)[2] for name in names])
    return float(np.mean(100 * (np.array([costs.get(name, np.nan) for name in names]) / best - 1)))


def mean_gap(seeds: dict[str, Costs], names: list[str]) -> float:
    """The mean over the seeds that have all of these instances, nan if none has."""
    gaps = [gap(costs, names) for costs in seeds.values() if set(names) <= set(costs)]
    return float(np.mean(gaps)) if gaps else np.nan


def cell(value: float) -> str:
    return "" if np.isnan(value) else "no solution" if np.isinf(value) else f"{value:.1f}"


def label_of(method: str, seeds: dict[str, Costs], groups: Iterable[list[str]]) -> str:
    """Method and number of the seeds that have all of a group's instances."""
    num_seeds = lambda names: sum(set(names) <= set(costs) for costs in seeds.values())
    counts = {num_seeds(names) for names in groups} - {0}
    most = f"{'up to ' * (len(counts) > 1)}{max(counts, default=0)} seed{'s' * (counts != {1})}"
    return f"**{method}, mean of {most}**"


def trainings(results: str, published: list[dict]) -> dict[str, str]:
    """First word of a method -> what its training took."""
    found = {row["method"].split()[0].strip(","): row["training"] for row in published}
    runs = finished(place(results, "job_shop_quick/runs.csv").parent, "quick_*")
    return found | {"quick": budget(runs.values(), "decisions", cores=2)}


def with_trainings(lines: list, budgets: dict[str, str]) -> list:
    """The lines of a table that have a figure, and what each training took: "" for rules and
    solvers."""
    found = [[*lines[0], "training"]]
    for method, *cells in lines[1:]:
        name = "quick" if method.startswith("**ours, quick") else method.split()[0].strip(",")
        found += [[method, *cells, budgets.get(name, "")]] if any(cells) else []
    return found


def gap_table(
    ours: dict,
    others: dict[str, Costs],
    groups: dict[str, list[str]],
    published: dict[str, dict],
    budgets: dict[str, str],
) -> list:
    """Rows of text: a header, then a method each, of those that have a figure."""
    lines = [["mean gap, %", *(group.removeprefix("ta") for group in groups)]]
    for method, seeds in ours.items():
        cells = [mean_gap(seeds, names) for names in groups.values()]
        lines.append([label_of(method, seeds, groups.values()), *map(cell, cells)])
    for method, costs in others.items():
        lines.append([method, *(cell(gap(costs, names)) for names in groups.values())])
    for method, row in published.items():
        lines.append([method, *(row.get(group, "") for group in groups)])
    return with_trainings(lines, budgets)


def short_table(table: list, solver: dict[str, Costs]) -> list:
    """A row per group: the greedy schedules of our models, the published dispatchers, and
    CP-SAT."""
    rows = [["jobs x machines", *table[0][1:]]]
    for name, *cells in table[1:]:
        is_ours = name.startswith("**") and "greedy" in name
        if is_ours or name.startswith(SHORT) or name in solver:
            rows.append([name.split(" (")[0].split(" [")[0], *cells])
    return [list(column) for column in zip(*rows)]


def seconds_table(rows: list[dict]) -> list:
    """Median seconds of an instance, alone on one thread."""
    found = {}
    for row in rows:
        times = found.setdefault(f"{row['name']}, {kind_of(row)}", {})
        times.setdefault(row["suite"], []).append(float(row["seconds"]))
    suites = [suite for suite in dict.fromkeys(row["suite"] for row in rows)]
    return [["seconds", *suites]] + [
        [name, *(f"{np.median(times[suite]):.3g}" if suite in times else "" for suite in suites)]
        for name, times in found.items()
    ]


def l2d_table(ours: dict, budgets: dict[str, str]) -> list:
    """Mean makespans of the test sets of L2D, those that all instances of were played."""
    lines = [["mean makespan", *(suite.removeprefix("l2d") for suite in L2D)]]
    for name, row in MAKESPANS.items():
        lines.append([name, *(f"{row[suite]:.1f}" if suite in row else "" for suite in L2D)])
    groups = [[f"{suite}-{k:02d}" for k in range(100)] for suite in L2D]
    for method, seeds in ours.items():
        cells = []
        for names in groups:
            whole = [costs for costs in seeds.values() if set(names) <= set(costs)]
            means = [np.mean([costs[name] for name in names]) for costs in whole]
            cells.append(f"{np.mean(means):.1f}" if means else "")
        lines.append([label_of(method, seeds, groups), *cells])
    return with_trainings(lines, budgets)


def family_table(rows: list[dict]) -> list:
    """Mean gap (%) to the lower bound on the families of schedules.FAMILIES: ours greedily, mean of
    the seeds, and the best of the rules of either builder."""
    is_made = schedules.MADE.fullmatch
    ours, suites = {}, dict.fromkeys(row["suite"] for row in rows if is_made(row["suite"]))
    for row in rows:
        if row["suite"] in suites and not int(row["samples"]):
            own = ours.setdefault(f"**ours, {row['name']}, greedy**", {})
            own.setdefault(row["instance"], []).append(float(row["cost"]))
    lines = [["mean gap, %", *ours, "best rule", "which", "instances"]]
    for suite in suites:
        costs, bounds = {}, {}
        for name, instance in schedules.instances_of(suite).items():
            env = job_shop.JobShopEnv(instance=instance)
            env.reset()
            bounds[name] = env.bound
            shop = instance["times"], instance["machines"]
            for way, rule in itertools.product(("nondelay", "active"), job_shop.RULES[:-1]):
                cost = job_shop.play_rule(*shop, rule, way)
                costs.setdefault(f"{rule}, {way}", {})[name] = cost
        for method, found in ours.items():
            costs[method] = {name: np.mean(found.get(name, np.nan)) for name in bounds}
        gaps = {}
        for method, found in costs.items():
            gaps[method] = np.mean([100 * (found[name] / bounds[name] - 1) for name in bounds])
        best = min((method for method in gaps if method not in ours), key=gaps.get)
        cells = [cell(gaps[method]) for method in [*ours, best]]
        lines.append([suite, *cells, best, schedules.FAMILIES[is_made(suite)[1]]])
    return lines


def points_of(rows: list[dict], names: list[str]) -> dict[str, list[tuple[float, float, int]]]:
    """Label -> (seconds, mean gap, number of seeds) of what the seeds have found for all of these
    instances, as the table has it: greedily, in both directions, and as the best of n, which takes
    its share of the seconds of all samples, and at least those of a greedy schedule."""
    numbers = [2**k for k in range(2, 10)]
    found, least = {}, 0.0
    for method, seeds in our_costs(rows, numbers).items():
        value = mean_gap(seeds, names)
        if np.isnan(value):
            continue
        whole = [seed for seed, costs in seeds.items() if set(names) <= set(costs)]
        _, model, kind = method.split(", ")
        number = int(re.search(r"of (\d+)|$", kind)[1] or 0)
        times = []
        for row in rows:
            is_own = row["name"] == model and f"seed {row['seed']}" in whole
            num = int(row["samples"])
            own = f"best of {number}{heat(row)}" if num > 0 else kind_of(row)
            if is_own and row["instance"] in names and own == kind and (num >= number or num < 0):
                times.append(float(row["seconds"]) * (number / num if number else 1))
        least = max(least, np.mean(times)) if kind == "greedy" else least
        label = re.sub(r"best of \d+", "best of 4, 8, ...", f"{model}, {kind}")
        found.setdefault(label, []).append((max(least, np.mean(times)), value, len(whole)))
    return found


def plot(rows: list[dict], solver: dict[str, Costs], path: Path) -> None:
    """Mean gap of the table against seconds (log), a panel per group of Taillard: ours, and CP-SAT
    as its limit grows. What an instance of the group lacks is not shown."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(14, 6.8), sharex=True, constrained_layout=True)
    lines, colours = {}, {}  # label -> line, colour
    for group, axis in zip(GROUPS, axes.flat):
        names, seeds = SUITES[f"ta{group}"], set()
        for label, points in points_of(rows, names).items():
            style = "*" if label.endswith("greedy") else "^" if "directions" in label else "o-"
            colour = colours.setdefault(label, f"C{len(colours) + (len(colours) > 2)}")
            seconds, gaps, nums = zip(*sorted(points))
            size = 4 + 4 * (style == "*")
            (lines[label],) = axis.plot(seconds, gaps, style, color=colour, ms=size)
            seeds |= set(nums) if "best of" in label else set()
        limits = {float(re.search(r"([\d.]+) s,", name)[1]): name for name in solver}
        costs = [(limit, gap(solver[limits[limit]], names)) for limit in sorted(limits)]
        costs = [(limit, value) for limit, value in costs if np.isfinite(value)]
        if costs:
            (lines["CP-SAT, its limit"],) = axis.plot(*zip(*costs), "s--", color="tab:red", ms=5)
        note = f", samples of {' or '.join(map(str, sorted(seeds)))} seeds" if seeds else ""
        axis.set_title(group + note.replace(" 1 seeds", " 1 seed"), fontsize=10)
        axis.set(xscale="log", ylim=(0, None) if axis.lines else (0, 1))
        axis.grid(alpha=0.3)
    num = max((len(mine) for mine in our_costs(rows).values()), default=0)
    figure.supxlabel(
        "seconds for an instance, one thread. A point is a mean over the ten instances of a group; "
        f"greedy and both directions: over {num} seeds, too",
        fontsize=10,
    )
    figure.supylabel("gap to the best known makespan, %")
    figure.legend(lines.values(), lines, loc="outside upper center", ncols=3, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(args: Args) -> None:
    folder = Path(args.results) / "job_shop"
    rows = read(folder / "schedules.csv")
    if not rows:
        raise SystemExit(f"{folder / 'schedules.csv'}: no instance has been played")
    ours = our_costs(rows)
    solver = solver_costs(Path(args.results) / "cp_sat" / "JobShop-v0.csv")
    single = [names for suite, names in SUITES.items() if suite != "all ta"]
    rules = rule_costs([name for names in single for name in names])
    published = {}
    quoted = read(place(args.results, "job_shop/published.csv"))
    budgets = trainings(args.results, quoted)
    for row in quoted:
        groups = {"all ta" if name == "all 80" else "ta" + name: x for name, x in row.items()}
        published[f"{row['method']} [{row['source']}]"] = groups
    per_instance = {}
    for row in job_shop.published().values():
        for method, value in row.items():
            if method != "instance" and value:
                per_instance.setdefault(f"{method} [a]", {})[row["instance"]] = float(value)
    taillard = {suite: names for suite, names in SUITES.items() if "ta" in suite}
    others = {suite: SUITES[suite] for suite in OTHERS}
    best = {method: seeds for method, seeds in ours.items() if "best" in method}
    tables = [
        gap_table(ours, solver | rules, taillard, published, budgets),
        gap_table(best, solver | per_instance, THREE, {}, budgets),
        gap_table(ours, solver | rules | per_instance, others, {}, budgets),
        l2d_table(ours, budgets),
        family_table(rows),
        seconds_table([row for row in rows if not schedules.MADE.fullmatch(row["suite"])]),
    ]
    parts = [
        "    bash benchmark/job_shop.sh",
        f"{unique(row['cpu'] for row in rows)}, one thread. Commits: [all](schedules.csv).",
        "Taillard's 80 instances, mean gap to the best known makespan, %:",
        markdown(short_table(tables[0], solver)),
        "All methods:",
        markdown(tables[0]),
        "The first three instances of each larger group:",
        markdown(tables[1]),
        "Other instances:",
        markdown(tables[2]),
        "The test sets of L2D:",
        markdown(tables[3]),
        TEN,
        "Random instances, 10 of each family, with times or routes that no training has had (but "
        "for uniform, and halves in quick), gap to the lower bound before the first decision:",
        markdown(tables[4]),
        "Median seconds of an instance:",
        markdown(tables[5]),
        "![gaps against seconds](gaps.png)",
        SOURCES,
    ]
    publish(folder, parts)
    with open(folder / "table.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "seed", *SUITES])
        for method, seeds in ours.items():
            for seed, costs in seeds.items():
                values = [gap(costs, names) for names in SUITES.values()]
                cells = ["" if np.isnan(value) else f"{value:.3f}" for value in values]
                writer.writerow([method, seed, *cells])
    plot(rows, solver, folder / "gaps.png")


if __name__ == "__main__":
    main(tyro.cli(Args))
