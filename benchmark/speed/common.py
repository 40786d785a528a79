"""Shared by the scripts of this folder: the report with command and machine, and whole training
runs as processes."""

import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).parents[1]))
from tables import cpu_name, put  # noqa: E402

ROOT = Path(__file__).parents[2]
PPO_GRAPH = str(ROOT / "cleanrl_graph" / "ppo_graph.py")


def report(markdown: str, out: str | None) -> None:
    """Prints the markdown; puts it into `out` (FILE, or FILE#SECTION), if given, below the command
    line (absolute paths: their names only), the machine and the commit."""
    print(markdown)
    if out:
        flags = [os.path.basename(flag) if os.path.isabs(flag) else flag for flag in sys.argv[1:]]
        command = f"python {os.path.relpath(sys.argv[0])} {shlex.join(flags)}"
        machine = (
            f"{cpu_name()}, {os.cpu_count()} CPUs, {platform.system()}, Python "
            f"{platform.python_version()}, torch {torch.__version__}, commit {commit_of(ROOT)}"
        )
        put(out, f"    {command}\n\n{machine}\n\n{markdown}\n")


def beside(out: str, ending: str) -> Path:
    """The path of another file of FILE#SECTION: SECTION and the ending."""
    name, _, section = out.partition("#")
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name((section or path.stem) + ending)


def commit_of(checkout: str | Path) -> str:
    """The short name of its commit, with "-dirty" if its scripts were changed since; "unknown"
    without git."""
    git = ["git", "-C", str(checkout)]
    try:
        name, changes = (
            subprocess.run([*git, *rest], capture_output=True, text=True, check=True).stdout.strip()
            for rest in (("rev-parse", "--short", "HEAD"), ("status", "-s", "--", "cleanrl_graph"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + "-dirty" * bool(changes)


class Run(NamedTuple):
    """One training run as a process of its own."""

    sps: float  # environment steps per second of the training, as the script itself has it last
    seconds: float  # of the whole process, imports included
    peak_mb: float  # largest resident memory
    mean_return: float  # of the last 100 episodes; NaN if the script has none
    cpu: float  # seconds of the CPU, of the process and its children, imports included


def train(command: list[str], num_threads: int, cwd: str) -> Run:
    """Runs the command to its end with `num_threads` threads of torch. RuntimeError if it fails or
    neither logs SPS below `cwd`/runs nor prints it."""
    env = os.environ | {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
    with tempfile.TemporaryFile("w+") as file:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=cwd)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        file.seek(0)
        output = file.read()
    sps, returns = logged(Path(cwd, "runs"))
    if not sps:
        sps = re.findall(r"SPS\W*(\d+)", output)  # "SPS 123", "SPS: 123"
        returns = re.findall(r"mean return (-?[\d.]+)", output)[-1:]
        returns = returns or re.findall(r"episodic_return=\[?(-?[\d.]+)", output)
    if process.returncode or not sps:
        raise RuntimeError(
            f"exit code {process.returncode} of {shlex.join(command)}; its last lines:\n"
            f"{output[-2000:]}"
        )
    return Run(
        float(sps[-1]),
        seconds,
        usage.ru_maxrss / 1024,
        np.mean([float(number) for number in returns[-100:] or [np.nan]]),
        usage.ru_utime + usage.ru_stime,
    )


def logged(run_dir: Path) -> tuple[list[float], list[float]]:
    """SPS of each update and return of each episode in the log of the only run in a folder."""
    found = {"charts/SPS": [], "charts/episodic_return": []}
    for path in run_dir.glob("*/events*"):
        log = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for tag in found.keys() & set(log.Tags()["scalars"]):
            found[tag] += [event.value for event in log.Scalars(tag)]
    return found["charts/SPS"], found["charts/episodic_return"]


def in_turns(systems: dict[str, list[str]], rounds: int, num_threads: int) -> dict[str, list[Run]]:
    """The runs of each command, A B C A B C ..., each in an empty folder; --seed is the round.
    Progress on stderr."""
    runs = {name: [] for name in systems}
    for k in range(rounds):
        for name, command in systems.items():
            with tempfile.TemporaryDirectory() as folder:
                runs[name].append(
                    run := train([*command, "--seed", str(k + 1)], num_threads, folder)
                )
            print(
                f"round {k + 1}/{rounds}: {name}: {run.sps:.0f} SPS, {run.seconds:.0f} s",
                file=sys.stderr,
            )
    return runs


def ratios(ours: list[Run], theirs: list[Run]) -> np.ndarray:
    """SPS of ours / theirs, one per round: the two runs of a round share the machine's mood."""
    return np.array([a.sps / b.sps for a, b in zip(ours, theirs)])


def table_of(runs: dict[str, list[Run]], ours: str) -> list[str]:
    """Markdown rows with medians over the rounds, and the ratio of `ours` to each system (its range
    in brackets)."""
    lines = [
        "| system | SPS (least to most) | ours / this "
        "| process, s | peak memory, MB | mean return |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, column in runs.items():
        sps, seconds, peak_mb, returns, _ = (np.array(values) for values in zip(*column))
        ratio = ratios(runs[ours], column)
        ratio = (
            ""
            if name == ours
            else f"{np.median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f})"
        )
        mean_return = "not logged" if np.isnan(returns).any() else f"{np.median(returns):.1f}"
        lines.append(
            f"| {name} | {np.median(sps):,.0f} ({sps.min():,.0f} to {sps.max():,.0f}) | {ratio} | "
            f"{np.median(seconds):.1f} | {np.median(peak_mb):,.0f} | {mean_return} |"
        )
    return lines
