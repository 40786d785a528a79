"""The table of VertexCover-v0 from the files of `bash benchmark/vertex_cover.sh`.

    python benchmark/vertex_cover.py --solve     # OR-Tools' CP-SAT on the test graphs: solver.csv
    python benchmark/vertex_cover.py

It writes table.md and table.png in benchmark/results/vertex_cover: mean costs of the
covers of the 100 test graphs of each size by the models, the greedy rule, the solver and, where
there are published ones, the guide's networks.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import report
import tables
import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from cleanrl_graph.envs.vertex_cover import VertexCoverEnv, greedy_cost, random_instance, test_set  # noqa: E402  # noqa: E402

SUITES = {name: entries[0]["nodes"][0] for name, entries in VertexCoverEnv.eval_suites.items()}
SAMPLES = 16
PUBLISHED = {"GraphSAGE": 5.82, "GAT": 8.02, "GCN": 8.60}  # costs of 20 nodes


@dataclass
class Args:
    solve: bool = False
    """solves the test graphs and writes solver.csv, no table"""
    seconds: float = 0.2
    """time limit of the solver for each graph"""
    plot: bool = True
    """if toggled, draws the learning curves"""
    results: str = str(tables.RESULTS)
    """folder of the tables"""


def solve(edges: np.ndarray, weights: np.ndarray, seconds: float) -> tuple[float, bool]:
    """(cost of the best cover that CP-SAT finds, whether it is the optimum)."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    chosen = [model.new_bool_var("") for _ in weights]
    for source, target in edges.tolist():
        model.add_bool_or(chosen[source], chosen[target])
    model.minimize(sum(round(1e6 * w) * x for w, x in zip(weights.tolist(), chosen)))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    cost = float(sum(w for w, x in zip(weights, chosen) if solver.value(x)))
    return cost, status == cp_model.OPTIMAL


def solved(args: Args) -> Iterator[dict]:
    """A row for each test graph."""
    for nodes in SUITES.values():
        for k, (edges, weights) in enumerate(tqdm(test_set(nodes), desc=f"{nodes} nodes")):
            cost, is_optimum = solve(edges, weights, args.seconds)
            row = {"nodes": nodes, "instance": k, "cost": f"{cost:.6f}"}
            yield row | {"optimum": int(is_optimum), "seconds": args.seconds}


def training_cost(num: int = 3000) -> float:
    """The mean cost of the greedy rule on graphs of the training."""
    rng = np.random.default_rng(0)
    sizes = VertexCoverEnv().sizes
    costs = [greedy_cost(*random_instance(rng, sizes[k % len(sizes)])) for k in range(num)]
    return float(np.mean(costs))


def rows_of(runs: list[dict], solver: list[dict]) -> dict[str, dict[int, float]]:
    """Method -> number of nodes -> mean cost."""
    sizes = list(SUITES.values())
    played = [run for run in runs if run["name"] in SUITES]
    rows = {}
    for column in ("greedy", f"best of {SAMPLES}"):
        own = [run for run in played if column in run["eval"]]
        means = {}
        for run in own:
            means[run["seed"], SUITES[run["name"]]] = float(np.mean(run["eval"][column]))
        seeds = sorted({seed for seed, _ in means})
        many = f"mean of {len(seeds)} seed{'s' * (len(seeds) != 1)}"
        each = {f"ppo_graph.py {column}, seed {seed}": [seed] for seed in seeds}
        for name, some in ({f"**ppo_graph.py {column}, {many}**": seeds} | each).items():
            whole = [n for n in sizes if all((seed, n) in means for seed in some)]
            mean = lambda nodes: float(np.mean([means[seed, nodes] for seed in some]))
            rows[name] = {nodes: mean(nodes) for nodes in whole}
    rule = {n: float(np.mean([greedy_cost(*each) for each in test_set(n)])) for n in sizes}
    costs = {}
    for row in solver:
        costs.setdefault(int(row["nodes"]), []).append(float(row["cost"]))
    found = {nodes: float(np.mean(values)) for nodes, values in costs.items()}
    return (
        rows
        | {"greedy rule: least weight for an uncovered edge": rule}
        | {f"CP-SAT, at most {row['seconds']} s": found for row in solver[:1]}
        | {f"{name}, the guide": {20: cost} for name, cost in PUBLISHED.items()}
    )


def document(rows: dict, runs: list[dict], solver: list[dict]) -> list[str]:
    """The paragraphs of table.md."""
    sizes = list(SUITES.values())
    lines = [["mean cost", *(f"{nodes} nodes" for nodes in sizes)]]
    lines[0].append("above the optimum of 20, %")
    best = next((row[20] for name, row in rows.items() if name.startswith("CP-SAT")), np.nan)
    for name, row in rows.items():
        cells = [f"{row[nodes]:.3f}" if nodes in row else "" for nodes in sizes]
        gap = 100 * (row.get(20, np.nan) / best - 1)
        lines.append([name, *cells, f"{gap:.1f}" if np.isfinite(gap) else ""])
    best_of = [row["nodes"] for row in solver if row["optimum"] == "1"]
    proved = ", ".join(f"{best_of.count(str(nodes))} of {nodes} nodes" for nodes in sizes)
    parts = ["    bash benchmark/vertex_cover.sh"]
    parts.append(tables.about(runs))
    parts.append(
        "Mean weight of the vertex covers of 100 test graphs. Trained for 100,000 steps on graphs "
        "of 5, 10 and 15 nodes. The guide's figures are of its repository "
        "(alex-schutz/RL-with-GNNs, 20 nodes, 100,000 steps, its networks and Stable-Baselines3's "
        f"PPO). Of the solver's covers these are proved to be the best: {proved}."
    )
    parts += [tables.markdown(lines), "![learning curves](table.png)"]
    return parts + tables.commands(runs)


def main(args: Args) -> None:
    folder = Path(args.results) / "vertex_cover"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "solver.csv"
    if args.solve:
        tables.write(path, tables.text_of(list(solved(args))))
        return
    runs = sorted(tables.finished(folder).values(), key=lambda run: run["seed"])
    if not runs:
        raise SystemExit(f"{folder}: no model has been played")
    solver = tables.read(path)
    rows = rows_of(runs, solver)
    tables.publish(folder, document(rows, runs, solver))
    if args.plot:
        curves = report.Args("vertex_cover", ("ppo_graph.py=train_*",), results=args.results)
        curves.reference = (-training_cost(), "greedy rule")
        report.plot({("", "ppo_graph.py"): report.load_all(curves)}, curves)


if __name__ == "__main__":
    main(tyro.cli(Args))
