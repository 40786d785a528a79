"""Shared by the parts of benchmark/gpu.sh: rows that are measured one after the other within a time
budget, results.json and tables.md, which are written anew after every row, and processes that are
stopped when time is up."""

import contextlib
import json
import multiprocessing as mp
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Callable, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmark" / "results"
SCRIPTS = ROOT / "cleanrl_graph"
sys.path[:0] = [str(ROOT / "benchmark" / "speed"), str(ROOT / "benchmark")]

import torch  # noqa: E402
from common import commit_of  # noqa: E402
from tables import cpu_name, put, write  # noqa: E402

DRY = "dry: CPU, sizes of a try"
FAILED, LEFT = 1, 3  # a row failed; time was up with rows left, the same command goes on
# Of processes, unless the environment has others
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
PACKAGES = ("torch-geometric", "gymnasium", "numpy")


@dataclass
class Args:
    out: str
    """folder of results.json and tables.md; rows that are in it are not measured again"""
    dry: bool = False
    """if toggled, everything runs on the CPU in sizes of a try: does it run?"""
    minutes: float = 7.0
    """no row is begun, and none goes on, after this time"""
    only: str = ""
    """regular expression; only rows are measured that it is found in (`TABLE | KEY | KEY ...`)"""
    peers: str | None = None
    """folder with the files of the systems to compare with, see benchmark/gpu/README.md"""
    commit: str | None = None
    """the name of the commit, where there is no git"""


class NotHere(Exception):
    """A sentence that says why a row cannot be measured on this machine."""


class TimeIsUp(Exception):
    """A row was stopped before its end; it is measured next time."""


class Row(NamedTuple):
    """One row of one of a part's tables."""

    table: str  # its heading
    key: dict[str, Any]  # name of the column -> what was measured
    # deadline (time.monotonic) -> figures; "_names" are in the json alone
    measure: Callable[[float], dict]
    seconds: float = 20.0  # what it takes, about: it is not begun if less is left

    @property
    def name(self) -> str:
        return " | ".join([self.table, *map(str, self.key.values())])


# ---- Where it runs ----
def check(args: Args) -> None:
    """SystemExit for a dry run among the tables, and for a measurement without a CUDA device."""
    folder = Path(args.out).resolve()
    if args.dry and (folder == RESULTS or RESULTS in folder.parents):
        raise SystemExit(
            f"--dry --out {args.out}: {RESULTS.relative_to(ROOT)} is for what was measured; give a "
            "folder elsewhere"
        )
    if not args.dry and not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device is available here, so nothing is measured; --dry tries all parts on "
            "the CPU"
        )


def num_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def output_of(*command: str) -> str:
    """The first line that a command prints; "" if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0].strip()
    except OSError:
        return ""


def machine(args: Args) -> dict:
    """Hardware, versions and commit, for the files."""
    about = {"dry": args.dry, "gpu": None, "cpu": cpu_name(), "cpus": num_cpus()}
    about |= {"system": platform.system(), "python": platform.python_version()}
    about |= {"torch": torch.__version__, "commit": args.commit or commit_of(ROOT)}
    for name in PACKAGES:
        try:
            about[name] = version(name)
        except PackageNotFoundError:
            about[name] = "missing"
    if not args.dry:
        driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        about |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
        about |= {"driver": driver, "cuda": torch.version.cuda}
        about["cudnn"] = torch.backends.cudnn.version()
    return about


def describe(about: dict) -> str:
    """One line about a machine."""
    gpu = "{gpu} (driver {driver}, CUDA {cuda}, cuDNN {cudnn}), " if not about["dry"] else ""
    machine = (gpu + "{cpu}, {cpus} CPUs, {system}, Python {python}").format_map(about)
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", *PACKAGES))
    return f"{machine}, {versions}, commit {about['commit']}"


# ---- Files ----
def cell(value: Any) -> str:
    """A number with three significant digits, or with all before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


class Results:
    """The rows of a part: OUT/results.json holds those of all parts, OUT/tables.md shows them."""

    def __init__(self, args: Args, part: str, title: str, notes: str, about: dict):
        self.folder, self.part, self.title, self.notes = Path(args.out), part, title, notes
        self.path, self.command = self.folder / "results.json", command_line(args, part)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.content = self.known().get(part, {"machines": [], "commands": [], "rows": []})
        if any(other["dry"] != about["dry"] for other in self.content["machines"]):
            kind = "a dry run" if args.dry else "a measurement"
            raise SystemExit(
                f"{part} in {self.path} is not of {kind}, and both do not go into one table; give "
                "another --out"
            )
        self.about = about

    def known(self) -> dict[str, dict]:
        """Part -> its content, as results.json has it."""
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def find(self, row: Row) -> dict | None:
        """What is known of the row."""
        same = lambda other: other["table"] == row.table and other["key"] == row.key
        return next(filter(same, self.content["rows"]), None)

    def has(self, row: Row) -> bool:
        """Whether it was measured; what failed, or could not be run, is tried again."""
        found = self.find(row)
        return found is not None and not found["note"]

    def add(self, row: Row, figures: dict, note: str = "") -> None:
        """In the place of what was known of the row; a measured one is never lost to a failure."""
        for name, value in (("machines", self.about), ("commands", self.command)):
            if value not in self.content[name]:
                self.content[name].append(value)
        entry = {"table": row.table, "key": row.key, "figures": figures, "note": note}
        entry["machine"] = self.content["machines"].index(self.about)
        rows, found = self.content["rows"], self.find(row)
        if found is None:
            rows.append(entry)
        else:
            rows[rows.index(found)] = entry
        self.save()

    def save(self) -> None:
        """A line of results.json per row, machine or command."""
        parts = []
        for part, content in (self.known() | {self.part: self.content}).items():
            lists = []
            for name, values in content.items():
                lines = ",\n".join(f"   {json.dumps(value)}" for value in values)
                lists.append(f'  "{name}": [\n{lines}\n  ]')
            parts.append(f' "{part}": {{\n' + ",\n".join(lists) + "\n }")
        write(self.path, "{\n" + ",\n".join(parts) + "\n}\n")
        put(f"{self.folder}/tables.md#{self.part}", self.markdown())

    def markdown(self) -> str:
        """Commands, machines, and one table per heading, in the order in which they were begun."""
        lines = [f"    {command}" for command in self.content["commands"]] + [""]
        if self.about["dry"]:
            lines += [f"**{DRY}**", ""]
        for about in self.content["machines"]:
            lines += [describe(about), ""]
        lines += [f"# {self.title}", ""]
        for table in dict.fromkeys(row["table"] for row in self.content["rows"]):
            own = [row for row in self.content["rows"] if row["table"] == table]
            lines += [f"## {table}", "", *self.table(own), ""]
        return "\n".join([*lines, self.notes, ""])

    def table(self, rows: list[dict]) -> list[str]:
        """Markdown lines; a column "note" only if there is one."""
        keys = list(dict.fromkeys(name for row in rows for name in row["key"]))
        names = dict.fromkeys(name for row in rows for name in row["figures"])
        figures = [name for name in names if not name.startswith("_")]
        notes = ["note"] if any(row["note"] for row in rows) else []
        lines = [[*keys, *figures, *notes], ["---"] * len(keys + figures + notes)]
        for row in rows:
            known = row["key"] | row["figures"]
            cells = [known.get(name) for name in keys + figures]
            lines.append([*map(cell, cells), *([row["note"]] if notes else [])])
        texts = [" | ".join(str(value).replace("|", "/") for value in line) for line in lines]
        return [f"| {text} |" for text in texts]


def command_line(args: Args, part: str) -> str:
    """The command as it stands above a table; folders by their place here, or by their names
    alone."""
    out = Path(args.out).resolve()
    out = out.relative_to(ROOT) if ROOT in out.parents else out.name
    flags = ["--out", str(out)] + ["--dry"] * args.dry + ["--peers", "PEERS"] * bool(args.peers)
    flags += ["--only", args.only] * bool(args.only)
    return f"bash benchmark/gpu.sh {shlex.join(flags)} {part}"


def measure(results: Results, rows: list[Row], args: Args, deadline: float) -> int:
    """Measures what is not in the files yet. The exit code."""
    chosen, left, failed = [row for row in rows if re.search(args.only, row.name)], 0, 0
    missing = [row for row in chosen if not results.has(row)]
    # What failed before may take the device with it
    missing.sort(key=lambda row: results.find(row) is not None)
    there = len(chosen) - len(missing)
    print(f"{results.part}: {there} of {len(chosen)} rows are there already", flush=True)
    for row in missing:
        start, figures, note = time.monotonic(), {}, ""
        try:
            if start + row.seconds > deadline:
                raise TimeIsUp
            figures = row.measure(deadline)
        except TimeIsUp:
            left += 1
            continue
        except NotHere as reason:
            note = f"not run: {reason}"
        except Exception as error:
            failed += 1
            traceback.print_exc()
            last = (str(error).strip().splitlines() or [""])[-1]
            note = f"failed: {type(error).__name__}: {last}"
        results.add(row, figures, note[:300])
        texts = [f"{name} {cell(x)}" for name, x in figures.items() if not name.startswith("_")]
        shown = note or ", ".join(texts)
        print(f"{time.monotonic() - start:5.1f} s  {row.name}: {shown}", flush=True)
    if left:
        print(f"{results.part}: time is up, {left} rows are left; the same command continues")
    return FAILED if failed else LEFT if left else 0


# ---- Processes ----
def wait(
    process: Any, is_alive: Callable[[], bool], deadline: float, patience: float = 20.0
) -> bool:
    """Waits for the end; after the deadline SIGTERM, then SIGKILL. Whether it ended by itself."""
    while is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    if not is_alive():
        return True
    process.terminate()
    end = time.monotonic() + patience
    while is_alive() and time.monotonic() < end:
        time.sleep(0.05)
    process.kill()
    return False


def tail(path: Path, size: int = 2000) -> str:
    return path.read_text(errors="replace").replace("\r", "\n").strip()[-size:]


def in_child(args: Args, arguments: list[str], log: Path, deadline: float) -> None:
    """`python benchmark/gpu/child.py ARGUMENTS` as a process of its own, in a dry run as a fork,
    which saves its imports. What it prints is in the log. TimeIsUp at the deadline, RuntimeError
    with the log's end if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if not args.dry:
        child = str(Path(__file__).with_name("child.py"))
        run_command([sys.executable, child, *arguments], log, deadline)
        return
    sys.path.insert(0, str(ROOT))
    from cleanrl_graph import ppo_graph  # noqa: F401  once, before the forks

    process = mp.get_context("fork").Process(target=forked, args=(arguments, log))
    process.start()
    ended = wait(process, process.is_alive, deadline)
    process.join()
    conclude(ended, process.exitcode, log)


def run_command(command: list[str], log: Path, deadline: float) -> None:
    """The same for any command, run in the repository's root."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        files = dict(stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        process = subprocess.Popen(command, cwd=ROOT, env=THREADS | os.environ, **files)
    ended = wait(process, lambda: process.poll() is None, deadline)
    conclude(ended, process.wait(), log)


def conclude(ended: bool, code: int, log: Path) -> None:
    if not ended:
        raise TimeIsUp
    if code:
        raise RuntimeError(f"exit code {code}; the end of {log}:\n{tail(log)}")


def forked(arguments: list[str], log: Path) -> None:
    """What the fork of a dry run does."""
    file = open(log, "a", buffering=1)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(file.fileno(), number)
        setattr(sys, name, file)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    import child

    child.main(arguments)


def from_child(
    args: Args, mode: str, name: str, flags: list[str], log: Path, deadline: float, **settings
) -> dict:
    """What child.py notes about a run of a script with these flags, see there."""
    log = log.resolve()
    result = log.with_suffix(".result")
    result.unlink(missing_ok=True)
    settings |= {"mode": mode, "result": str(result)}
    in_child(args, [json.dumps(settings), name, *flags], log, deadline)
    noted = json.loads(result.read_text())
    result.unlink()
    log.unlink()  # that of a failure stays
    with contextlib.suppress(OSError):
        log.parent.rmdir()
    return noted


def times_of_lines(
    command: list[str],
    pattern: str,
    seconds: float,
    deadline: float,
    log: Path,
    environment: dict[str, str],
    cwd: str,
) -> tuple[list[float], list[str]]:
    """Runs a peer in the folder `cwd` until `seconds` after the first line with the pattern, or to
    its end: when such lines were printed (time.perf_counter), and the lines. RuntimeError if it
    ends before the third one."""
    log.parent.mkdir(parents=True, exist_ok=True)
    times, lines, text = [], [], b""
    env = THREADS | os.environ | {"PYTHONUNBUFFERED": "1"} | environment
    files = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    process = subprocess.Popen(command, cwd=cwd, env=env, **files)
    os.set_blocking(process.stdout.fileno(), False)
    is_done = lambda: len(times) > 2 and times[-1] - times[0] >= seconds
    with open(log, "ab") as file:
        while time.monotonic() < deadline and not is_done():
            ended = process.poll() is not None
            chunk = process.stdout.read() or b""
            file.write(chunk)
            *whole, text = re.split(rb"[\r\n]", text + chunk)
            for line in whole:
                if re.search(pattern, line.decode(errors="replace")):
                    times.append(time.perf_counter())
                    lines.append(line.decode(errors="replace"))
            if ended and not chunk:
                break
            time.sleep(0.002)
    ended = process.poll()
    process.kill()
    process.wait()
    process.stdout.close()
    if ended is None and len(times) < 3:
        raise TimeIsUp
    if len(times) < 3:
        said = f"exit code {ended} of {shlex.join(command)}; its last lines:\n{tail(log)}"
        raise RuntimeError(said)
    return times, lines


def steady(updates: list[tuple[float, float]]) -> float:
    """Steps per second in the second half of the time after the first update, from (step, seconds)
    of updates."""
    (_, first), (last_step, last) = updates[0], updates[-1]
    step, seconds = next((step, t) for step, t in reversed(updates[:-1]) if t <= (first + last) / 2)
    return (last_step - step) / (last - seconds)
