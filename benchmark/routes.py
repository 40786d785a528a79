"""The table of TSPInsert-v0 from the files of `bash benchmark/routes.sh`.

    python benchmark/routes.py --rules     # the rules on the test instances: rules.csv
    python benchmark/routes.py --film runs/routes_models/seed1.pt     # tour.gif, of 50 cities
    python benchmark/routes.py

It writes table.md and table.png in benchmark/results/routes: mean lengths of the tours of the test
instances of each size by the models, by rules, and as published.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
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

SUITES = {f"cities{num}": num for num in (20, 50, 100)}
# Mean lengths for 20 and 50 cities, of 10,000 random instances: Kool et al. 2019 (arXiv:1803.08475)
# and, with others of the same kind, Kwon et al. 2020 (arXiv:2010.16011)
PUBLISHED = {
    "optimum (Kwon et al. 2020)": (3.83, 5.69),
    "POMO, one trajectory (Kwon et al. 2020)": (3.83, 5.73),
    "attention model, greedy (Kool et al. 2019)": (3.85, 5.80),
    "S2V-DQN (Dai et al. 2017)": (3.89, 5.99),
}


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


def from_the_hull(places: np.ndarray) -> list[int]:
    """The tour that the rule of TSPInsert-v0 makes."""
    hull = routes.convex_hull(places)
    left = np.setdiff1d(np.arange(len(places)), hull)
    return routes.insert_by_regret(routes.distances_of(places), hull, left)


RULES = {
    "nearest neighbour": lambda places: routes.nearest_neighbour(routes.distances_of(places)),
    "farthest insertion": lambda places: routes.farthest_insertion(routes.distances_of(places)),
    "convex hull, then the largest regret": from_the_hull,
}


def played() -> Iterator[dict]:
    """A row for each rule and size."""
    for suite, num in SUITES.items():
        some = routes.tsp_test_set(num)[: len(routes.TSPInsertEnv.eval_suites[suite])]
        for name, rule in RULES.items():
            each = tqdm(some, desc=f"{name}, {num} cities")
            lengths = [routes.length_of(routes.distances_of(p), rule(p)) for p in each]
            yield {"rule": name, "cities": num, "length": f"{np.mean(lengths):.5f}"}


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


def rows_of(runs: list[dict], rules: list[dict]) -> dict[str, dict[int, float]]:
    """Method -> number of cities -> mean length."""
    means = {}
    for run in (each for each in runs if each["name"] != "mini"):
        suite = "cities20" if run["name"] == "train" else run["name"]
        means[run["seed"], SUITES[suite]] = float(np.mean(run["eval"]["length"]))
    seeds = sorted({seed for seed, _ in means})
    many = f"mean of {len(seeds)} seed{'s' * (len(seeds) != 1)}"
    own = {f"**ppo_graph.py, greedy, {many}**": seeds}
    if len(seeds) > 1:
        own |= {f"ppo_graph.py, greedy, seed {seed}": [seed] for seed in seeds}
    rows = {}
    for name, some in own.items():
        whole = [n for n in SUITES.values() if all((seed, n) in means for seed in some)]
        rows[name] = {n: float(np.mean([means[seed, n] for seed in some])) for n in whole}
    for row in rules:
        rows.setdefault(row["rule"], {})[int(row["cities"])] = float(row["length"])
    published = {name: dict(zip(SUITES.values(), row)) for name, row in PUBLISHED.items()}
    return rows | published


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


def document(rows: dict, runs: list[dict], mini: list[float]) -> list[str]:
    """The paragraphs of table.md."""
    lines = [["mean length", *(f"{num} cities" for num in SUITES.values())]]
    for name, row in rows.items():
        digits = 2 if name in PUBLISHED else 3
        cells = [f"{row[num]:.{digits}f}" if num in row else "" for num in SUITES.values()]
        lines.append([name, *cells])
    parts = ["    bash benchmark/routes.sh", tables.about(runs)]
    parts.append(
        "Mean length of the tours of the attention model's test instances: all 10,000 of 20 cities "
        "and, for models and rules, the first 1,000 of 50 and of 100. Trained on random instances "
        "of 20 cities alone. The model begins with the convex hull, each of its actions inserts a "
        "city at the best place, and its rewards compare with the rule that inserts the city of "
        "largest regret: that rule is what learning has to improve. Published policies for 50 "
        "cities were trained on as many; figures of Kool et al. 2019 (arXiv:1803.08475) and, of "
        "10,000 other instances, Kwon et al. 2020 (arXiv:2010.16011)."
    )
    if mini:
        percent = " / ".join(f"{value:.2f}" for value in mini)
        parts.append(
            "ppo_graph_mini.py in 60,000 steps: the tours that it samples in the last tenth of its "
            f"training are {percent}% shorter than the rule's."
        )
    parts += [tables.markdown(lines), "![learning curves](table.png)"]
    return parts + tables.commands(runs)


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
    tables.publish(folder, document(rows_of(runs, tables.read(path)), runs, last_returns(folder)))
    if args.plot:
        curves = report.Args("routes", ("ppo_graph.py=train_*",), results=args.results)
        curves.reference = (0.0, "rule: largest regret")
        report.plot({("", "ppo_graph.py"): report.load_all(curves)}, curves)


if __name__ == "__main__":
    main(tyro.cli(Args))
