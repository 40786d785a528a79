"""Runs commands x environments x seeds on the cores of this machine; what is finished is never run
again.

    python benchmark/run.py --table cartpole --env-ids CartPole-v1 --seeds 1 2 3 --workers 2 \
        --commands "ppo_graph=cleanrl_graph/ppo_graph.py --total-timesteps 100000"

A run is NAME_ENV_sSEED_HASH; the hash is that of its normalised command, environment and seed. When
it ends, two files appear in benchmark/results/TABLE/runs (each written beside and renamed):

- .csv: one row per finished episode: step, wall_time (seconds since the training began), return,
  length, SPS, episodes. Where these are more than --max-rows, a row is the mean of the `episodes`
  episodes that ended in the same w steps, w the smallest power of two that is enough; `step` and
  `wall_time` are those of the last of them.
- .json: command, commit, versions, machine, start, duration, exit code, and of a finished run steps
  and SPS of its last update, the largest collection_mismatch of all updates, the fingerprint
  (fingerprint.py: the losses of its first two updates) and eval (the columns of the script's
  eval.csv). A failed run has the end of its stderr and counts as not run. A run is finished when
  its exit code here is 0.

--check runs nothing to its end: it lists the commands of the tables whose fingerprint the code of
today does not have any more, and the exit code is 1 if there are any.

The scripts write to --run-dir/TABLE/RUN, a folder per run; several event files in it (a run that
was resumed) are merged, the newer one wins. Ctrl-C and --max-minutes stop the running ones and keep
all that is finished; the same command goes on from there. A killed runner (SIGKILL) takes its runs
with it on Linux. Exit code: 0 all is finished, 1 a run failed, 3 time was up with runs left, 130
interrupted. Each run has one thread and, where the system can, cores of its own, as many as there
are for each worker: with --workers 1 a command may be
`-m torch.distributed.run --standalone --nproc-per-node 2 cleanrl_graph/ppo_graph.py`, two ranks on
two cores.
"""

import csv
import ctypes
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple, TextIO

import fingerprint
import tyro
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

ROOT = Path(__file__).parents[1]
FAILED, LEFT, INTERRUPTED = 1, 3, 130
PACKAGES = (
    "torch",
    "torch-geometric",
    "numpy",
    "gymnasium",
    "popgym",
    "minigrid",
    "job-shop-lib",
    "graph-jsp-env",
    "nasim",
    "ale-py",
    "graph-envs",
    "tensorboard",
)
# A flag -> what it was called when the runs of the tables were made (fingerprint.as_now)
RENAMED = {
    "--norm-vloss 1": ["--norm-vloss"],
    "--adv-floor 0.1": ["--stay-solved", "0"],  # for scripts without a floor
}
COLUMNS = ("step", "wall_time", "return", "length", "SPS", "episodes")


@dataclass
class Args:
    table: str = ""
    """name of the folder in --results that receives the files; with --check empty for all"""
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
    max_rows: int = 500
    """rows of a csv, see above"""
    results: str = str(ROOT / "benchmark" / "results")
    """folder of the tables"""
    run_dir: str = str(ROOT / "runs")
    """folder for the files of the scripts"""
    python: str = sys.executable
    """interpreter of the scripts"""
    check: bool = False
    """list what computes something else today, see above"""


class Run(NamedTuple):
    """A command with its seed; `key` names its files."""

    key: str
    command: list[str]  # without the interpreter and --run-dir
    name: str
    env_id: str
    seed: int


def normalise(tokens: list[str]) -> list[str]:
    """`tokens` with flags as "--a-b" in alphabetical order, each with its values, by the names that
    they had when runs were made."""
    script, flags = [], []
    for token in tokens:
        if re.match(r"--[A-Za-z]", token):
            name, *value = token.split("=", 1)
            flags.append([name.replace("_", "-"), *value])
        else:
            (flags[-1] if flags else script).append(token)
    flags = [RENAMED.get(" ".join(flag), flag) for flag in flags]
    return script + [token for flag in sorted(flags, key=lambda flag: flag[0]) for token in flag]


def make_run(name: str, command: str, env_id: str | None, seed: int) -> Run:
    tokens = shlex.split(command) + (["--env-id", env_id] if env_id else [])
    normal = normalise(tokens)
    env_id = normal[normal.index("--env-id") + 1] if "--env-id" in normal else ""
    digest = hashlib.sha256(json.dumps([normal, env_id, seed]).encode()).hexdigest()[:8]
    key = "_".join(
        [name, re.sub(r"[^\w.-]", "-", env_id.split(":")[-1]) or "default", f"s{seed}", digest]
    )
    return Run(key, [*tokens, "--seed", str(seed)], name, env_id, seed)


def all_runs(args: Args) -> list[Run]:
    """The first seed of everything comes first."""
    pairs = [command.split("=", 1) for command in args.commands]
    return [
        make_run(name, command, env_id, seed)
        for seed in args.seeds
        for name, command in pairs
        for env_id in args.env_ids or (None,)
    ]


# ---- What a run leaves ----
def write(path: Path, text: str) -> None:
    """The file is there as a whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def events_of(folder: Path) -> tuple[list[tuple], list[tuple]]:
    """(step, seconds of training, return, length) of every episode and (step, SPS) of every update.
    A newer event file replaces what older ones hold after the last update before its first step;
    its time goes on from there."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    episodes, updates = [], []
    for path in sorted(
        folder.rglob("events.out.tfevents.*"), key=lambda path: path.name
    ):  # by time
        values, start = {"episodic_return": [], "episodic_length": [], "SPS": []}, None
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                start = event.wall_time if start is None else start
                name = value.tag.removeprefix("charts/")
                if name in values:
                    values[name].append((event.step, event.wall_time, value.simple_value))
        steps = [step for rows in values.values() for step, _, _ in rows]
        if not steps:
            continue
        resumed = max([step for step, _, _ in updates if step < min(steps)], default=0)
        updates = [row for row in updates if row[0] <= resumed]
        episodes = [row for row in episodes if row[0] <= resumed]
        offset = updates[-1][2] if updates else 0.0
        pairs = zip(values["episodic_return"], values["episodic_length"])
        episodes += [
            (step, offset + wall - start, ret, length)
            for (step, wall, ret), (_, _, length) in pairs
        ]
        updates += [(step, sps, offset + wall - start) for step, wall, sps in values["SPS"]]
    return episodes, [(step, sps) for step, sps, _ in updates]


def largest(folder: Path, name: str) -> float | None:
    """The largest value of a scalar in all event files; None if there is none."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    paths = map(str, folder.rglob("events.out.tfevents.*"))
    values = [
        value
        for path in paths
        for event in LegacyEventFileLoader(path).Load()
        for value in event.summary.value
    ]
    return max((value.simple_value for value in values if value.tag == name), default=None)


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
    """The columns of the newest eval.csv."""
    paths = sorted(folder.rglob("eval.csv"), key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        return None
    with open(paths[-1], newline="") as file:
        names, *rows = csv.reader(file)
    number = lambda text: (
        float(f"{float(text):.6g}") if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text) else text
    )
    return dict(zip(names, ([number(value) for value in column] for column in zip(*rows))))


def machine() -> dict:
    """Commit, versions and hardware, for the json."""

    def output(*command: str) -> str:
        try:
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        except OSError:
            return ""

    commit = output("git", "rev-parse", "HEAD") + (
        "-dirty" if output("git", "status", "-s", "cleanrl_graph") else ""
    )
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", info)
    gpu = output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    cpu = model[1] if model else platform.processor()
    return {"commit": commit, "versions": versions, "cpu": cpu, "gpu": gpu or None}


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


def start(run: Run, cores: list[int], args: Args) -> subprocess.Popen:
    """The run in a process group of its own, so that Ctrl-C does not reach it before this process
    does."""
    folder = Path(args.run_dir) / args.table / run.key
    shutil.rmtree(folder, ignore_errors=True)  # what a stopped run has left
    folder.mkdir(parents=True)
    libc, runner = ctypes.CDLL(None) if sys.platform == "linux" else None, os.getpid()

    def before() -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        if libc is not None:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the runner, however it ends
            if os.getppid() != runner:
                os._exit(1)

    command = [args.python, *run.command, "--run-dir", str(folder)]
    with open(folder / "stdout.txt", "wb") as out, open(folder / "stderr.txt", "wb") as error:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            start_new_session=True,
            preexec_fn=before,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )


def stop(processes: list[subprocess.Popen]) -> None:
    """Ends the processes and all that they started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass
        for process in processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                pass


def tail(path: Path, size: int = 4000) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace").replace("\r", "\n")


def progress(path: Path) -> tuple[float, str]:
    """Percent done and mean return, from the progress bar that the script draws."""
    bars = [line for line in tail(path, 1000).split("\n") if not line.startswith("evaluation")]
    percent = re.findall(r"(\d+)%\|", "\n".join(bars))
    ret = re.findall(r"ret=([^,\]\s]+)", "\n".join(bars))
    return float(percent[-1]) if percent else 0.0, ret[-1] if ret else "-"


def record(run: Run, exit_code: int, began: float, about: dict, args: Args) -> None:
    """Writes the files of a run that has ended."""
    folder, results = (
        Path(args.run_dir) / args.table / run.key,
        Path(args.results) / args.table / "runs",
    )
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
        write(results / f"{run.key}.csv", csv_text(episodes, updates, args.max_rows))
        settings["steps"], settings["SPS"] = updates[-1] if updates else (0, 0)
        settings["collection_mismatch"] = largest(folder, "debug/collection_mismatch")
        settings["fingerprint"] = fingerprint.read(folder)
        settings["eval"] = eval_columns(folder)
    else:
        lines = tail(folder / "stderr.txt").strip().split("\n")[-20:]
        settings["stderr"] = [
            line.replace(str(ROOT), ".").replace(sys.prefix, "") for line in lines
        ]
    write(
        results / f"{run.key}.json",
        "{\n"
        + ",\n".join(
            f" {json.dumps(name)}: {json.dumps(value)}" for name, value in settings.items()
        )
        + "\n}\n",
    )


def is_finished(run: Run, args: Args) -> bool:
    path = Path(args.results) / args.table / "runs" / f"{run.key}.json"
    return (
        path.exists()
        and path.with_suffix(".csv").exists()
        and json.loads(path.read_text())["exit_code"] == 0
    )


def main(args: Args) -> int:
    if args.check:
        return FAILED if fingerprint.check(args) else 0
    if not args.table or not args.commands:
        raise SystemExit("--table and --commands are needed, or --check")
    runs = all_runs(args)
    queue = [run for run in runs if not is_finished(run, args)]
    print(f"{args.table}: {len(runs) - len(queue)} of {len(runs)} runs are finished already")
    if not queue:
        return 0
    locked = lock(Path(args.run_dir) / args.table)  # noqa: F841  until this function ends
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    deadline, about, failed = time.monotonic() + 60 * args.max_minutes, machine(), []
    tqdm.monitor_interval = 0  # its thread would be in the way of preexec_fn
    total = tqdm(total=len(queue), desc="all runs", unit="run", mininterval=1)
    running, free = (
        {},
        list(range(min(args.workers, len(queue)))),
    )  # slot: (run, process, start, bar)
    # noted, so that none is lost while a run starts; also where a shell started this in the
    # background
    signals = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    try:
        while (queue or running) and not signals and time.monotonic() < deadline:
            while queue and free and not signals:
                slot, run = free.pop(0), queue.pop(0)
                bar = tqdm(
                    total=100,
                    desc=run.key,
                    position=slot + 1,
                    leave=False,
                    mininterval=1,
                    bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}",
                )
                own = cores[slot :: args.workers] or cores[slot % max(len(cores), 1) :][:1]
                running[slot] = run, start(run, own, args), time.time(), bar
            time.sleep(0.2)
            for slot, (run, process, began, bar) in list(running.items()):
                percent, ret = progress(Path(args.run_dir) / args.table / run.key / "stderr.txt")
                bar.set_postfix_str(f"return {ret}", refresh=False)
                bar.update(percent - bar.n)
                if process.poll() is not None:
                    record(run, process.returncode, began, about, args)
                    failed += [run] if process.returncode else []
                    tqdm.write(
                        f"{run.key}: "
                        + (
                            f"FAILED ({process.returncode})"
                            if process.returncode
                            else f"{time.time() - began:.0f} s, mean return {ret}"
                        )
                    )
                    bar.close()
                    total.update()
                    del running[slot]
                    free.append(slot)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop([process for _, process, _, _ in running.values()])
        for *_, bar in running.values():
            bar.close()
        total.close()
    left = [run for run, *_ in running.values()] + queue
    for run in failed:
        path = Path(args.results) / args.table / "runs" / f"{run.key}.json"
        print(f"FAILED {run.key}: {json.loads(path.read_text())['stderr'][-1]}")
    for run in left:
        print(f"left {run.key}")
    print(f"{args.table}: {len(left)} runs are left, {len(failed)} failed")
    return INTERRUPTED if signals else FAILED if failed else LEFT if left else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
