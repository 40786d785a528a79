"""Runs commands x environments x seeds on the cores of this machine; what is finished is never run
again.

    python benchmark/run.py --table cartpole --env-ids CartPole-v1 --seeds 1 2 3 --workers 2 \
        --commands "ppo_graph=cleanrl_graph/ppo_graph.py --total-timesteps 100000"

A run is NAME_ENV_sSEED_HASH; the hash is that of its normalised command, environment and seed.
What it leaves stands in two files of benchmark/results/TABLE (tables.py reads and writes them):

- curves.csv.gz: one row per finished episode, from episodes.csv, or from the log where there is
  none: step, wall_time (seconds since the training began), return, length, SPS, episodes. Where
  these are more than 500, a row is the mean of the `episodes` episodes that ended in the same w
  steps, w the smallest power of two that is enough; `step` and `wall_time` are those of the last
  of them.
- runs.csv: command, commit, versions, machine, start, duration, exit code, and of a finished run
  steps and SPS of its last update, the largest collection_mismatch of all updates, the fingerprint
  (fingerprint.py: the losses of its first two updates) and eval (the columns of the script's
  eval.csv). A failed run has the end of its stderr and counts as not run. A run is finished when
  its exit code here is 0.

When a run ends, both are files of its own in TABLE/runs; they are packed into those of the table
when the runner ends, and those that a killed one has left by the next one. --pack does that alone,
for one table or for all.

--check runs nothing to its end: it lists the commands of the tables whose fingerprint the code of
today does not have any more, and the exit code is 1 if there are any.

The scripts write to --run-dir/TABLE/RUN, a folder per run; several event files in it (a run that
was resumed) are merged, the newer one wins. A script NAME_mini.py has no flag --run-dir: it is
started in that folder, and writes to `runs` in it. Ctrl-C and --max-minutes stop the running ones
and keep all that is finished; the same command goes on from there: runs that were stopped begin
again, those with `--resume auto` at their last checkpoint. A killed runner (SIGKILL) takes its runs
with it on Linux. Exit code: 0 all is finished, 1 a run failed, 3 time was up with runs left, 130
interrupted. Each run has one thread and, where the system can, cores of its own, as many as there
are for each worker: with --workers 1 a command may be
`-m torch.distributed.run --standalone --nproc-per-node 2 cleanrl_graph/ppo_graph.py`, two ranks on
two cores.
"""

import contextlib
import csv
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import tyro

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fingerprint  # noqa: E402
import tables  # noqa: E402

from cleanrl_graph.services import sweep  # noqa: E402
from cleanrl_graph.services.plot import events_of, scalars  # noqa: E402

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

PACKAGES = """torch torch-geometric numpy gymnasium popgym minigrid job-shop-lib graph-jsp-env
    nasim ale-py graph-envs tensorboard""".split()
# A flag -> what it was called when the runs of the tables were made (fingerprint.as_now)
RENAMED = {
    "--norm-vloss 1": ["--norm-vloss"],
    "--adv-floor 0.1": ["--stay-solved", "0"],  # for scripts without a floor
}
MAX_ROWS = 500  # of a curve
COLUMNS = ("step", "wall_time", "return", "length", "SPS", "episodes")


@dataclass
class Args:
    table: str = ""
    """name of the folder in --results; with --check or --pack empty for all"""
    commands: tuple[str, ...] = ()
    """NAME=SCRIPT FLAGS, quoted as for a shell; --seed, --env-id and --run-dir are added"""
    env_ids: tuple[str, ...] = ()
    """environments for each command; empty: the commands hold their own --env-id"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds for each command and environment"""
    workers: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    """runs at the same time; default: one per core that this process may use"""
    max_minutes: float = float("inf")
    """stop after this time; what is left runs next time"""
    results: str = str(tables.RESULTS)
    """folder of the tables"""
    run_dir: str = str(tables.RUN_DIR)
    """folder for the files of the scripts"""
    python: str = sys.executable
    """interpreter of the scripts"""
    check: bool = False
    """list what computes something else today, see above"""
    pack: bool = False
    """put the files of runs that have ended into those of their tables, see above"""


class Run(NamedTuple):
    """A command with its seed; `key` names it."""

    key: str
    command: list[str]  # without the interpreter and --run-dir
    name: str
    env_id: str
    seed: int


def make_run(name: str, command: str, env_id: str | None, seed: int) -> Run:
    tokens = shlex.split(command) + (["--env-id", env_id] if env_id else [])
    before, flags = sweep.split(tokens)
    normal = sweep.in_order(before, [RENAMED.get(" ".join(flag), flag) for flag in flags])
    env_id = normal[normal.index("--env-id") + 1] if "--env-id" in normal else ""
    key = sweep.key_of(name, normal, env_id, seed)
    return Run(key, [*tokens, "--seed", str(seed)], name, env_id, seed)


def all_runs(args: Args) -> list[Run]:
    """The first seed of everything comes first."""
    pairs = [command.split("=", 1) for command in args.commands]
    all_of = itertools.product(args.seeds, pairs, args.env_ids or (None,))
    return [make_run(name, command, env_id, seed) for seed, (name, command), env_id in all_of]


# ---- What a run leaves ----
def csv_text(episodes: list[tuple], updates: list[tuple], max_rows: int) -> str:
    """The rows of the csv, see above. SPS is that of the first update that is not before the
    row."""
    width, groups = 1, dict(enumerate([episode] for episode in episodes))
    while len(groups) > max_rows:
        width, groups = 2 * width, {}
        for episode in episodes:
            groups.setdefault(-(-episode[0] // width), []).append(episode)
    lines, k = [",".join(COLUMNS)], 0
    for group in groups.values():
        step, wall = group[-1][:2]
        while k + 1 < len(updates) and updates[k][0] < step:
            k += 1
        ret, length = (sum(column) / len(group) for column in list(zip(*group))[2:])
        sps = updates[k][1] if updates else 0
        lines.append(f"{step},{wall:.2f},{ret:.5g},{length:.5g},{sps:.0f},{len(group)}")
    return "\n".join(lines) + "\n"


def eval_columns(folder: Path) -> dict[str, list] | None:
    """The columns of the newest eval.csv; of more than 1,000 rows their means."""
    paths = sorted(folder.rglob("eval.csv"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        return None
    with open(paths[-1], newline="") as file:
        names, *rows = csv.reader(file)
    is_number = re.compile(r"-?[\d.]+(e[+-]?\d+)?").fullmatch
    number = lambda text: float(f"{float(text):.6g}") if is_number(text) else text
    columns = {}
    for name, column in zip(names, zip(*rows)):
        columns[name] = [number(value) for value in column]
        if len(column) > 1000 and all(isinstance(value, float) for value in columns[name]):
            columns[name] = [float(np.mean(columns[name]))]
    if len(rows) > 1000:  # the others are names
        columns = {name: column for name, column in columns.items() if len(column) == 1}
    return columns


def machine() -> dict:
    """Commit, versions and hardware, for the json."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpu = tables.output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    about = {"commit": tables.commit(), "versions": versions, "cpu": tables.cpu_name()}
    return about | {"gpu": gpu or None}


# ---- Processes ----
def lock(folder: Path) -> TextIO | None:
    """A file that only one living process has open like this. Raises SystemExit if another runner
    has it."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        return None
    file = open(folder / "lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another runner works in {folder}") from None
    return file


def record(run: Run, exit_code: int, began: float, about: dict, args: Args) -> None:
    """Writes the files of a run that has ended."""
    folder = Path(args.run_dir) / args.table / run.key
    results = Path(args.results) / args.table / "runs"
    results.mkdir(parents=True, exist_ok=True)
    settings = {
        "name": run.name,
        "env_id": run.env_id,
        "seed": run.seed,
        "command": shlex.join(["python", *run.command]),
        **about,
        "started": datetime.fromtimestamp(began, timezone.utc).isoformat(timespec="seconds"),
        "duration": round(time.time() - began, 1),
        "exit_code": exit_code,
    }
    if exit_code == 0:
        episodes, updates = events_of(folder)
        tables.write(results / f"{run.key}.csv", csv_text(episodes, updates, MAX_ROWS))
        settings["steps"], settings["SPS"] = updates[-1] if updates else (0, 0)
        mismatches = [value for *_, value in scalars(folder, "debug/collection_mismatch")]
        settings["collection_mismatch"] = max(mismatches, default=None)
        settings["fingerprint"] = fingerprint.read(folder)
        settings["eval"] = eval_columns(folder)
    else:
        said = sweep.tail(folder / "stderr.txt").replace(str(ROOT), ".").replace(sys.prefix, "")
        settings["stderr"] = said.strip().split("\n")[-20:]
    tables.write(results / f"{run.key}.json", json.dumps(settings))


def pack(args: Args) -> None:
    """Packs the table, or all of them."""
    results = Path(args.results)
    folders = [results / args.table] if args.table else results.rglob("runs")
    for folder in sorted(path.parent if path.name == "runs" else path for path in folders):
        table = folder.relative_to(results)
        locked = lock(Path(args.run_dir) / table)
        print(f"{table}: {tables.pack(folder)} runs are packed")
        if locked:
            locked.close()


def main(args: Args) -> int:
    if os.sep in args.python:  # a path is that of this process, wherever a run is started
        args.python = os.path.abspath(args.python)
    if args.check:
        return sweep.FAILED if fingerprint.check(args) else 0
    if args.pack:
        pack(args)
        return 0
    if not args.table or not args.commands:
        raise SystemExit("--table and --commands are needed, or --check, or --pack")
    table = Path(args.results) / args.table
    locked = lock(Path(args.run_dir) / args.table)  # noqa: F841  until this function ends
    tables.pack(table)
    about, finished = machine(), tables.finished(table)
    runs, jobs = {}, []
    for run in all_runs(args):
        runs[run.key] = run
        folder = Path(args.run_dir) / args.table / run.key
        jobs.append(sweep.job_of(run.key, [args.python, *run.command], folder, cwd=ROOT))

    def ended(job: sweep.Job, exit_code: int, began: float) -> None:
        record(runs[job.key], exit_code, began, about, args)

    is_finished = lambda job: job.key in finished
    code = sweep.work(args.table, jobs, is_finished, ended, args.workers, 60 * args.max_minutes)
    tables.pack(table)
    return code


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
