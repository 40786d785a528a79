"""An exact solver beside the policies: CP-SAT of OR-Tools for a few seconds on the instances of
JobShop-v0 and FlexibleJobShop-v0.

    python benchmark/cp_sat.py --env JobShop-v0 --suites la ta15x15 --seconds 1 10 --workers 1

A plain model: an interval per operation, or an optional one for each machine that can take it, of
which exactly one is present; no two on a machine overlap; precedence along the jobs; the makespan
is minimised from the solver's own start. Each row of benchmark/results/cp_sat/ENV.csv is written
when its instance ends, and what is in there is not solved again, so an interrupted command goes on.
An instance without any solution in time has no makespan there. The tables of job_shop.py and
flexible_job_shop.py show the gaps.
"""

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro
from tables import RESULTS, added, cpu_name, read
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from cleanrl_graph.envs import flexible_job_shop, job_shop  # noqa: E402

COLUMNS = """suite instance seconds workers status makespan bound best_known wall_time version
    cpu""".split()
Jobs = list[list[dict[int, int]]]  # per job and operation: machine -> time


@dataclass
class Args:
    env: Literal["JobShop-v0", "FlexibleJobShop-v0"] = "FlexibleJobShop-v0"
    """whose instances"""
    suites: list[str] = field(default_factory=lambda: ["mk", "edata", "rdata", "vdata"])
    """suites of its instances (`eval_suites`)"""
    seconds: list[float] = field(default_factory=lambda: [1.0, 10.0])
    """time limits of the solver"""
    workers: int = 1
    """threads of the solver"""
    max_instances: int | None = None
    """of each suite the first ones only"""
    results: str = str(RESULTS / "cp_sat")
    """folder of the csv"""


def job_shop_instance(name: str) -> tuple[Jobs, int, int]:
    """The jobs of a named job shop, the number of its machines and the best known makespan."""
    times, machines, best_known, _ = job_shop.load_instance(name)
    jobs = [[{int(m): int(t)} for m, t in zip(*rows)] for rows in zip(machines, times)]
    return jobs, times.shape[1], best_known


def flexible_instance(name: str) -> tuple[Jobs, int, int]:
    """The same of a named flexible job shop."""
    times, operations, best_known, _ = flexible_job_shop.load_instance(name)
    options = [{m: t for m, t in enumerate(row) if t} for row in times.tolist()]
    ends = zip(operations.tolist(), operations.cumsum().tolist())
    return [options[end - n : end] for n, end in ends], times.shape[1], best_known


ENVS = {
    "JobShop-v0": (job_shop.JobShopEnv, job_shop_instance),
    "FlexibleJobShop-v0": (flexible_job_shop.FlexibleJobShopEnv, flexible_instance),
}


def solve(jobs: Jobs, num_machines: int, seconds: float, workers: int) -> dict:
    """What CP-SAT finds in `seconds`: status, makespan (None without a solution), bound and
    wall_time, and `schedule`, rows (job, step, machine, start, finish)."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = sum(max(options.values()) for job in jobs for options in job)
    makespan = model.new_int_var(0, horizon, "makespan")
    on_machine, bars = [[] for _ in range(num_machines)], []
    for j, job in enumerate(jobs):
        ready = 0
        for k, options in enumerate(job):
            start, finish = (model.new_int_var(0, horizon, name) for name in ("start", "finish"))
            present = [None]
            if len(options) > 1:
                present = [model.new_bool_var("present") for _ in options]
            for (machine, time), literal in zip(options.items(), present):
                if literal is None:
                    bar = model.new_interval_var(start, time, finish, "")
                else:
                    bar = model.new_optional_interval_var(start, time, finish, literal, "")
                on_machine[machine].append(bar)
                bars.append((j, k, machine, start, finish, literal))
            if len(options) > 1:
                model.add_exactly_one(present)
            model.add(start >= ready)
            ready = finish
        model.add(makespan >= ready)
    for intervals in on_machine:
        model.add_no_overlap(intervals)
    model.minimize(makespan)

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, workers
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    schedule = []
    for j, k, machine, start, finish, literal in bars if found else ():
        if literal is None or solver.value(literal):
            schedule.append((j, k, machine, solver.value(start), solver.value(finish)))
    return {
        "status": solver.status_name(status),
        "makespan": int(solver.objective_value) if found else None,
        "bound": int(solver.best_objective_bound),
        "wall_time": round(solver.wall_time, 2),
        "schedule": schedule,
    }


def key_of(row: dict) -> tuple:
    return row["suite"], row["instance"], float(row["seconds"]), int(row["workers"])


def main(args: Args) -> None:
    env, load = ENVS[args.env]
    if unknown := [suite for suite in args.suites if suite not in env.eval_suites]:
        suites = ", ".join(env.eval_suites)
        raise SystemExit(f"--suites {' '.join(unknown)}: {args.env} has {suites}")
    try:
        import ortools
    except ModuleNotFoundError:
        sentence = "OR-Tools is not installed: pip install -r benchmark/requirements.txt"
        raise SystemExit(sentence) from None
    path = Path(args.results) / f"{args.env}.csv"
    done = {key_of(row) for row in read(path)}
    about = {"version": ortools.__version__, "cpu": cpu_name()}
    todo = []
    for seconds, suite in itertools.product(args.seconds, args.suites):
        for kwargs in env.eval_suites[suite][: args.max_instances]:
            todo.append((suite, kwargs["instance"], float(seconds), args.workers))
    with added(path, COLUMNS) as add:
        for key in tqdm([key for key in todo if key not in done], unit="instance"):
            *instance, best_known = load(key[1])
            row = dict(zip(COLUMNS, key)) | {"best_known": best_known} | about
            add(row | solve(*instance, *key[2:]))
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Args))
