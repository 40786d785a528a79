"""What the raw data of POGEMA's benchmark say of other methods.

    git clone https://github.com/Cognitive-AI-Systems/pogema-benchmark
    python benchmark/pogema/raw_data.py --data pogema-benchmark

It writes theirs.csv in benchmark/results/pogema: a row for each method and suite, means over its
tasks. steps is the length of lifelong episodes: the fewest of which all throughputs are multiples.
"""

import csv
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scores
import tyro

from cleanrl_graph.envs.pogema import NUMBERS

FOLDERS = {"random": "01-random", "mazes": "02-mazes", "warehouse": "03-warehouse"}
LIFELONG = ("IQL", "QMIX", "QPLEX", "MAMBA", "Follower", "RHCR")
ONE_SHOT = ("IQL", "QMIX", "QPLEX", "MAMBA", "DCC", "SCRIMP", "LaCAM")
COLUMNS = ["system", "suite", "tasks", "steps", "throughput", "success", "arrived"]


@dataclass
class Args:
    data: str
    """a clone of Cognitive-AI-Systems/pogema-benchmark"""
    results: str = str(scores.RESULTS / "pogema")
    """folder of theirs.csv"""


def metrics_of(args: Args, suite: str, system: str) -> dict[str, list[float]]:
    """What is measured -> its values in the tasks of a suite; {} if the method has none."""
    kind = "raw_data_MAPF" if suite.startswith("one_shot") else "raw_data_LMAPF"
    name, num = suite.removeprefix("one_shot_").split("_")
    path = Path(args.data, kind, FOLDERS[name], f"{system}.json")
    found = {}
    for row in json.loads(path.read_text()) if path.exists() else []:
        if row["env_grid_search"]["num_agents"] == int(num):
            for key, value in row["metrics"].items():
                found.setdefault(key, []).append(value)
    return found


def main(args: Args) -> None:
    rows = []
    mean = lambda values: round(float(np.mean(values)), 4)
    lifelong = [f"{name}_{num}" for name, numbers in NUMBERS.items() for num in numbers]
    for suite, system in itertools.product(lifelong, LIFELONG):
        if values := metrics_of(args, suite, system).get("avg_throughput"):
            steps = 256 if any(value * 128 % 1 for value in values) else 128
            rows.append([system, suite, len(values), steps, mean(values), "", ""])
    for suite, system in itertools.product(lifelong, ONE_SHOT):
        suite = f"one_shot_{suite}"
        if found := metrics_of(args, suite, system):
            figures = mean(found["CSR"]), mean(found["ISR"])
            rows.append([system, suite, len(found["CSR"]), "", "", *figures])
    rows.sort(key=lambda row: lifelong.index(row[1].removeprefix("one_shot_")))
    with open(Path(args.results, "theirs.csv"), "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main(tyro.cli(Args))
