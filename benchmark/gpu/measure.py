"""What is measured on a GPU: `bash benchmark/gpu.sh --out DIR`, in ten minutes.

    checks    does the machine compile; where each script waits; do collection and training agree
    sps       steps per second of whole trainings, eager and compiled, and of CleanRL's ppo.py
    tests     all tests that need a CUDA device

DIR/results.json (raw) and DIR/tables.md are written anew after every row, and rows that are in DIR
are left out: after Ctrl-C the same command goes on. Exit code 1 if a row failed or there is no CUDA
device.
"""

import concurrent.futures
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmark" / name) for name in ("speed", "")]
import beside  # noqa: E402
from cartpole_vs_cleanrl import CHANGES, changed  # noqa: E402
from tables import COMMITTED, commit, cpu_name, markdown, output, put, write  # noqa: E402

from cleanrl_graph.services.plot import scalars  # noqa: E402

PARTS = ("checks", "sps", "tests")
FAILED = 1
DRY = "dry: CPU, sizes of a try"
PACKAGES = ("torch-geometric", "gymnasium", "numpy")


@dataclass
class Args:
    out: str
    """folder of results.json and tables.md; rows that are in it are not measured again"""
    parts: Annotated[tuple[Literal["first", *PARTS], ...], tyro.conf.Positional] = ("first",)
    """parts, or "first": all of them"""
    only: str = ""
    """regular expression; only rows are measured that it is found in (`PART | TABLE | KEY ...`)"""
    peers: str | None = None
    """folder with CleanRL's ppo.py"""
    commit: str | None = None
    """the name of the commit, where there is no git"""
    dry: bool = False
    """if toggled, some rows of each part run on the CPU in sizes of a try: do they run?"""


class NotHere(Exception):
    """A sentence that says why a row cannot be measured on this machine."""


class Row(NamedTuple):
    part: str
    table: str  # its heading
    key: dict[str, Any]  # name of the column -> what was measured
    measure: Callable[[], dict]  # figures; "_names" are in the json alone

    @property
    def name(self) -> str:
        return " | ".join([self.part, self.table, *map(str, self.key.values())])


# ---- Where it runs ----
def num_workers() -> int:
    """Processes that step environments, where those are slow."""
    return max(len(os.sched_getaffinity(0)) - 2, 0)


def machine(args: Args) -> dict:
    """Hardware, versions and commit, for the files."""
    about = {"dry": args.dry, "gpu": None, "cpu": cpu_name(), "cpus": len(os.sched_getaffinity(0))}
    about |= {"system": platform.system(), "python": platform.python_version()}
    about |= {"torch": torch.__version__, "commit": args.commit or commit(7)}
    about |= {name: importlib.metadata.version(name) for name in PACKAGES}
    if not args.dry:
        driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = driver.split("\n")[0]  # of the first GPU
        about |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
        about |= {"driver": driver, "cuda": torch.version.cuda}
        about["cudnn"] = torch.backends.cudnn.version()
    return about


def describe(about: dict) -> str:
    """One line about a machine."""
    gpu = "{gpu} (driver {driver}, CUDA {cuda}, cuDNN {cudnn}), " if not about["dry"] else ""
    text = (gpu + "{cpu}, {cpus} CPUs, {system}, Python {python}").format_map(about)
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", *PACKAGES))
    return f"{text}, {versions}, commit {about['commit']}"


# ---- Files ----
def cell(value: Any) -> str:
    """A number with three significant digits, or with all before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


class Results:
    """OUT/results.json: machine and rows; OUT/tables.md shows them. SystemExit where there are rows
    of another machine or commit, or of a try."""

    def __init__(self, args: Args):
        self.folder = Path(args.out)
        self.about = machine(args)
        self.path = self.folder / "results.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows = {}  # by their names
        if self.path.exists():
            known = json.loads(self.path.read_text())
            if known["machine"] != self.about:
                raise SystemExit(
                    f"{self.path}: rows of another machine or commit, or tries with --dry, do not "
                    "go into one table with these; give another --out"
                )
            self.rows = known["rows"]
        flags = ["--peers", "PEERS"] * bool(args.peers) + ["--dry"] * args.dry
        flags += ["--only", args.only] * bool(args.only)
        out = self.folder.resolve()
        name = out.relative_to(ROOT) if ROOT in out.parents else out.name
        self.command = f"bash benchmark/gpu.sh {shlex.join(['--out', str(name), *flags])}"

    def has(self, row: Row) -> bool:
        """Whether it was measured; what failed, or could not be run, is tried again."""
        return row.name in self.rows and not self.rows[row.name]["note"]

    def add(self, row: Row, figures: dict, note: str = "") -> None:
        """In the place of what was known of the row."""
        entry = {"part": row.part, "table": row.table, "key": row.key}
        self.rows[row.name] = entry | {"figures": figures, "note": note}
        write(self.path, json.dumps({"machine": self.about, "rows": self.rows}, indent=1))
        put(f"{self.folder}/tables.md#{row.part}", self.page(row.part))

    def page(self, part: str) -> str:
        """Command, machine, and one table per heading, in the order in which they were begun."""
        lines = [f"    {self.command} {part}", "", *[f"**{DRY}**", ""] * self.about["dry"]]
        lines += [describe(self.about), "", f"# {TITLES[part]}", ""]
        rows = [row for row in self.rows.values() if row["part"] == part]
        for table in dict.fromkeys(row["table"] for row in rows):
            own = [row for row in rows if row["table"] == table]
            lines += [f"## {table}", "", table_of(own), ""]
        return "\n".join([*lines, NOTES.get(part, ""), ""])


def table_of(rows: list[dict]) -> str:
    """Markdown; a column "note" only if there is one."""
    titles = list(dict.fromkeys(name for row in rows for name in row["key"]))
    names = dict.fromkeys(name for row in rows for name in row["figures"])
    titles += [name for name in names if not name.startswith("_")]
    titles += ["note"] * any(row["note"] for row in rows)
    lines = [titles]
    for row in rows:
        known = row["key"] | row["figures"] | {"note": row["note"]}
        lines.append([cell(known.get(name)).replace("|", "/") for name in titles])
    return markdown(lines)


def measure(results: Results, rows: list[Row], args: Args) -> int:
    """Measures what is not in the files yet. The exit code."""
    rows = [row for row in rows if re.search(args.only, row.name)]
    missing = [row for row in rows if not results.has(row)]
    print(f"{len(rows) - len(missing)} of {len(rows)} rows are there", flush=True)
    failed = 0
    # Those of the checks beside each other: their seconds are rough
    with concurrent.futures.ThreadPoolExecutor(max(1, num_workers() // 2)) as pool:
        begun = {}
        for row in missing:
            if row.part == "checks" and not args.dry:
                begun[row.name] = pool.submit(row.measure)
        for row in missing:
            start, figures, note = time.monotonic(), {}, ""
            try:
                figures = begun[row.name].result() if row.name in begun else row.measure()
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
    return FAILED if failed else 0


# ---- Trainings ----
SMALL = "--hidden-dims 64 64"  # CleanRL's networks
TRXL = "--num-layers 4 --num-heads 4 --dim 128 --memory-length 32 --hidden-dims 128 --gate none"
LARGE = '--env-kwargs \'{"jobs": [3, 10], "machines": [3, 10]}\' --gamma 1'
TASKS = {  # environment -> (its id, script -> flags)
    "CartPole-v1": ("CartPole-v1", {"ppo_graph": SMALL, "ppo_graph_compile": SMALL}),
    "PoissonGraph-v0": ("envs:PoissonGraph-v0", {"ppo_graph": "", "ppo_graph_compile": ""}),
    "StatelessCartPole-v1": (
        "envs:StatelessCartPole-v1",
        {"ppo_framestack": SMALL, "ppo_lstm_sparse": f"{SMALL} --prev-action", "ppo_gtrxl": TRXL},
    ),
    "JobShop-v0": ("envs:JobShop-v0", {"ppo_graph": LARGE}),
}
VECTORS = {"CartPole-v1": (512, 4096), "PoissonGraph-v0": (512,)}  # numbers of environments
VECTOR = "--vectorization-mode vector_entry_point"
MEMORY = "--prev-action --prev-reward"
CHECKS = {
    "ppo_graph": ("CartPole-v1", "envs:JobShop-v0", "envs:PairNodes-v0 --autoregressive"),
    "ppo_framestack": ("envs:StatelessCartPole-v1",),
    "ppo_lstm_sparse": ("envs:StatelessCartPole-v1", f"envs:GraphExplore-v0 {MEMORY}"),
    "ppo_gtrxl": (f"envs:StatelessCartPole-v1 {MEMORY}",),
    "ppo_graph_async": ("envs:PoissonGraph-v0",),
    "ppo_graph_aux": ("envs:PoissonGraph-v0 --aux reconstruct",),
    "ppo_graph_agents": ("envs:Crowd-v0",),
    "ppo_graph_compile": ("CartPole-v1", "envs:PoissonGraph-v0", "envs:JobShop-v0"),
}


def run(command: list[str], cwd: str | Path = ROOT) -> None:
    """RuntimeError with the end of what it said if it fails."""
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | os.environ
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        timeout=240,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).replace("\r", "\n").strip()[-2000:]
        raise RuntimeError(f"exit code {done.returncode} of {shlex.join(command)}:\n{said}")


def words_of(args: Args, script: str, flags: str) -> list[str]:
    words = [*shlex.split(flags), *"--checkpoint-every 0 --eval-episodes 0".split()]
    words += ["--no-cuda"] * args.dry
    if args.dry and script == "ppo_graph_compile":
        words += ["--compile-mode", "none"]
    return words


def flags_of(task: str, script: str, num_envs: int, num_steps: int, workers: int) -> str:
    env_id, scripts = TASKS[task]
    return (
        f"--env-id {env_id} --num-envs {num_envs} --num-steps {num_steps} --num-minibatches 4 "
        f"--update-epochs 4 --num-workers {workers} {scripts[script]}"
    )


def steady(updates: list[tuple[float, float]]) -> float:
    """Steps per second in the second half of the time after the first update, from (step, seconds)
    of updates."""
    (_, first), (last_step, last) = updates[0], updates[-1]
    step, seconds = next((step, t) for step, t in reversed(updates[:-1]) if t <= (first + last) / 2)
    return (last_step - step) / (last - seconds)


def compiler(args: Args) -> dict:
    """What torch.compile needs on this machine, and whether it makes x + 1."""
    seconds = None
    if not args.dry:
        start = time.perf_counter()
        x = torch.arange(5, device="cuda")
        if not torch.equal(torch.compile(lambda x: x + 1)(x), x + 1):
            raise RuntimeError("the compiled x + 1 is another number")
        seconds = time.perf_counter() - start
    path = shutil.which(os.environ.get("CC", "gcc"))
    version = output(path, "--version").split("\n")[0] if path else "none"
    return {"C compiler": version, "x + 1 compiled, s": seconds}


def updates(args: Args, script: str, task: str) -> dict:
    """Updates 3 to 5 of a training; of ppo_graph_compile.py later ones, which capture less."""
    warmup = "10" if script == "ppo_graph_compile" and not args.dry else "2"
    flags = f"--env-id {task} --num-envs 16 --num-steps 32 --total-timesteps {10**9}"
    child = str(Path(__file__).with_name("waits.py"))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "noted.json")
        words = [*words_of(args, script, flags), "--run-dir", folder]
        run([sys.executable, child, str(result), warmup, script, *words])
        noted = json.loads(result.read_text())
    return {
        "waits per update": sum(noted["places"].values()) / noted["updates"],
        "largest |ratio - 1|": noted["mismatch"],
        "first update, s": noted["first"],
        "where": ", ".join(f"{place} {num}" for place, num in noted["places"].items()),
    }


def speed(command: list[str], folder: str) -> dict:
    """Of a training that logs to `folder`/runs."""
    run([sys.executable, *command], folder)
    found = [(step, at) for _, step, at, _ in scalars(Path(folder, "runs"), "charts/SPS")]
    return {"SPS": steady(found), "updates": len(found), "_updates": found}


def sps(args: Args, script: str, flags: str, rollout: int) -> dict:
    num = 40 if script == "ppo_graph_compile" else 20
    num = 4 if args.dry else max(6, min(num, 10**6 // rollout))
    words = words_of(args, script, f"{flags} --total-timesteps {num * rollout}")
    with tempfile.TemporaryDirectory() as folder:
        return speed([str(ROOT / "cleanrl_graph" / f"{script}.py"), *words], folder)


def cleanrl(args: Args, num_envs: int, num_steps: int) -> dict:
    """ppo.py with the changes of cartpole_vs_cleanrl.py. NotHere if --peers has it not."""
    path = Path(args.peers or "", "ppo.py").resolve()
    if args.peers is None or not path.exists():
        raise NotHere("no --peers, the folder with CleanRL's ppo.py")
    sizes = f"--num-envs {num_envs} --num-steps {num_steps}"
    total = 20 * num_envs * num_steps
    with tempfile.TemporaryDirectory() as folder:
        words = f"--env-id CartPole-v1 {sizes} --total-timesteps {total}".split()
        script = changed(path, CHANGES, folder)
        return speed([script, *words, *["--no-cuda"] * args.dry], folder)


# ---- Tests ----
def run_tests(args: Args) -> dict:
    """How many passed and so on; in a try they skip themselves. RuntimeError if one failed."""
    files = [
        path for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text()
    ]
    flags = "-m cuda -q -p no:cacheprovider".split()
    command = [sys.executable, "-m", "pytest", *flags, *map(str, sorted(files))]
    done = subprocess.run(command, cwd=ROOT, timeout=600, text=True, stdout=subprocess.PIPE)
    print(done.stdout)
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode:
        raise RuntimeError(last)
    return {name: int(num) for num, name in re.findall(r"(\d+) (passed|skipped)", last)}


# ---- Rows ----
def all_rows(args: Args) -> list[Row]:
    """In the order in which they are measured; in a try some of each part."""
    rows = []

    def add(part: str, table: str, key: dict, function: Callable, *given: Any) -> None:
        rows.append(Row(part, table, key, functools.partial(function, args, *given)))

    add("checks", "The machine", {"what": "machine"}, compiler)
    for script, tasks in CHECKS.items():
        for task in tasks:
            key = {"script": f"{script}.py", "environment": task}
            add("checks", "Updates", key, updates, script, task)
    workers = {"PoissonGraph-v0": num_workers(), "JobShop-v0": num_workers()}
    workers = {} if args.dry else workers
    large, small = ((4, 16), (2, 16)) if args.dry else ((512, 32), (64, 128))
    for sizes, tasks in ((large, [*TASKS]), (small, ["CartPole-v1"])):
        for task in tasks:
            num = workers.get(task, 0)
            about = dict(zip(("environments", "steps"), sizes)) | {"workers": num}
            for script in TASKS[task][1]:
                flags = flags_of(task, script, *sizes, num)
                key = {"system": f"{script}.py"} | about
                add("sps", task, key, sps, script, flags, math.prod(sizes))
            if task == "CartPole-v1":
                add("sps", task, {"system": "CleanRL ppo.py"} | about, cleanrl, *sizes)
    num_steps = 16 if args.dry else 32
    for task, numbers in VECTORS.items():
        for num_envs in (4,) if args.dry else numbers:
            for script in TASKS[task][1]:
                flags = f"{flags_of(task, script, num_envs, num_steps, 0)} {VECTOR}"
                key = {"system": f"{script}.py", "environments": num_envs, "steps": num_steps}
                rollout = num_envs * num_steps
                add("sps", f"{task}, one VectorEnv", key, sps, script, flags, rollout)
    add("tests", "Tests", {"test": "all"}, run_tests)
    chosen = PARTS if "first" in args.parts else args.parts
    rows = [row for row in rows if row.part in chosen]
    if args.dry:  # two of each table
        tables = [(row.part, row.table) for row in rows]
        rows = [row for k, row in enumerate(rows) if tables[:k].count(tables[k]) < 2]
    return rows


TITLES = {
    "checks": "Checks on the GPU",
    "sps": "Steps per second on the GPU",
    "tests": "Tests on a CUDA device",
}
NOTES = {
    "checks": """Waits are what torch.cuda.set_sync_debug_mode warns of, in three updates of 32
steps of 16 environments; where: the file and line that waited, and how often. As meant are one per
step, for the actions, one per update for the values, one for what is logged, and with --target-kl
one per epoch. ppo_graph_async.py steps in a process of its own, which is not watched.""",
    "sps": """SPS: environment steps per second in the second half of the time between the end of
the first update and the end of the run, 20 updates, or 40 that are compiled, of a million steps at
most. Rollouts of 128 and 32 steps with 64 and 512 environments (of VectorEnvs also 4,096),
4 minibatches, 4 epochs. Workers are processes that step the environments; CleanRL's ppo.py, with
the two changes of benchmark/speed/cartpole_vs_cleanrl.py, has none. One VectorEnv steps all
environments at once, in this process.""",
}


def main(args: Args) -> int:
    if not args.dry and not torch.cuda.is_available():
        print("no CUDA device is available here; --dry tries all parts on the CPU", file=sys.stderr)
        return FAILED
    code = measure(Results(args), all_rows(args), args)
    if not args.dry and Path(args.out).resolve() != COMMITTED / "h200":
        beside.main(args.out, str(COMMITTED / "h200"))
    return code


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
