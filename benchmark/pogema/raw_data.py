"""What the raw data of POGEMA's benchmark say of other methods; whether Pogema-v0 has its tasks.

    git clone https://github.com/Cognitive-AI-Systems/pogema-benchmark
    python benchmark/pogema/raw_data.py --data pogema-benchmark

Into benchmark/results/pogema it writes

- theirs.csv: a row for each method and suite, means over its tasks. steps is the length of lifelong
  episodes: the fewest of which all throughputs are multiples.
- the section protocol of tables.md: maps, starts and goals beside theirs.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scores
import tyro
import yaml

from cleanrl_graph.envs.pogema import NUMBERS, PogemaEnv, map_text

FOLDERS = {"random": "01-random", "mazes": "02-mazes", "warehouse": "03-warehouse"}
LIFELONG = ("IQL", "QMIX", "QPLEX", "MAMBA", "Follower", "RHCR")
ONE_SHOT = ("IQL", "QMIX", "QPLEX", "MAMBA", "DCC", "SCRIMP", "LaCAM")
FEWEST = {"random": 8, "mazes": 8, "warehouse": 32}  # robots, who hinder each other least
COLUMNS = ["system", "suite", "tasks", "steps", "throughput", "success", "arrived"]
TEXT = """    python benchmark/pogema/raw_data.py --data pogema-benchmark

Maps: {maps}.

Starts and goals follow from seeds. The raw data do not have them, but what planners did with them.
Robots that do not hinder each other walk shortest ways: their throughput, and the sum of their
distances, are bounds, which planners nearly reach where robots are few. With other starts, other
goals or another order of goals these would not go up and down with a planner's figures from task to
task, and would be exceeded.

{table}

The map of the warehouse beside the raw data has '$', '@' and '.' where the newer one in algorithms/
has '@', '$' and '!' (starts, goals, neither). The figures follow the newer one: with the older
one as pogema 1.4.0 reads it the correlation of throughputs is {other:.3f}.
"""


@dataclass
class Args:
    data: str
    """a clone of Cognitive-AI-Systems/pogema-benchmark"""
    results: str = str(scores.RESULTS / "pogema")
    """folder of the two files"""


def metrics_of(args: Args, suite: str, system: str) -> list[dict]:
    """The metrics of a method in the tasks of a suite, in their order; [] if there are none."""
    kind = "raw_data_MAPF" if suite.startswith("one_shot") else "raw_data_LMAPF"
    name, num = suite.removeprefix("one_shot_").split("_")
    path = Path(args.data, kind, FOLDERS[name], f"{system}.json")
    found = []
    for row in json.loads(path.read_text()) if path.exists() else []:
        task = row["env_grid_search"]
        if task["num_agents"] == int(num):
            found.append((task.get("map_name", ""), task.get("seed", 0), row["metrics"]))
    found.sort(key=lambda entry: entry[:2])
    return [metrics for _, _, metrics in found]


def their_rows(args: Args) -> list[dict]:
    """The rows of theirs.csv."""
    rows = []
    for name, numbers in NUMBERS.items():
        for num in numbers:
            suite = f"{name}_{num}"
            for system in LIFELONG:
                found = [m["avg_throughput"] for m in metrics_of(args, suite, system)]
                if found:
                    row = {"system": system, "suite": suite, "tasks": len(found)}
                    row["steps"] = 256 if any(value * 128 % 1 for value in found) else 128
                    rows.append(row | {"throughput": round(float(np.mean(found)), 4)})
            suite = f"one_shot_{suite}"
            for system in ONE_SHOT:
                found = metrics_of(args, suite, system)
                if found:
                    row = {"system": system, "suite": suite, "tasks": len(found)}
                    row["success"] = round(float(np.mean([m["CSR"] for m in found])), 4)
                    row["arrived"] = round(float(np.mean([m["ISR"] for m in found])), 4)
                    rows.append(row)
    return rows


# ---- The protocol ----
def unhindered(task: dict) -> float:
    """Throughput of robots that do not hinder each other."""
    env = PogemaEnv(**task)
    env.reset(seed=0)
    num_reached = 0
    for robot in range(len(env.place)):
        time = 0
        while True:
            row = env.grid.rows(env.goal[[robot]])[0]
            time += max(int(env.grid.costs[row, env.place[robot]]), 1)
            if time > env.length:
                break
            num_reached += 1
            env.place[robot] = env.goal[robot]
            env.goal[robot] = env.next_goal(robot)
    return num_reached / env.length


def distances(task: dict) -> float:
    """Sum over the robots of the steps to their goals."""
    env = PogemaEnv(**task)
    env.reset(seed=0)
    return float(env.to_go[:, 0].sum())


def maps_of(args: Args, name: str) -> list[str]:
    path = Path(args.data, "raw_data_LMAPF", FOLDERS[name], "maps.yaml")
    return [text.strip() for text in yaml.safe_load(path.read_text()).values()]


def protocol(args: Args) -> str:
    """The section protocol of tables.md."""
    maps = []
    for name in ("random", "mazes"):
        texts = maps_of(args, name)
        same = sum(text == map_text(name, seed) for seed, text in enumerate(texts))
        maps.append(f"{same} of {len(texts)} of {name} are equal")
    older = maps_of(args, "warehouse")[0]
    obstacles = [text.replace("\n", "").count("#") for text in (older, map_text("warehouse", 0))]
    maps.append("that of the warehouse has {} obstacles here, {} there".format(*obstacles[::-1]))
    lines = [
        "| setting, number of robots | tasks | planner | bound | correlation | equal | exceeded |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, num in FEWEST.items():
        suite = f"{name}_{num}"
        tasks = PogemaEnv.eval_suites[suite]
        theirs = [m["avg_throughput"] for m in metrics_of(args, suite, "RHCR")]
        bounds = [unhindered(task) for task in tasks]
        lines.append(line(f"{name} {num}, throughput", "RHCR", theirs, bounds, -1))
        suite = f"one_shot_{suite}"
        theirs = [m["SoC"] for m in metrics_of(args, suite, "LaCAM")]
        bounds = [distances(task) for task in PogemaEnv.eval_suites[suite]]
        lines.append(line(f"{name} {num}, sum of costs", "LaCAM", theirs, bounds, 1))
    other = older_correlation(args)
    return TEXT.format(maps=", ".join(maps), table="\n".join(lines), other=other)


def older_correlation(args: Args) -> float:
    """Of the throughputs of RHCR and those unhindered on the map beside the raw data."""
    theirs = [m["avg_throughput"] for m in metrics_of(args, "warehouse_32", "RHCR")]
    text = maps_of(args, "warehouse")[0] + "\n"
    tasks = [task | {"map": text} for task in PogemaEnv.eval_suites["warehouse_32"]]
    return np.corrcoef(theirs, [unhindered(task) for task in tasks])[0, 1]


def line(name: str, planner: str, theirs: list, bounds: list, sign: int) -> str:
    """A row of the table. sign: 1 for a lower bound, -1 for an upper one."""
    theirs, bounds = np.array(theirs), np.array(bounds)
    margin = sign * (theirs - bounds)
    cells = [name, len(bounds), f"{planner} {theirs.mean():.4g}", f"{bounds.mean():.4g}"]
    cells += [f"{np.corrcoef(theirs, bounds)[0, 1]:.3f}", (margin == 0).sum(), (margin < 0).sum()]
    return "| " + " | ".join(map(str, cells)) + " |"


def main(args: Args) -> None:
    folder = Path(args.results)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "theirs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(their_rows(args))
    text = protocol(args)
    scores.put(f"{folder}/tables.md#protocol", text)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
