"""One update on many environments of public packages: benchmark/zoo.sh installs the packages and
runs this.

    .venv-zoo/main/bin/python benchmark/zoo.py --environment main --workers 2

zoo/packages.csv has a line per package: the environment that it is installed in; the module that
registers its ids ("" where gymnasium finds them), or one of ours that does if importing does not;
which ids, at most how many; keyword arguments, of the one id that it names then; flags that are
tried if the printed sentence names their first word.

Each id trains with ppo_graph.py, about a tenth with each memory script, in a process that does
what the command line does. Then load_policy loads the model and plays. If a sentence refuses the
id, the flags that it names are tried, one after the other. If nothing trains, a process without
cleanrl_graph plays random actions: where that fails, too, the package does not work here.

It appends to ids.csv in --results and skips what is there; table.md is made from it.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import tyro
from tables import RESULTS, added, markdown, read

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark" / "zoo")]  # cleanrl_graph of this checkout
SITE = sysconfig.get_paths()["purelib"]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmark' / 'zoo'}",
    "SDL_VIDEODRIVER": "dummy",
    "SDL_AUDIODRIVER": "dummy",
    "PYGLET_HEADLESS": "1",
    "MUJOCO_GL": "egl",
    "SUMO_HOME": f"{SITE}/sumo",
}
SCRIPTS = ("ppo_graph", "ppo_framestack", "ppo_lstm_sparse", "ppo_gtrxl")
SMALL = (
    "--num-envs 2 --num-steps 16 --total-timesteps 32 --eval-episodes 0 --save-model "
    "--hidden-dims 32"
)
COLUMNS = tuple(
    "package version id script flags outcome message collection_mismatch seconds".split()
)
TRAINS, WITH_FLAG, REFUSED = "trains", "trains with a flag", "refused"
BROKEN = "package fails"
TIMEOUT = 180  # seconds for a process
OURS = ("traceback", "killed", "timeout", "does not play")  # what should never be
MOST_TRIES = 6  # of an id that is refused
NUM_PLAYED = 20  # steps by load_policy, and of random actions
LIMIT = 1e-5  # of debug/collection_mismatch


NOTE = """\
SectorCREnv-v0: bluesky has one simulator per process, which the two environments share; with
`--num-workers 2` it trains. The mask of SteinerTree-v0 and MulticastRouting-v0 has twice as many
entries as their actions, so it says nothing about them. The random actions are those of
`action_space.sample()`, without a mask.

`--env-kwargs` among the flags are arguments without which gym.make fails, too. Random actions fail
for the four ids of nasim with a flag, as its `step` refuses NumPy's integers; they are counted,
since they train. Data sets of ap-gym that have to be downloaded were left out after a first try.

Grid2Op's collection mismatch is rounding: a log-probability is a sum over 58 choices, about -58,
where float32 has steps of 3.8e-6. In float64 the same training has 1.4e-14. On
`l2rpn_case14_sandbox`, with more choices, it is 1.5e-5, and 8e-7 in float64.

The runs were made while this was written, so not all with the same commit; the machine was shared,
so the seconds say little."""


@dataclass
class Args:
    environment: str = "main"
    """the packages of this environment, which is this Python's"""
    list: str = str(ROOT / "benchmark" / "zoo" / "packages.csv")
    """the packages"""
    results: str = str(RESULTS / "zoo")
    """folder of ids.csv and table.md"""
    workers: int = os.cpu_count() or 1
    """processes at a time"""


class Package(NamedTuple):
    """A line of packages.csv."""

    package: str
    environment: str
    module: str
    yours: str
    pattern: str
    most: int
    kwargs: str
    flags: str


class Task(NamedTuple):
    package: Package
    env_id: str
    script: str

    @property
    def name(self) -> str:
        return f"{self.env_id} {self.package.kwargs}".strip()


# ---- In a process of its own, in the environment of the package ----
def ids_of(module: str) -> dict:
    """The newest version of each id that the module registers, or of all where it is ""."""
    import gymnasium as gym

    before = set() if module == "" else set(gym.registry)
    if module:
        __import__(module)
    newest = {}
    for name, spec in gym.registry.items():
        key = (spec.namespace, spec.name)
        is_ours = str(spec.entry_point).startswith("cleanrl_graph")
        is_newer = (spec.version or 0) >= newest.get(key, (-1, ""))[0]
        if not is_ours and name not in before and is_newer:
            newest[key] = (spec.version or 0, name)
    return {"ids": sorted(name for _, name in newest.values())}


def train_and_play(script: str, *flags: str) -> dict:
    """What `python cleanrl_graph/SCRIPT.py FLAGS` does, and what load_policy makes of its model."""
    import runpy

    path = ROOT / "cleanrl_graph" / f"{script}.py"
    sys.argv = [str(path), *SMALL.split(), *flags]
    sys.path[0] = str(path.parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code:
            return {"outcome": REFUSED, "message": str(end.code)}
    except BaseException as error:
        return {"outcome": "traceback", "message": f"{type(error).__name__}: {error}"}
    folder = next(Path("runs").absolute().glob("*/model.pt")).parent
    result = {"outcome": TRAINS, "message": "", "collection_mismatch": mismatch(folder)}
    try:
        play(folder / "model.pt")
    except BaseException as error:
        result |= {"outcome": "does not play", "message": f"{type(error).__name__}: {error}"}
    return result


def mismatch(folder: Path) -> float:
    """The largest debug/collection_mismatch in a run's log."""
    from cleanrl_graph.services.plot import scalars

    return max(value for *_, value in scalars(folder, "debug/collection_mismatch"))


def play(model: Path) -> None:
    """Some steps of the model's environment by load_policy."""
    from cleanrl_graph import load_policy

    policy = load_policy(str(model))
    env = policy.make_env()
    obs, _ = env.reset(seed=3)
    reward = 0.0
    for _ in range(NUM_PLAYED):
        action = policy(obs, reward)
        obs, reward, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            obs, _ = env.reset()
            policy.reset()
            reward = 0.0
    env.close()


def play_at_random(env_id: str, kwargs: str) -> dict:
    """What gymnasium alone does with two environments of the id and random actions."""
    import gymnasium as gym

    try:
        more = json.loads(kwargs or "{}")
        envs = [gym.make(env_id, disable_env_checker=True, **more) for _ in range(2)]
        for seed, env in enumerate(envs):
            env.action_space.seed(seed)
            env.reset(seed=seed)
        for env in envs * NUM_PLAYED:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
    except BaseException as error:
        return {"outcome": BROKEN, "message": f"{type(error).__name__}: {error}"}
    return {"outcome": "works", "message": ""}


# ---- The processes ----
def preload() -> None:
    """Imports what every process needs: they are copies of this one."""
    import gymnasium  # noqa: F401
    import torch  # noqa: F401
    from torch.utils import tensorboard  # noqa: F401

    from cleanrl_graph.services import command, plot  # noqa: F401


def call(function: Callable, *args) -> dict:
    """What the function returns in a process of its own, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if pid == 0:
            run_in(folder, function, args)
        end = time.monotonic() + TIMEOUT
        status = None
        while status is None and time.monotonic() < end:
            time.sleep(0.05)
            done, code = os.waitpid(pid, os.WNOHANG)
            status = code if done else None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # and what it has started
        if status is None:
            os.waitpid(pid, 0)
            return {"outcome": "timeout", "message": f"not done after {TIMEOUT} s"}
        if Path(folder, "result").exists():
            return json.loads(Path(folder, "result").read_text())
        code = os.waitstatus_to_exitcode(status)
        said = Path(folder, "said").read_text(errors="replace").strip()
        last = said.rpartition("\n")[2]
        return {"outcome": "killed", "message": f"exit code {code}: {last}"}


def run_in(folder: str, function: Callable, args: tuple) -> None:
    """The process of `call`. It does not return."""
    try:
        os.setsid()
        os.chdir(folder)
        said = os.open("said", os.O_WRONLY | os.O_CREAT)
        for number in (1, 2):
            os.dup2(said, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        result = function(*args)
        with open(os.path.join(folder, "unfinished"), "w") as file:
            json.dump(result, file)
        os.replace(os.path.join(folder, "unfinished"), os.path.join(folder, "result"))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def first_line(message: str) -> str:
    """The sentence, without the frames of others' code before it."""
    lines = [line for line in message.strip().splitlines() if line.strip()]
    if lines and lines[0].startswith("Traceback"):
        lines = [line for line in lines[1:] if re.match(r"(env|update) \d|--|leaf", line)] or lines
    return " ".join(lines[0].split())[:600] if lines else ""


def named_flags(message: str, task: Task) -> Iterator[str]:
    """The flags that a sentence names: with a value, or of the package where it asks for one."""
    package = task.package
    yield from re.findall(r"--(?:wrap|action-head) [\w.:,-]*\w", message)
    if package.flags and package.flags.split()[0] in message:
        yield package.flags.replace("SITE", SITE)
    if package.yours and "in a module of yours" in message:
        yield f"--env-id {package.yours}:{task.env_id.split(':')[-1]}"


def attempt(task: Task) -> dict:
    """The line of ids.csv."""
    begin = time.monotonic()
    kwargs = task.package.kwargs
    given = ["--env-id", task.env_id, *["--env-kwargs", kwargs] * bool(kwargs)]
    queue = [[]]  # lists of flags
    results = []
    while queue and len(results) < MOST_TRIES:
        flags = queue.pop(0)
        words = shlex.split(" ".join(merged(flags)))
        result = call(train_and_play, task.script, *given, *words)
        if result["outcome"] != REFUSED:
            break
        results.append(result)
        named = named_flags(result["message"], task)
        queue += [[*flags, flag] for flag in named if flag not in flags]
    else:
        result = results[0] | {"message": results[-1]["message"]}
    if flags and result["outcome"] == TRAINS:
        result["outcome"] = WITH_FLAG
    if result["outcome"] not in (TRAINS, WITH_FLAG):
        env_id = task.env_id
        if task.package.yours:
            env_id = f"{task.package.yours}:{env_id.split(':')[-1]}"
        own = [shlex.split(flag)[1] for flag in flags if flag.startswith("--env-kwargs")]
        alone = call(play_at_random, env_id, [*own, kwargs][0])
        if alone["outcome"] != "works":
            result = alone | {"outcome": BROKEN}
    return {
        "package": task.package.package,
        "version": importlib.metadata.version(task.package.package),
        "id": task.name,
        "script": f"{task.script}.py",
        "flags": " ".join(merged(flags)).replace(SITE, "SITE"),
        "outcome": result["outcome"],
        "message": first_line(result["message"]).replace(SITE, "SITE"),
        "collection_mismatch": result.get("collection_mismatch", ""),
        "seconds": round(time.monotonic() - begin, 1),
    }


def merged(flags: list[str]) -> list[str]:
    """One --wrap with all of them."""
    wraps = [flag.removeprefix("--wrap ") for flag in flags if flag.startswith("--wrap ")]
    others = [flag for flag in flags if not flag.startswith("--wrap ")]
    return others + [" ".join(["--wrap", *wraps])] * bool(wraps)


# ---- Tasks, and the table ----
def packages_of(args: Args) -> list[Package]:
    packages = [Package(**line | {"most": int(line["most"])}) for line in read(Path(args.list))]
    return [each for each in packages if each.environment == args.environment]


def tasks_of(args: Args, packages: list[Package]) -> list[Task]:
    """Every id with ppo_graph.py, about a tenth with each other script."""
    modules = sorted({each.yours or each.module for each in packages})
    with get_context("fork").Pool(args.workers) as pool:
        found = pool.map(partial(call, ids_of), modules)
    ids = dict(zip(modules, found))
    tasks = []
    for package in packages:
        registers = package.yours or package.module
        found = ids[registers].get("ids", [])
        found = [name for name in found if re.fullmatch(package.pattern, name)]
        if package.kwargs:
            found = [package.pattern]
        if len(found) > package.most:
            found = [found[k * len(found) // package.most] for k in range(package.most)]
        if not found:
            print(f"{package.package}: no {package.pattern} in {ids[registers]}")
        for env_id in [f"{package.module}:{name}".removeprefix(":") for name in found]:
            tasks.append(Task(package, env_id, SCRIPTS[0]))
            for k, script in enumerate(SCRIPTS[1:]):
                if zlib.crc32(tasks[-1].name.encode()) % 10 == k:
                    tasks.append(Task(package, env_id, script))
    return tasks


def main(args: Args) -> None:
    os.environ |= ENVIRONMENT
    preload()
    path = Path(args.results, "ids.csv")
    done = {(row["id"], row["script"]) for row in read(path)}
    tasks = tasks_of(args, packages_of(args))
    missing = [task for task in tasks if (task.name, f"{task.script}.py") not in done]
    print(f"{len(tasks)} runs, {len(missing)} of them are missing")
    with get_context("fork").Pool(args.workers) as pool, added(path, COLUMNS) as add:
        for row in pool.imap_unordered(attempt, missing):
            add(row)
            words = (row["id"], row["script"], row["flags"], row["outcome"], row["message"][:150])
            print(*words, flush=True)
    path.with_name("table.md").write_text(document(read(path)))


def document(rows: list[dict]) -> str:
    """table.md."""
    rows = sorted(rows, key=lambda row: (row["package"].lower(), row["id"], row["script"]))
    lines = [["package", "version", "ids", "as they are", "with a flag", "refused", "other"]]
    lines[0] += ["package fails", "runs"]
    packages = {row["package"]: row["version"] for row in rows}
    for name, version in packages.items():
        own = [row for row in rows if row["package"] == name]
        lines.append([name, version, *numbers(own)])
    lines.append([f"**all {len(packages)}**", "", *numbers(rows)])
    outcomes = Counter(outcomes_of(rows).values())
    num_working = sum(outcomes.values()) - outcomes[BROKEN]
    both = outcomes[TRAINS] + outcomes[WITH_FLAG]
    share = lambda num: f"{num} ({100 * num / max(num_working, 1):.1f}%)"
    worst = max([float(row["collection_mismatch"] or 0) for row in rows], default=0)
    chosen = lambda *names: [row for row in rows if row["outcome"] in names]
    parts = [
        "    bash benchmark/zoo.sh",
        f"{sum(outcomes.values())} ids of {len(packages)} packages, one update each with "
        "ppo_graph.py, about a tenth also with each memory script; then load_policy plays some "
        f"steps. The package of {num_working} of them works here: {share(outcomes[TRAINS])} train "
        f"as they are, {share(both)} as they are or with a flag that the printed sentence names. "
        "An id counts where the worst of its runs does. Largest collection mismatch: "
        f"{worst:.1e}. [Each run](ids.csv).",
        markdown(lines),
        NOTE,
        *list_of("With a flag", chosen(WITH_FLAG), "flags"),
        *list_of("Refused", chosen(REFUSED), "message"),
        *list_of("Other", chosen(*OURS), "message"),
        *list_of("The package fails with random actions, without us", chosen(BROKEN), "message"),
    ]
    return "\n\n".join(parts) + "\n"


def outcomes_of(rows: list[dict]) -> dict[str, str]:
    """The worst outcome of each id."""
    order = (*OURS, REFUSED, BROKEN, WITH_FLAG, TRAINS)
    found = {}
    for row in rows:
        found.setdefault(row["id"], []).append(row["outcome"])
    return {name: min(outcomes, key=order.index) for name, outcomes in found.items()}


def numbers(rows: list[dict]) -> list[str]:
    """The cells of a line of the table."""
    count = Counter(outcomes_of(rows).values())
    other = sum(count[name] for name in OURS)
    cells = [count[TRAINS], count[WITH_FLAG], count[REFUSED], other, count[BROKEN], len(rows)]
    return [str(cell or "") for cell in [count.total(), *cells]]


def list_of(title: str, rows: list[dict], column: str) -> list[str]:
    """A paragraph with a line per package and text."""
    if not rows:
        return []
    found = {}
    for row in rows:
        text = row[column].replace(row["id"].split(":")[-1], "ID")[:300]
        found.setdefault((row["package"], text), []).append(row["id"].split(":")[-1])
    lines = []
    for (package, text), ids in sorted(found.items()):
        shown = sorted(set(ids))
        names = ", ".join(shown[:3]) + (len(shown) > 3) * f" and {len(shown) - 3} more"
        lines.append(f"- {package} ({names}): `{text}`")
    return [f"{title}:", "\n".join(lines)]


if __name__ == "__main__":
    main(tyro.cli(Args))
