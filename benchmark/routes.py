"""The tables of TSPInsert-v0 and CVRPSavings-v0 from the files of `bash benchmark/routes.sh`.

    python benchmark/routes.py --rules     # the rules on the test instances: rules.csv
    python benchmark/routes.py --film runs/routes_models/seed1.pt     # tour.gif, of 50 cities
    python benchmark/routes.py

It writes table.md and table.png in benchmark/results/routes: mean lengths of tours, and of a
vehicle's routes, on the test instances of each size by the models, by rules, and as published.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import report
import tables
import tyro
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from cleanrl_graph import load_policy  # noqa: E402
from cleanrl_graph.envs import routes  # noqa: E402

SIZES = (20, 50, 100)
KOOL, KWON = "Kool et al. 2019", "Kwon et al. 2020"  # arXiv:1803.08475, arXiv:2010.16011


def from_the_hull(places: np.ndarray) -> list[int]:
    """The tour that the rule of TSPInsert-v0 makes."""
    hull = routes.convex_hull(places)
    left = np.setdiff1d(np.arange(len(places)), hull)
    return routes.insert_by_regret(routes.distances_of(places), hull, left)


def by_savings(distances: np.ndarray, demands: np.ndarray) -> list[list[int]]:
    """The routes that the rule of CVRPSavings-v0 makes."""
    alone = [[customer] for customer in range(1, len(demands))]
    return routes.merge_by_savings(distances, demands, capacity_of(demands), alone)


def nearest_customer(distances: np.ndarray, demands: np.ndarray) -> list[list[int]]:
    """Routes that go on to the nearest customer whose demand the vehicle still has."""
    left, found, load = set(range(1, len(demands))), [], 0
    while left:
        allowed = [place for place in left if demands[place] <= load]
        if not allowed:
            found.append([])
            load, allowed = capacity_of(demands), list(left)
        now = found[-1][-1] if found[-1] else 0
        found[-1].append(min(allowed, key=lambda place: distances[now, place]))
        load -= demands[found[-1][-1]]
        left.remove(found[-1][-1])
    return found


def capacity_of(demands: np.ndarray) -> int:
    return routes.CAPACITIES[len(demands) - 1]


def tour_lengths(num: int, rule) -> Iterator[float]:
    for places in routes.tsp_test_set(num):
        yield routes.length_of(routes.distances_of(places), rule(places))


def route_lengths(num: int, rule) -> Iterator[float]:
    for places, demands in zip(*routes.cvrp_test_set(num)):
        distances = routes.distances_of(places)
        yield routes.length_of_routes(distances, rule(distances, demands))


@dataclass(frozen=True)
class Task:
    """A table: what is played, by rules and as published, for each number of places."""

    train: str  # name of the training's runs, whose evaluation is that of the first size
    each: str  # cities or customers
    env: type
    lengths: Callable[[int, Callable], Iterator[float]]
    rules: dict[str, Callable]
    published: dict[str, tuple[float | None, ...]]


TASKS = {
    "Travelling salesman": Task(
        "train",
        "cities",
        routes.TSPInsertEnv,
        tour_lengths,
        {
            "nearest neighbour": lambda p: routes.nearest_neighbour(routes.distances_of(p)),
            "farthest insertion": lambda p: routes.farthest_insertion(routes.distances_of(p)),
            "convex hull, then the largest regret": from_the_hull,
        },
        {
            f"optimum ({KOOL})": (3.84, 5.70, 7.76),
            f"POMO, one trajectory ({KWON})": (3.83, 5.73, 7.84),
            f"attention model, greedy ({KOOL})": (3.85, 5.80, 8.12),
            "S2V-DQN (Dai et al. 2017)": (3.89, 5.99, 8.31),
        },
    ),
    "Vehicle routing": Task(
        "vehicle",
        "customers",
        routes.CVRPSavingsEnv,
        route_lengths,
        {"nearest customer": nearest_customer, "savings (Clarke and Wright 1964)": by_savings},
        {
            f"optimum ({KOOL})": (6.10, None, None),
            f"LKH3 ({KOOL})": (6.14, 10.38, 15.65),
            f"POMO, best of a trajectory per customer ({KWON})": (6.17, 10.49, 15.83),
            f"POMO, one trajectory ({KWON})": (6.35, 10.74, 16.15),
            f"attention model, greedy ({KOOL})": (6.40, 10.98, 16.80),
            f"OR-Tools ({KOOL})": (6.43, 11.31, 17.16),
            "policy gradient, greedy (Nazari et al. 2018)": (6.59, 11.39, 17.23),
        },
    ),
}


TOURS = (
    "`TSPInsert-v0` begins with the convex hull, an action inserts a city at the best place, and "
    "rewards compare with the rule that inserts the city of largest regret: that rule is what "
    "learning has to improve."
)
VEHICLES = (
    "`CVRPSavings-v0` begins with a route for each customer, an action links two routes, and "
    "rewards compare with the rule of Clarke and Wright, which links where that saves the most: "
    "that rule is what learning has to improve. Capacities are 30, 40 and 50."
)


@dataclass
class Args:
    rules: bool = False
    """plays the rules and writes rules.csv, no table"""
    film: str | None = None
    """model whose tour of the first test instance of 50 cities becomes tour.gif, no table"""
    plot: bool = True
    """if toggled, draws the learning curves"""
    results: str = str(tables.RESULTS)
    """folder of the tables"""


def played() -> Iterator[dict]:
    """A row for each task, rule and size."""
    for task in TASKS.values():
        for num in SIZES:
            count = len(task.env.eval_suites[f"{task.each}{num}"])
            for name, rule in task.rules.items():
                lengths = islice(task.lengths(num, rule), count)
                lengths = list(tqdm(lengths, f"{name}, {num} {task.each}", count))
                size = f"{task.each}{num}"
                yield {"suite": size, "rule": name, "length": f"{np.mean(lengths):.5f}"}


def film(model: str, path: Path) -> None:
    """Each picture is a tour that the policy has made longer by a city."""
    kwargs = routes.TSPInsertEnv.eval_suites["cities50"][0]
    env, policy = routes.TSPInsertEnv(**kwargs, render_mode="rgb_array"), load_policy(model)
    obs, _ = env.reset(seed=0)
    pictures, terminated = [env.render()], False
    while not terminated:
        obs, _, terminated, _, _ = env.step(policy(obs))
        pictures.append(env.render())
    pictures += pictures[-1:] * 8  # the end stays for a second and a half
    frames = [Image.fromarray(p).resize((320, 320), Image.LANCZOS).quantize(16) for p in pictures]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=180, loop=0)


def rows_of(task: Task, runs: list[dict], rules: list[dict]) -> list[list[str]]:
    """The rows of the table: models, rules, published figures."""
    suites = [f"{task.each}{num}" for num in SIZES]
    rows = [["mean length", *(f"{num} {task.each}" for num in SIZES)]]

    def add(name: str, lengths: Iterable[float | None], digits: int = 3) -> None:
        cells = ["" if length is None else f"{length:.{digits}f}" for length in lengths]
        rows.append([name, *cells])

    means = {}
    for run in runs:
        suite = suites[0] if run["name"] == task.train else run["name"]
        if suite in suites:
            means[run["seed"], suite] = float(np.mean(run["eval"]["length"]))
    seeds = sorted({seed for seed, _ in means})
    per_seed = {seed: [means.get((seed, suite)) for suite in suites] for seed in seeds}
    columns = zip(*per_seed.values())
    mean = [None if None in column else float(np.mean(column)) for column in columns]
    if seeds:
        add(f"**ppo_graph.py, greedy, mean of {len(seeds)} seed{'s' * (len(seeds) > 1)}**", mean)
    if len(seeds) > 1:
        for seed, lengths in per_seed.items():
            add(f"ppo_graph.py, greedy, seed {seed}", lengths)
    by_rule = {(row["rule"], row["suite"]): float(row["length"]) for row in rules}
    for rule in task.rules:
        add(rule, [by_rule.get((rule, suite)) for suite in suites])
    for name, lengths in task.published.items():
        add(name, lengths, digits=2)
    return rows


def last_returns(folder: Path) -> list[float]:
    """The mean return of the last tenth of each training of the short file."""
    found = []
    for run, rows in tables.curves_of(folder).items():
        if run.startswith("mini_"):
            columns = ("step", "return", "episodes")
            steps, returns, episodes = np.array([[float(r[c]) for c in columns] for r in rows]).T
            late = steps > 0.9 * steps[-1]
            found.append(float(np.average(returns[late], weights=episodes[late])))
    return found


def document(runs: list[dict], rules: list[dict], mini: list[float]) -> list[str]:
    """The paragraphs of table.md."""
    parts = ["    bash benchmark/routes.sh", tables.about(runs)]
    parts.append(
        "Mean length on the attention model's test instances: all 10,000 of 20 cities or customers "
        "and, for models and rules, the first 1,000 of 50 and of 100. Trained on random instances "
        "of 20 alone; the published policies for 50 and 100 were trained on as many. Figures are "
        f"those of {KOOL} (arXiv:1803.08475), which has others' too, and, of 10,000 other "
        f"instances whose optimal tours are 3.83 long, {KWON} (arXiv:2010.16011)."
    )
    for (title, task), text in zip(TASKS.items(), (TOURS, VEHICLES)):
        parts += [f"## {title}", text]
        if title == "Travelling salesman" and mini:
            percent = " / ".join(f"{value:.2f}" for value in mini)
            parts.append(
                "ppo_graph_mini.py in 60,000 steps: the tours that it samples in the last tenth of "
                f"its training are {percent}% shorter than the rule's."
            )
        parts.append(tables.markdown(rows_of(task, runs, rules)))
    return [*parts, "![learning curves](table.png)", *tables.commands(runs)]


def main(args: Args) -> None:
    folder = Path(args.results) / "routes"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rules.csv"
    if args.rules:
        tables.write(path, tables.text_of(list(played())))
        return
    if args.film:
        film(args.film, folder / "tour.gif")
        return
    runs = sorted(tables.finished(folder).values(), key=lambda run: run["seed"])
    if not runs:
        raise SystemExit(f"{folder}: no model has been played")
    tables.publish(folder, document(runs, tables.read(path), last_returns(folder)))
    if args.plot:
        groups = ("tours=train_*", "routes of a vehicle=vehicle_*")
        curves = report.Args("routes", groups, results=args.results)
        curves.reference = (0.0, "rule")
        report.plot({("", "ppo_graph.py"): report.load_all(curves)}, curves)


if __name__ == "__main__":
    main(tyro.cli(Args))
