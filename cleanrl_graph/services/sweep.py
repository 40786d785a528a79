"""cleanrl_graph, many runs of a script at once, from any folder.

    python -m cleanrl_graph.services.sweep ppo_graph --env-id mine:Mine-v0 --seeds 1 2 3 \\
        --learning-rate 1e-3 3e-4 --workers 2

SCRIPT is a path, or the name of a script here or of this package. Each value of a flag is tried
with each value of the others and with each seed, the first seed of all first. Values of a flag that
takes several stay together, and are in quotes where there are more such: --hidden-dims "64" "256
256". A flag without a sign takes True False.

Each run has a folder in --run-dir, with its stdout.txt and stderr.txt, and one thread, on cores of
its own where the system can. Ctrl-C stops all. The same command goes on from there: what is
finished is not run again, the others resume from their last checkpoint; those of a script
NAME_mini.py, which has none, begin again. Exit code: 0 all is finished, 1 a run failed, 130
interrupted.
"""

import ast
import contextlib
import ctypes
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from cleanrl_graph.services.process import bar

FAILED = 1  # exit codes
LEFT = 3
INTERRUPTED = 130
OWN = {"seeds": ["1", "2", "3"], "workers": ["1"], "run_dir": ["runs"]}  # flags of the sweep


class Job(NamedTuple):
    key: str
    command: list[str]
    folder: Path  # of its stdout.txt and stderr.txt
    about: str = ""  # what tells it from the others
    cwd: Path | None = None  # where it runs; None: here


# ---- Runs ----
def split(words: list[str]) -> tuple[list[str], list[list[str]]]:
    """(what stands before the first flag, flags as "--a-b" with their values)."""
    before = []
    flags = []
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, *value = word.split("=", 1)
            flags.append([name.replace("_", "-"), *value])
        else:
            (flags[-1] if flags else before).append(word)
    return before, flags


def in_order(before: list[str], flags: list[list[str]]) -> list[str]:
    """The words of a command, its flags in alphabetical order."""
    return before + sum(sorted(flags, key=lambda flag: flag[0]), [])


def key_of(name: str, words: list[str], env_id: str, seed: int | str) -> str:
    """NAME_ENV_sSEED_HASH; the hash is that of a command whose flags are in order, environment and
    seed."""
    digest = hashlib.sha256(json.dumps([words, env_id, seed]).encode()).hexdigest()[:8]
    env = re.sub(r"[^\w.-]", "-", env_id.split(":")[-1]) or "default"
    return f"{name}_{env}_s{seed}_{digest}"


def mini_of(command: list[str]) -> int | None:
    """Where in `command` a script NAME_mini.py is, which has neither --run-dir nor --resume and
    writes to `runs` in the current folder; None if there is none."""
    places = [i for i, word in enumerate(command) if word.endswith("_mini.py")]
    return places[0] if places else None


def job_of(
    key: str, command: list[str], folder: Path, about: str = "", cwd: Path | None = None
) -> Job:
    """A job whose script writes into `folder`: with --run-dir, or started there."""
    at = mini_of(command)
    if at is None:
        return Job(key, [*command, "--run-dir", str(folder)], folder, about, cwd)
    own = list(command)
    own[at] = str(Path(cwd or ".").absolute() / command[at])
    return Job(key, own, folder.absolute(), about, folder.absolute())


# ---- Processes ----
def start(job: Job, cores: list[int]) -> subprocess.Popen:
    """The job in a process group of its own, so that Ctrl-C does not reach it before this process
    does. What a stopped run has left is deleted, unless it can resume."""
    if "--resume" not in job.command:
        shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def before() -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        if prctl:
            prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent, however it ends
            if os.getppid() != parent:
                os._exit(1)

    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if job.cwd is not None:  # modules are found as they are here
        paths = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, [*paths, "."]))
    out = job.folder / "stdout.txt"
    with open(out, "wb") as stdout, open(out.with_name("stderr.txt"), "wb") as stderr:
        return subprocess.Popen(
            job.command,
            cwd=job.cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=before,
            env=env,
        )


def stop(processes: list[subprocess.Popen]) -> None:
    """Ends the processes and all that they started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)


def tail(path: Path, size: int = 4000) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace").replace("\r", "\n")


def progress(folder: Path) -> tuple[str, str]:
    """How much is done, as "34%", and the mean return, from the bar in stderr.txt."""
    text = re.sub("^evaluation.*", "", tail(folder / "stderr.txt", 1000), flags=re.M)
    percent = re.findall(r"(\d+%)\|", text) or ["0%"]
    ret = re.findall(r"ret=([^,\]\s]+)", text) or ["-"]
    return percent[-1], ret[-1]


def work(
    where: str,
    jobs: list[Job],
    is_finished: Callable[[Job], bool],
    ended: Callable[[Job, int, float], None],
    workers: int,
    seconds: float = math.inf,
) -> int:
    """Runs the jobs that are not finished, `workers` at a time, and says what became of them; calls
    `ended` with a job, its exit code and the time at which it began. Returns the exit code."""
    queue = [job for job in jobs if not is_finished(job)]
    done = len(jobs) - len(queue)
    print(f"{len(jobs)} runs in {where}, {done} are finished already", flush=True)
    cores = []
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    deadline = time.monotonic() + seconds
    tqdm.monitor_interval = 0  # its thread would be in the way of preexec_fn
    total = bar(total=len(queue), desc="all runs", unit="run", mininterval=1)
    failed = []
    running = {}  # slot -> (job, when it began, its process)
    signals = []  # noted, so that no run is lost while it starts
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    try:
        while (queue or running) and not signals and time.monotonic() < deadline:
            for slot in range(workers):
                if slot not in running and queue:
                    job = queue.pop(0)
                    own = cores and cores[slot % len(cores) :: workers]
                    running[slot] = job, time.time(), start(job, own)
            time.sleep(0.2)
            for slot, (job, began, process) in list(running.items()):
                code = process.poll()
                if code is not None:
                    del running[slot]
                    ended(job, code, began)
                    failed += [job] * (code != 0)
                    _, ret = progress(job.folder)
                    outcome = f"{time.time() - began:.0f} s, last returns {ret} on average"
                    name = f"{job.key} {job.about}".strip()
                    tqdm.write(f"{name}: {f'FAILED ({code})' if code else outcome}")
                    total.update()
            percents = [progress(job.folder)[0] for job, *_ in running.values()]
            total.set_postfix_str(" ".join(percents), refresh=sys.stderr.isatty())
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop([process for *_, process in running.values()])
        total.close()
    left = [job for job, *_ in running.values()] + queue
    for job in failed:
        last = tail(job.folder / "stderr.txt").strip().rpartition("\n")[2]
        print(f"FAILED {job.key}: {last}")
    print(f"{where}: {len(left)} runs are left, {len(failed)} failed")
    return INTERRUPTED * bool(signals) or FAILED * bool(failed) or LEFT * bool(left)


# ---- The command ----
def words_of(argv: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(what stands before the first flag, flag -> its values), the names of flags with "_"."""
    before, flags = split(argv)
    return before, {name[2:].replace("-", "_"): values for name, *values in flags}


def script_of(name: str) -> Path:
    """The path of a script. SystemExit if there is none."""
    path = Path(name).with_suffix(".py")
    if not path.exists():
        path = Path(__file__).parents[1] / path.name
    if not path.exists():
        raise SystemExit(f"{name}: there is no such script, neither here nor in cleanrl_graph")
    return path.absolute()


def flags_in(path: Path, name: str = "Args") -> dict[str, ast.AnnAssign]:
    """Flag -> the line of a class that has it. A script is read, not imported: that would take
    longer than all else here. SystemExit if it has no such class."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {line.target.id: line for line in node.body if isinstance(line, ast.AnnAssign)}
    raise SystemExit(f"{path.name}: it has no class {name}")


def choices(name: str, values: list[str], kind: str) -> list[list[str]]:
    """What the command has for each choice of a flag of this type."""
    flag = f"--{name.replace('_', '-')}"
    if kind == "bool" and values:
        return [[flag if value == "True" else f"--no-{flag[2:]}"] for value in values]
    if not values:
        return [[flag]]
    if not kind.startswith("tuple"):
        return [[flag, value] for value in values]
    if any(" " in value for value in values):
        return [[flag, *value.split()] for value in values]
    return [[flag, *values]]


def jobs_of(name: str, flags: dict[str, list[str]]) -> tuple[list[Job], list[str]]:
    """The jobs, and the flags that have several values. SystemExit for an unknown flag."""
    path = script_of(name)
    is_mini = mini_of([path.name]) is not None
    known = flags_in(path)
    default = ast.literal_eval(known["env_id"].value)
    if not is_mini:
        known |= flags_in(Path(__file__).with_name("arguments.py"), "Flags")
    grid = []
    for flag, values in flags.items():
        if flag in OWN:
            continue
        line = known.get(flag.removeprefix("no_"))
        if line is None:
            raise SystemExit(f"--{flag.replace('_', '-')}: {path.name} has no such flag")
        grid.append(choices(flag, values, ast.unparse(line.annotation)))
    several = [k for k, each in enumerate(grid) if len(each) > 1]
    jobs = []
    for seed, *words in itertools.product(flags["seeds"], *grid):
        command = sum(words, [])
        env_id = dict(zip(command, command[1:])).get("--env-id", default)
        key = key_of(path.stem, in_order(*split([path.name, *command])), env_id, seed)
        resume = [] if is_mini else ["--resume", "auto"]
        about = " ".join(sum((words[k] for k in several), []))
        own = [sys.executable, str(path), *command, "--seed", seed, *resume]
        jobs.append(job_of(key, own, Path(flags["run_dir"][0], key), about))
    if len({job.key for job in jobs}) < len(jobs):
        raise SystemExit("the same run would be made twice: a value or a seed is given twice")
    return jobs, [grid[k][0][0][2:] for k in several]


def note_flags(job: Job) -> None:
    """Leaves the flags of a short script, which writes none, where services.plot looks for them."""
    _, flags = split(job.command)
    given = {flag[0][2:].replace("-", "_"): " ".join(flag[1:]) for flag in flags}
    for path in job.folder.glob("runs/*/events.out*"):
        of_name = dict(zip(("env_id", "exp_name", "seed"), path.parent.name.split("__")))
        path.with_name("args.json").write_text(json.dumps(of_name | given))


def is_finished(job: Job) -> bool:
    path = job.folder / "exit_code"
    return path.exists() and path.read_text() == "0"


def main(argv: list[str]) -> int:
    scripts, given = words_of(argv)
    if len(scripts) != 1 or "help" in given:
        raise SystemExit(__doc__)
    flags = OWN | given
    jobs, names = jobs_of(scripts[0], flags)

    def ended(job: Job, code: int, began: float) -> None:
        (job.folder / "exit_code").write_text(str(code))
        if mini_of(job.command) is not None:
            note_flags(job)

    where = flags["run_dir"][0]
    code = work(where, jobs, is_finished, ended, int(flags["workers"][0]))
    by = " --by " * bool(names) + " ".join(names)
    print(f"curves: python -m cleanrl_graph.services.plot {where}{by}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
