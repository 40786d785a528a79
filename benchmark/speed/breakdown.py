"""Where the time of a training goes: environments, networks, and everything else.

    python benchmark/speed/breakdown.py --out benchmark/results/speed/breakdown.md
    python benchmark/speed/breakdown.py --tasks cartpole --scale 0.2

Runs a script in this process on the CPU, first as it is (also the warm-up), then with timers around
its functions. A section's time is its own, without the timed functions that it calls. Every timer
costs time, part of it inside the section and part inside its caller; both are measured on an empty
function before the run and subtracted, and the line below a table says how much that was, beside
the wall time of the run without timers.
"""

import functools
import importlib
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Callable
from unittest.mock import patch

import torch
import tyro
from common import report
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))
from cleanrl_graph import services  # noqa: E402
from cleanrl_graph.services import check, runs  # noqa: E402

CARTPOLE = dict(env_id="envs:StatelessCartPole-v1", num_envs=16, num_minibatches=4, update_epochs=4)
TASKS = {  # name: (script, steps of each of the two trainings, flags)
    "poisson": ("ppo_graph", 65_536, dict(env_id="envs:PoissonGraph-v0", num_envs=64)),
    "poisson_16": ("ppo_graph", 32_768, dict(env_id="envs:PoissonGraph-v0", num_envs=16)),
    "jobshop": (
        "ppo_graph",
        24_576,
        dict(
            env_id="envs:JobShop-v0",
            num_envs=64,
            gamma=1.0,
            env_kwargs={"jobs": [3, 10], "machines": [3, 10]},
        ),
    ),
    "cartpole": (
        "ppo_graph",
        102_400,
        dict(env_id="CartPole-v1", num_envs=4, hidden_dims=(64, 64)),
    ),
    "framestack": ("ppo_framestack", 40_960, CARTPOLE),
    "lstm": ("ppo_lstm_sparse", 40_960, CARTPOLE),
    "lstm_nodes": (
        "ppo_lstm_sparse",
        24_576,
        dict(
            env_id="envs:GraphExplore-v0",
            num_envs=16,
            num_steps=64,
            update_epochs=4,
            prev_action=False,
        ),
    ),
    "gtrxl": ("ppo_gtrxl", 20_480, CARTPOLE | dict(memory_length=50, prev_action=False)),
}
NETWORKS_AND_ENVS = [
    "environments",
    "policy forward",
    "update forward",
    "loss",
    "backward",
    "optimizer, clipping",
]


def timed_in(script) -> list[tuple]:
    """(owner, name of the function, section). The first call of Storage.append begins the training
    loop; the loss is what lies between the end of the networks' forward pass and zero_grad."""
    timed = [
        (script.Storage, "append", "Storage.append"),
        (script.Storage, "gather", "Storage.gather"),
        (script.Storage, "batch", "Storage.batch"),
        (script.Storage, "whole", "Storage.whole"),
        (runs, "sizes", "logging"),
        (runs.Services, "log", "logging"),
        (script.SummaryWriter, "add_scalar", "logging"),
        (script.tqdm, "set_postfix", "logging"),
        (script.tqdm, "update", "logging"),
        (script, "join", "join"),
        *((script.Agent, name, "forward") for name in ("encode", "embed", "forward", "value")),
        (torch.optim.Optimizer, "zero_grad", "optimizer, clipping"),
        (torch.Tensor, "backward", "backward"),
        (torch.optim.Adam, "step", "optimizer, clipping"),
        (torch.nn.utils, "clip_grad_norm_", "optimizer, clipping"),
        (script.Envs, "step", "rest of Envs.step"),
        (script.Envs, "read", "Envs.read"),
        (script.Envs, "collate", "Envs.collate"),
        *((check, name, "checks") for name in ("guarded", "wrong_form", "wrong_values")),
        (check, "wrong_outcome", "checks"),
        (script.ActionHead, "env_actions", "env_actions"),
    ]
    for name, value in vars(script.Memory).items():
        if callable(value) and not name.startswith("_"):
            timed.append((script.Memory, name, "memory"))
    return [entry for entry in timed if hasattr(*entry[:2])]


@dataclass
class Args:
    tasks: tuple[str, ...] = tuple(TASKS)
    """which of TASKS to run"""
    scale: float = 1.0
    """factor of the steps of each training"""
    num_threads: int = 1
    """threads of torch"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


class Clock:
    """Seconds, calls and timed calls below, by section; `begin` and `end` of the wall time, from
    the first call of the function that is the root to the end of the last timed one."""

    def __init__(self):
        # of open sections: [name, seconds of the timed calls below, number of these]
        self.stack = []
        self.seconds, self.calls, self.calls_below = Counter(), Counter(), Counter()
        self.begin = self.end = None
        self.inside = self.outside = (
            0.0  # seconds that a timer adds to its section and to the caller
        )

    def wrap(
        self, section: str, function: Callable, is_root: bool = False, gap: str = ""
    ) -> Callable:
        """`function`, timed; not before the first call of the root. The time since the last timed
        call is a section of its own, if `gap` is its name."""

        @functools.wraps(function)
        def timed(*args, **kwargs):
            if self.begin is None and not is_root:
                return function(*args, **kwargs)
            name = section
            if name == "forward":
                name = "update forward" if torch.is_grad_enabled() else "policy forward"
            self.stack.append(frame := [name, 0.0, 0])
            start = time.perf_counter()
            self.begin = self.begin or start
            if gap:
                self.seconds[gap] += start - self.end
                self.calls[gap] += 1
            try:
                return function(*args, **kwargs)
            finally:
                end = time.perf_counter()
                self.stack.pop()
                self.seconds[name] += end - start - frame[1]
                self.calls[name] += 1
                self.calls_below[name] += frame[2]
                if self.stack:
                    self.stack[-1][1] += end - start
                    self.stack[-1][2] += 1
                else:
                    self.end = end

        return timed

    def calibrate(self, num: int = 100_000) -> None:
        """Measures `inside` and `outside` on an empty function."""
        probe = Clock()
        empty, seconds = lambda: None, []
        probe.wrap("first", empty, is_root=True)()
        for function in empty, probe.wrap("timed", empty):
            start = time.perf_counter()
            probe.wrap("loop", lambda: [function() for _ in range(num)])()
            seconds.append(time.perf_counter() - start)
        self.inside = (probe.seconds["timed"] - seconds[0]) / num
        self.outside = (seconds[1] - seconds[0]) / num - self.inside

    def corrected(self, section: str) -> float:
        """Seconds of the section without those of the timers."""
        return (
            self.seconds[section]
            - self.inside * self.calls[section]
            - self.outside * self.calls_below[section]
        )


def run(script, task: dict, clock: Clock, timed: list, run_dir: str) -> None:
    """One training; the functions in `timed` report to the clock."""

    def make_env(*args, **kwargs):
        env = make(*args, **kwargs)
        own = env.env  # without what notes return and length
        own.step = clock.wrap("environments", own.step)
        own.reset = clock.wrap("environments", own.reset)
        return env

    make = script.make_env
    with ExitStack() as patches, redirect_stdout(sys.stderr):
        for owner, name, section in timed:
            wrapped = clock.wrap(
                section,
                getattr(owner, name),
                is_root=(owner, name) == (script.Storage, "append"),
                gap="loss" if name == "zero_grad" else "",
            )
            patches.enter_context(patch.object(owner, name, wrapped))
        if len(timed) > 2:
            patches.enter_context(patch.object(script, "make_env", make_env))
        flags = script.Args(**task, cuda=False, eval_episodes=0, run_dir=run_dir)
        services.run(script, flags, checkpoint_every=0)


def breakdown(name: str, scale: float) -> tuple[list[str], str]:
    """Markdown: one table of the training loop's seconds by section, and a row for the table of all
    tasks."""
    plain, clock = Clock(), Clock()
    script_name, num_steps, flags = TASKS[name]
    task = {"num_steps": 128} | flags
    task["total_timesteps"] = max(int(num_steps * scale), task["num_envs"] * task["num_steps"])
    script = importlib.import_module(f"cleanrl_graph.{script_name}")
    with tempfile.TemporaryDirectory() as run_dir:
        run(
            script,
            task,
            plain,
            [(script.Storage, "append", "first"), (script.tqdm, "update", "last")],
            run_dir,
        )
        clock.calibrate()
        run(script, task, clock, timed_in(script), run_dir)
    overhead = (clock.inside + clock.outside) * sum(clock.calls.values())
    wall = clock.end - clock.begin - overhead
    seconds = {section: clock.corrected(section) for section in clock.seconds}
    seconds["rest of the loop"] = wall - sum(seconds.values())
    others = sorted(set(seconds) - set(NETWORKS_AND_ENVS), key=seconds.get, reverse=True)

    flags = ", ".join(f"{key} {value}" for key, value in task.items())
    lines = [
        f"## {name}: {script_name}.py, {flags}",
        "",
        "| section | calls | us per call | seconds | share |",
        "| --- | --- | --- | --- | --- |",
    ]
    for section in [*NETWORKS_AND_ENVS, "**everything else**", *others]:
        own = seconds.get(section, sum(map(seconds.get, others)))
        calls = clock.calls[section]
        us = f"{own / calls * 1e6:,.1f}" if calls else ""
        lines.append(
            f"| {section} | {f'{calls:,}' if calls else ''} | {us} | {own:.2f} | {own / wall:.1%} |"
        )
    plain_wall = plain.end - plain.begin
    rollout = task["num_envs"] * task["num_steps"]
    num_steps = task["total_timesteps"] // rollout * rollout
    lines += [
        "",
        f"Training loop: {num_steps:,} steps in {wall:.2f} s after subtracting {overhead:.2f} s of "
        f"timers ({sum(clock.calls.values()):,} calls of "
        f"{1e6 * (clock.inside + clock.outside):.2f} us); without timers {plain_wall:.2f} s, "
        f"{num_steps / plain_wall:,.0f} steps per second.",
        "",
    ]
    inside = 1 - sum(map(seconds.get, others)) / wall
    return lines, f"| {name} | {script_name}.py | {task['env_id']} | {inside:.1%} |"


def main(args):
    torch.set_num_threads(args.num_threads)
    lines = [
        "# Where the time of a training goes",
        "",
        f'One training each, {args.num_threads} thread(s). The rows below "everything else" add up '
        "to it.",
        "",
    ]
    rows = [
        "| task | script | environment | environments, networks, loss, optimizer |",
        "| --- | --- | --- | --- |",
    ]
    for name in tqdm(args.tasks, unit="task"):
        more, row = breakdown(name, args.scale)
        lines, rows = lines + more, [*rows, row]
    lines[4:4] = [*rows, ""]
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
