"""Shared by the scripts of this folder: the report with command and machine, calls that are timed
in turns, and whole training runs as processes."""

import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]  # for all that import this module
import tables  # noqa: E402

from cleanrl_graph.services.plot import events_of  # noqa: E402

PPO_GRAPH = str(ROOT / "cleanrl_graph" / "ppo_graph.py")


def report(markdown: str, out: str | None) -> None:
    """Prints the markdown; puts it into `out` (FILE, or FILE#SECTION), if given, below the command
    line (absolute paths: their names only), the machine and the commit."""
    print(markdown)
    if out:
        flags = [os.path.basename(flag) if os.path.isabs(flag) else flag for flag in sys.argv[1:]]
        command = f"python {os.path.relpath(sys.argv[0])} {shlex.join(flags)}"
        machine = (
            f"{tables.cpu_name()}, {os.cpu_count()} CPUs, {platform.system()}, Python "
            f"{platform.python_version()}, torch {torch.__version__}, commit {tables.commit(7)}"
        )
        tables.put(out, f"    {command}\n\n{machine}\n\n{markdown}\n")


def beside(out: str, ending: str) -> Path:
    """The path of another file of FILE#SECTION: SECTION and the ending."""
    name, _, section = out.partition("#")
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name((section or path.stem) + ending)


def picture(out: str, title: str, x: str, y: str, lines: dict[str, list[tuple]]) -> None:
    """A picture beside `out`: lines of points (x, y) by their names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for label, points in lines.items():
        axis.loglog(*zip(*points), marker="o", label=label)
    axis.set(xlabel=x, ylabel=y)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=8)
    figure.savefig(beside(out, ".png"), dpi=130)


# ---- Calls in turns ----
def turns(
    functions: list[Callable[[], object]],
    repeats: int,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = 1,
) -> np.ndarray:
    """Milliseconds of a call of each function [repeats, len(functions)], in turns A B C A B C ...
    after those of the warm-up; in a turn a function is called so many times in a row."""
    seconds = np.zeros((warm_up + repeats, len(functions)))
    for row in seconds:
        for k, function in enumerate(functions):
            start = clock()
            for _ in range(calls):
                function()
            row[k] = (clock() - start) / calls
    return 1000 * seconds[warm_up:]


def spread(values: Iterable[float], form: str = ",.0f") -> str:
    """Median (least to most)."""
    values = np.array(values)
    return f"{np.median(values):{form}} ({values.min():{form}} to {values.max():{form}})"


def rollout(script, args, num_steps: int, others: Iterable = ()) -> tuple:
    """(agents, memory, last step): agents of `args` and of other flags, and a memory of the first
    one that has seen so many steps of the environments."""
    from cleanrl_graph.services.process import accelerate

    makers = [partial(script.make_env, args, i) for i in range(args.num_envs)]
    envs = script.Envs(makers)
    agents = [script.Agent(envs.leaves, envs.action_space, own) for own in (args, *others)]
    for agent in agents:
        accelerate(agent)
    memory = script.Memory(agents[0], envs.leaves, args.num_envs, args)
    memory.begin()
    step = envs.reset(1)
    for _ in range(num_steps):
        action, _, _ = memory.act(step)
        step = envs.step(agents[0].head.env_actions(action, step.obs.counts))
    return agents, memory, step


# ---- Trainings ----
def trxl_command(python: str, script: str) -> list[str]:
    """CleanRL's ppo_trxl.py at `script`, run by the Python of its packages."""
    peer = str(ROOT / "benchmark" / "peers" / "cleanrl_trxl.py")
    return [os.path.abspath(python), peer, "--script", os.path.abspath(script)]


class Run(NamedTuple):
    """One training run as a process of its own."""

    sps: float  # environment steps per second of the training, as the script itself has it last
    late_sps: float  # those of the second half of the steps; NaN if the script logs none
    seconds: float  # of the whole process, imports included
    peak_mb: float  # largest resident memory
    mean_return: float  # of the last 100 episodes; NaN if the script has none


def train(command: list[str], cwd: str) -> Run:
    """Runs the command to its end with one thread of torch. RuntimeError if it fails or
    neither logs SPS below `cwd`/runs nor prints it."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as file:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=cwd)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        file.seek(0)
        output = file.read()
    episodes, updates = events_of(Path(cwd, "runs"))
    sps = [value for _, value in updates]
    returns = [ret for _, _, ret, _ in episodes]
    if not sps:
        sps = re.findall(r"SPS\W*(\d+)", output)  # "SPS 123", "SPS: 123"
        returns = re.findall(r"mean return (-?[\d.]+)", output)[-1:]
    if process.returncode or not sps:
        what = f"exit code {process.returncode} of {shlex.join(command)}"
        raise RuntimeError(f"{what}; its last lines:\n{output[-2000:]}")
    mean_return = np.mean([float(number) for number in returns[-100:] or [np.nan]])
    peak_mb = usage.ru_maxrss / 1024
    return Run(float(sps[-1]), late_sps(updates), seconds, peak_mb, mean_return)


def late_sps(updates: list[tuple]) -> float:
    """Steps per second in the second half, of (step, SPS so far) of each update."""
    seconds = {step: step / max(sps, 1) for step, sps in updates}
    end = max(seconds, default=0)
    half = min(seconds, key=lambda step: abs(step - end / 2), default=0)
    return (end - half) / (seconds[end] - seconds[half]) if half < end else np.nan


def in_turns(systems: dict[str, list[str]], rounds: int) -> dict[str, list[Run]]:
    """The runs of each command, A B C A B C ..., each in an empty folder; --seed is the round.
    Progress on stderr."""
    runs = {name: [] for name in systems}
    for k in range(rounds):
        for name, command in systems.items():
            with tempfile.TemporaryDirectory() as folder:
                run = train([*command, "--seed", str(k + 1)], folder)
            runs[name].append(run)
            said = f"round {k + 1}/{rounds}: {name}: {run.sps:.0f} SPS, {run.seconds:.0f} s"
            print(said, file=sys.stderr)
    return runs


def table_of(runs: dict[str, list[Run]], ours: str) -> list[str]:
    """Markdown rows with medians over the rounds, and the ratio of `ours` to each system (its range
    in brackets); the two runs of a round share the machine's mood."""
    lines = [
        "system|SPS (least to most)|ours / this|process, s|peak memory, MB|mean return".split("|")
    ]
    for name, column in runs.items():
        sps, _, seconds, peak_mb, returns = (np.array(values) for values in zip(*column))
        ratio = "" if name == ours else spread([run.sps for run in runs[ours]] / sps, ".2f")
        mean_return = "not logged" if np.isnan(returns).any() else f"{np.median(returns):.1f}"
        cells = [f"{np.median(seconds):.1f}", f"{np.median(peak_mb):,.0f}", mean_return]
        lines.append([name, spread(sps), ratio, *cells])
    return tables.markdown(lines).split("\n")
