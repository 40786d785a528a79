"""--gnn gine against --gnn gin on tasks of other kinds: returns at the end of short trainings, and
the CPU time of these.

    python benchmark/gnn_tasks.py --out benchmark/results/speed/tables.md#gnn_tasks

Each run is a process with one thread; those that are in gnn_tasks.csv beside --out are not
repeated. What a run has learned is the mean return of its 100 greedy episodes. benchmark/speed/
gnn_layers.py compares all layers on JobShop-v0. Without edge features, as in GraphExplore-v0, gine
and gin are the same layer.
"""

import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro
from gymnasium import spaces
from tables import added, put, read

ROOT = Path(__file__).parents[1]
SCHEDULING = (
    "--num-envs 64 --num-steps 64 --num-minibatches 8 --update-epochs 3 --learning-rate 1e-3 "
    "--gamma 1 --gae-lambda 0.98"
)
TASKS = {  # name: (steps, flags, what an edge says)
    "Routes-v0": (
        98_304,
        f'--env-id gnn_tasks:Routes-v0 --env-kwargs {{"most":12}} {SCHEDULING}',
        "how far its two cities are apart",
    ),
    "DagSchedule-v0": (
        49_152,
        '--env-id envs:DagSchedule-v0 --env-kwargs {"num_jobs":10,"shaped":true} --autoregressive '
        "--num-envs 16 --num-steps 128 --num-minibatches 8 --update-epochs 3 --learning-rate 5e-4 "
        "--ent-coef 0.001 --gnn-dim 32 --gnn-layers 2",
        "its kind",
    ),
    "FlexibleJobShop-v0": (
        49_152,
        "--env-id envs:FlexibleJobShop-v0 --action-head edges "
        f'--env-kwargs {{"jobs":[3,8],"machines":[3,6]}} {SCHEDULING}',
        "its kind, and the time of an operation on a machine",
    ),
}


class Routes(gym.Env):
    """The travelling salesman: visit 3 to `most` cities and return to the first one; the reward is
    minus the distance."""

    def __init__(self, most=10):
        self.most, self.action_space = most, spaces.Discrete(most)
        self.observation_space = spaces.Dict(
            {
                "graph": spaces.Graph(spaces.Box(-1, 1, (4,)), spaces.Box(0, 2, (1,))),
                "action_mask": spaces.Sequence(spaces.Box(0, 1, (), np.int8), stack=True),
            }
        )

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.cities = self.np_random.random((self.np_random.integers(3, self.most + 1), 2))
        self.open, self.first, self.at = np.ones(len(self.cities), np.int8), 0, 0
        self.open[0] = 0
        return self.observe(), {}

    def step(self, city):
        before, self.at, self.open[city] = self.at, city, 0
        distance = np.linalg.norm(self.cities[before] - self.cities[city])
        done = not self.open.any()
        if done:
            distance += np.linalg.norm(self.cities[city] - self.cities[self.first])
        return self.observe(), -distance, done, False, {}

    def observe(self):
        marks = np.arange(len(self.cities))[:, None] == [self.at, self.first]
        links = np.argwhere(~np.eye(len(self.cities), dtype=bool))
        lengths = np.linalg.norm(
            self.cities[links[:, 0]] - self.cities[links[:, 1]], axis=1, keepdims=True
        )
        nodes = np.hstack([self.cities, marks]).astype(np.float32)
        mask = self.open if self.open.any() else np.ones_like(self.open)
        return {
            "graph": spaces.GraphInstance(nodes, lengths.astype(np.float32), links),
            "action_mask": mask.copy(),
        }


gym.register("Routes-v0", entry_point=Routes)


LAYERS = ("gine", "gin")
COLUMNS = ("task", "layer", "seed", "greedy_return", "cpu_seconds")


@dataclass
class Args:
    out: str = "benchmark/results/speed/tables.md#gnn_tasks"
    """file of the table; the runs are in gnn_tasks.csv beside it"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of the trainings"""
    tasks: tuple[str, ...] = tuple(TASKS)
    """tasks to train"""
    scale: float = 1.0
    """share of the steps; a try has less than 1 and writes elsewhere"""


def main(args: Args) -> None:
    path = Path(args.out.partition("#")[0]).with_name("gnn_tasks.csv")
    done = {(row["task"], row["layer"], row["seed"]) for row in read(path)}
    with added(path, COLUMNS) as add:
        for key in itertools.product(map(str, args.seeds), args.tasks, LAYERS):
            seed, task, layer = key
            if (task, layer, seed) not in done:
                figures = train(task, layer, seed, args.scale)
                add(dict(zip(COLUMNS, (task, layer, seed, *figures))))
    runs = {}
    for row in read(path):
        key = row["task"], row["layer"], int(row["seed"])
        runs[key] = float(row["greedy_return"]), float(row["cpu_seconds"])
    lines = [
        "    python benchmark/gnn_tasks.py",
        "",
        "| task | an edge says | steps | gine: greedy return by seed | gin | "
        "CPU seconds of gine | of gin |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task, (steps, _, edge) in TASKS.items():
        found = [[runs[key] for key in sorted(runs) if key[:2] == (task, x)] for x in LAYERS]
        if not all(found):
            continue
        returns = [", ".join(f"{ret:.3g}" for ret, _ in own) for own in found]
        seconds = [f"{np.median([cpu for _, cpu in own]):.0f}" for own in found]
        lines.append("| " + " | ".join([task, edge, f"{steps:,}", *returns, *seconds]) + " |")
    put(args.out, "\n".join(lines) + "\n")
    print("\n".join(lines))


def train(task: str, layer: str, seed: str, scale: float) -> tuple[float, float]:
    """(mean return of the greedy episodes, CPU seconds)"""
    steps, flags, _ = TASKS[task]
    command = [
        *(sys.executable, str(ROOT / "cleanrl_graph" / "ppo_graph.py")),
        *shlex.split(flags.replace('"', '\\"')),
        *("--gnn", layer, "--seed", seed, "--total-timesteps", str(int(scale * steps))),
        *("--eval-episodes", "100", "--checkpoint-every", "0", "--checkpoint-minutes", "0"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        files = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        process = subprocess.Popen(command, cwd=folder, env=env, **files)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(f"{shlex.join(command)} failed:\n{output[-2000:]}")
        played = read(next(Path(folder).glob("runs/*/eval.csv")))
    mean = float(f"{np.mean([float(row['return']) for row in played]):.5g}")
    wall = time.perf_counter() - start
    print(json.dumps([task, layer, seed, mean, round(wall)]), file=sys.stderr)
    return mean, round(usage.ru_utime + usage.ru_stime, 1)


if __name__ == "__main__":
    main(tyro.cli(Args))
