"""The table of `bash benchmark/best_model.sh`: what --eval-every keeps, against the last model.

    python benchmark/best_model.py --collect     # evaluations.csv and the models of the trainings
    python benchmark/best_model.py

It writes table.md and table.png in benchmark/results/best_model: mean costs of covers on graphs
that chose neither model, and the curves of the evaluations.
"""

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tables
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from cleanrl_graph.services.plot import Look, Run, around_mean, draw  # noqa: E402

TRAININGS = {
    "falling": "from 1e-3 down to 0",
    "constant": "3e-3, constant",
}
MODELS = ("best", "model")  # best.pt, model.pt
GRAPHS = {"other": ("return", -1), "nodes20": ("greedy", 1)}  # column of eval.csv, its sign


@dataclass
class Args:
    collect: bool = False
    """copies what trainings have left to --results and to --run-dir/best_model_models"""
    plot: bool = True
    """if toggled, draws the curves"""
    results: str = str(tables.RESULTS)
    """folder of the tables"""
    run_dir: str = str(tables.RUN_DIR)
    """folder for the files of the scripts"""


def collect(folder: Path, run_dir: Path) -> None:
    """evaluations.csv of all trainings in one file, and their models by name and seed."""
    models = run_dir / "best_model_models"
    models.mkdir(parents=True, exist_ok=True)
    rows = []
    for key, run in tables.finished(folder).items():
        found = list((run_dir / "best_model" / key).glob("*/evaluations.csv"))
        if run["name"] not in TRAININGS or not found:
            continue
        for row in tables.read(found[0]):
            rows.append({"training": run["name"], "seed": run["seed"], **row})
        for name in MODELS:
            source = found[0].with_name(f"{name}.pt")
            shutil.copy(source, models / f"{run['name']}_s{run['seed']}_{name}.pt")
    if rows:
        tables.write(folder / "evaluations.csv", tables.text_of(rows))


def chosen(rows: list[dict], training: str, seed: int) -> list[tuple[int, float]]:
    """(step, mean cost) of the evaluations of a training, in their order."""
    own = [row for row in rows if (row["training"], row["seed"]) == (training, str(seed))]
    return [(int(row["step"]), -float(row["return"])) for row in own]


def lines_of(runs: list[dict], rows: list[dict]) -> list[list[str]]:
    """Header and rows of the table: each seed, and their mean."""
    lines = [
        [
            "learning rate",
            "seed",
            "step of the best",
            "chosen on: best",
            "last",
            "300 other graphs: best.pt",
            "model.pt",
            "100 of 20 nodes: best.pt",
            "model.pt",
        ]
    ]
    costs = {}  # name of a play -> mean cost
    for run in runs:
        for graphs, (column, sign) in GRAPHS.items():
            if run["name"].endswith(f"_{graphs}"):
                costs[run["name"]] = sign * float(np.mean(run["eval"][column]))
    for training, label in TRAININGS.items():
        seeds = sorted({run["seed"] for run in runs if run["name"] == training})
        figures = []
        for seed in seeds:
            points = chosen(rows, training, seed)
            step, best = min(points, key=lambda point: point[1])
            figure = [step, best, points[-1][1]]
            for graphs in GRAPHS:
                for model in MODELS:
                    figure.append(costs.get(f"{training}_s{seed}_{model}_{graphs}", np.nan))
            figures.append(figure)
            lines.append([label, str(seed), f"{step:,}", *(f"{x:.3f}" for x in figure[1:])])
        if figures:
            mean = np.mean(figures, 0)
            texts = [label, "mean", f"{mean[0]:,.0f}", *(f"{x:.3f}" for x in mean[1:])]
            lines.append([f"**{text}**" for text in texts])
    return lines


def main(args: Args) -> None:
    folder = Path(args.results) / "best_model"
    folder.mkdir(parents=True, exist_ok=True)
    if args.collect:
        collect(folder, Path(args.run_dir))
        return
    runs = list(tables.finished(folder).values())
    rows = tables.read(folder / "evaluations.csv")
    if not rows:
        raise SystemExit(f"{folder}: no training has been collected")
    took = sum(float(row["took"]) for row in rows)
    last = {(row["training"], row["seed"]): float(row["seconds"]) for row in rows}
    share = took / (took + sum(last.values()))
    parts = ["    bash benchmark/best_model.sh", tables.about(runs)]
    parts.append(
        "Mean weight of vertex covers, greedy actions; less is better. Trained for 49,152 steps on "
        "graphs of 5, 10 and 15 nodes. Every second update 100 episodes on graphs of these sizes, "
        f"always the same, choose best.pt, in {share:.0%} of the time of a run. The other graphs "
        "chose neither model: 300 of the same sizes, and the 100 test graphs of 20 nodes, whose "
        "optimum is 5.281 and for which the greedy rule finds 5.557."
    )
    parts.append(tables.markdown(lines_of(runs, rows)))
    if args.plot:
        curves = {}
        for training, label in TRAININGS.items():
            for seed in sorted({row["seed"] for row in rows}):
                own = [r for r in rows if (r["training"], r["seed"]) == (training, seed)]
                if own:
                    columns = ([float(r[k]) for r in own] for k in ("step", "seconds", "return"))
                    run = Run(folder, {}, *map(np.array, columns))
                    curves.setdefault(("", label), []).append(run)
        note = "Lines: mean over seeds of the evaluations; bands: standard deviation over seeds."
        look = Look("return of 100 greedy episodes", "VertexCover-v0", note)
        draw(folder / "table.png", curves, around_mean, look)
        parts += ["![evaluations while it trains](table.png)", note]
    commands = [re.sub(r" --seed \d+", "", run["command"]) for run in runs]
    commands = [re.sub(r"\S+_models/\S+", "MODEL", command) for command in commands]
    parts += [
        "Commands (with --seed):",
        "\n".join(f"    {each}" for each in dict.fromkeys(commands)),
    ]
    tables.publish(folder, parts)


if __name__ == "__main__":
    main(tyro.cli(Args))
