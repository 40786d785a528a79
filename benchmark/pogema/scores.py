"""Scores on the tasks of POGEMA's benchmark: rules, trained policies, and what the benchmark's raw
data say of other methods (theirs.csv, from raw_data.py).

    python benchmark/pogema/scores.py                 # plays what is missing
    python benchmark/pogema/scores.py --suites random_32 --tasks 8

Into benchmark/results/pogema it writes a section of tables.md and scores.csv, a row for each
system, seed, suite and mode, written as soon as it is played and never played again. `values` are
the throughput or the success of each task, `error` is the standard error of their mean. Systems
are the rules of cleanrl_graph/envs/pogema.py and the runs of benchmark/pogema.sh that have a model,
whose moves are sampled from the policy, or greedy: its most likely ones.
"""

import json
import re
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]
from tables import RESULTS, RUN_DIR, added, budget, finished, place, put, read  # noqa: E402

from cleanrl_graph import load_policy  # noqa: E402
from cleanrl_graph.envs.pogema import RULES, PogemaEnv, play  # noqa: E402
from cleanrl_graph.services.policy import read_model  # noqa: E402

LIFELONG = ("random_32", "random_64", "mazes_32", "mazes_64", "warehouse_192")
SUITES = LIFELONG + tuple(f"one_shot_{suite}" for suite in LIFELONG)
NAMES = {  # runs of pogema.sh
    "agents": "**ppo_graph_agents.py**",
    "longer": "four times the steps",
    "short": "a quarter of the steps",
    "no_links": "a quarter, without links between robots",
    "no_cost": "a quarter, without cost-to-go",
    "joint": "a quarter, one reward for all robots (ppo_graph.py)",
}
RULE_NAMES = {
    "random": "random",
    "shortest": "shortest path",
    "dodge": "shortest path; who is stuck: a random move every other step",
}
TRAININGS = {  # theirs: Skrynnik et al., ICLR 2025, appendix I, and the settings in its repository
    **dict.fromkeys(("IQL", "QMIX", "QPLEX"), "1M steps of 8 robots, 5 GPU hours"),
    "MAMBA": "50k steps, lifelong, 6 GPU days; 200k, one-shot, 20 GPU hours",
    "MATS-LP": "not known; searches 250 nodes a move",
    "Follower": "1,000M frames",
    **dict.fromkeys(("ASwitcher", "DCC", "SCRIMP"), "not known"),
    **dict.fromkeys(("RHCR", "LaCAM"), "none: plans for all robots"),
}
COLUMNS = ["system", "seed", "mode", "suite", "tasks", "throughput", "success", "arrived"]
COLUMNS += ["error", "cpu_seconds", "values"]
BATCH = 16  # tasks that are played side by side


@dataclass
class Args:
    suites: tuple[str, ...] = SUITES
    """suites of Pogema-v0 to play"""
    tasks: int = 128
    """tasks of each suite"""
    runs: str = str(RUN_DIR / "pogema")
    """folder of the runs of pogema.sh"""
    results: str = str(RESULTS / "pogema")
    """folder of the tables"""


def systems_of(args: Args) -> list[tuple[str, str, str, str]]:
    """(system, seed, mode, model.pt) of all that is played; rules have no model."""
    systems = [(rule, "", "", "") for rule in RULES]
    for path in sorted(Path(args.runs).glob("*_Pogema-v0_s*/**/model.pt")):
        run = path.relative_to(args.runs).parts[0]
        name, seed = re.match(r"(.*)_Pogema-v0_s(\d+)_", run).groups()
        systems += [(name, seed, mode, str(path)) for mode in ("sampled", "greedy")]
    return systems


def options_of(path: str) -> dict:
    """What robots see, as in the training of a model."""
    kwargs = read_model(path)["args"]["env_kwargs"]
    first = kwargs[0] if isinstance(kwargs, list) else kwargs
    return {name: first[name] for name in ("link_radius", "cost_to_go") if name in first}


def play_model(path: str, tasks: list[dict], is_greedy: bool) -> list[dict]:
    """info["eval"] of each task."""
    torch.manual_seed(0)
    options = options_of(path)
    found = []
    for first in range(0, len(tasks), BATCH):
        envs = [PogemaEnv(**task, **options) for task in tasks[first : first + BATCH]]
        policy = load_policy(path, envs[0], num_envs=len(envs), greedy=is_greedy)
        observed = [env.reset(seed=0)[0] for env in envs]
        ends = [None] * len(envs)
        while None in ends:
            for k, action in enumerate(policy(observed)):
                if ends[k] is None:
                    observed[k], _, terminated, truncated, info = envs[k].step(action)
                    ends[k] = info["eval"] if terminated or truncated else None
        found += ends
    return found


def score(system: tuple, suite: str, num_tasks: int) -> dict:
    """The row of a system and a suite."""
    name, seed, mode, path = system
    tasks = PogemaEnv.eval_suites[suite][:num_tasks]
    start = time.process_time()
    if path:
        ends = play_model(path, tasks, mode == "greedy")
    else:
        ends = [play(PogemaEnv(**task), RULES[name], k) for k, task in enumerate(tasks)]
    row = {"system": name, "seed": seed, "mode": mode, "suite": suite, "tasks": len(tasks)}
    main = "success" if suite.startswith("one_shot") else "throughput"
    for column in ("throughput", "success", "arrived"):
        if column in ends[0]:
            row[column] = round(float(np.mean([end[column] for end in ends])), 4)
    values = [round(end[main], 5) for end in ends]
    row["error"] = round(float(np.std(values) / len(values) ** 0.5), 4)
    row["cpu_seconds"] = round(time.process_time() - start, 1)
    return row | {"values": json.dumps(values)}


def key_of(row: dict) -> tuple:
    return row["system"], row["seed"], row["mode"], row["suite"], int(row["tasks"])


def play_missing(args: Args) -> list[dict]:
    """All rows of scores.csv."""
    path = Path(args.results, "scores.csv")
    done = {key_of(row) for row in read(path)}
    left = []
    for suite in args.suites:
        for system in systems_of(args):
            num = min(args.tasks, len(PogemaEnv.eval_suites[suite]))
            if (*system[:3], suite, num) not in done:
                left.append((system, suite))
    with added(path, COLUMNS) as add:
        for system, suite in tqdm(left, unit="suite", mininterval=1):
            add(score(system, suite, args.tasks))
    return [row for row in read(path) if int(row["tasks"]) == args.tasks]


# ---- Tables ----
def cells_of(rows: list[dict], suites: list[str], column: str) -> list[str]:
    """For each suite the mean over the seeds, and each of them if there are several."""
    cells = []
    for suite in suites:
        found = [row for row in rows if row["suite"] == suite and row[column] != ""]
        found.sort(key=lambda row: int(row.get("seed") or 0))
        values = [float(row[column]) for row in found]
        text = f"{np.mean(values):.2f}" if values else ""
        if len(values) > 1:
            text += f" ({', '.join(f'{value:.2f}' for value in values)})"
        cells.append(text)
    return cells


def table(
    rows: list[dict], theirs: list[dict], suites: list[str], column: str, budgets: dict[str, str]
) -> list[str]:
    """Lines of a markdown table: methods of the raw data, rules, policies, with their trainings."""
    groups, trainings = defaultdict(list), {}
    for row in theirs:
        name = f"{row['system']} (theirs)"
        groups[name].append(row)
        trainings[name] = TRAININGS[row["system"]]
    for row in rows:
        name = RULE_NAMES.get(row["system"]) or NAMES.get(row["system"], row["system"])
        name = f"{name}, {row['mode']}" if row["mode"] else name
        groups[name].append(row)
        trainings[name] = budgets.get(row["system"], "")
    names = [suite.removeprefix("one_shot_").replace("_", " ") for suite in suites]
    lines = ["| | " + " | ".join([*names, "training"]) + " |", "| --- " * (len(suites) + 2) + "|"]
    for name, own in groups.items():
        cells = cells_of(own, suites, column)
        if any(cells):
            lines.append(f"| {name} | " + " | ".join([*cells, trainings[name]]) + " |")
    return lines


def document(rows: list[dict], theirs: list[dict], args: Args) -> str:
    """The section scores of tables.md."""
    lifelong = [suite for suite in args.suites if not suite.startswith("one_shot")]
    one_shot = [suite for suite in args.suites if suite.startswith("one_shot")]
    parts = ["    bash benchmark/pogema.sh"]
    parts.append(
        f"Means over the first {args.tasks} of the benchmark's 128 tasks of each setting, maps and "
        "numbers of robots; of policies over the seeds (and each seed). Rows marked (theirs) are "
        "means of the benchmark's raw data over all 128 (MATS-LP in the warehouse: 50); they were "
        "trained, and their planners searched, by its authors. A step of ours moves 8 to 64 robots."
    )
    folder = place(Path(args.results).parent, "pogema/runs.csv").parent
    budgets = {run: budget(finished(folder, f"{run}_*").values(), "steps") for run in NAMES}
    if lifelong:
        lines = table(rows, theirs, lifelong, "throughput", budgets)
        parts.append("Lifelong: throughput, goals reached per step by all robots together.")
        parts.append("\n".join(lines))
        longer = {}
        for row in theirs:
            if row["suite"].startswith("mazes") and row["steps"] == "256":
                longer[row["system"]] = None
        if longer:
            parts.append(
                f"In mazes the episodes of {' and '.join(longer)} have 256 steps in the raw data, "
                "all others, and those played here, 128."
            )
    for column, title in (
        ("success", "One-shot: share of the tasks in which all robots are at their goal."),
        ("arrived", "One-shot: share of the robots that are at their goal at the end."),
    ):
        if one_shot:
            parts += [title, "\n".join(table(rows, theirs, one_shot, column, budgets))]
    return "\n\n".join(parts) + "\n"


def main(args: Args) -> None:
    rows = play_missing(args)
    theirs = read(place(Path(args.results).parent, "pogema/theirs.csv"))
    text = document(rows, theirs, args)
    put(f"{args.results}/tables.md#scores", text)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
