"""Where the time of a training goes: environments, networks, and everything else.

    python benchmark/speed/breakdown.py --out benchmark/results/speed/breakdown.md
    python benchmark/speed/breakdown.py --tasks cartpole --cartpole-timesteps 20000

Runs ppo_graph.py in this process on the CPU, first as it is (also the warm-up), then with timers around its functions.
A section's time is its own, without the timed functions that it calls. Every timer costs time, part of it inside the
section and part inside its caller; both are measured on an empty function before the run and subtracted, and the line
below a table says how much that was, beside the wall time of the run without timers.
"""

import functools
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

sys.path.insert(0, str(Path(__file__).parents[2] / "cleanrl_graph"))

import ppo_graph  # noqa: E402

TASKS = {
    "poisson": dict(env_id="envs:PoissonGraph-v0", num_envs=8, gnn_layers=2, gnn_dim=64, hidden_dims=(64, 64)),
    "jobshop": dict(env_id="envs:JobShop-v0", num_envs=64, gamma=1.0,
                    env_kwargs={"jobs": [3, 10], "machines": [3, 10]}),
    "cartpole": dict(env_id="CartPole-v1", num_envs=4, hidden_dims=(64, 64)),
}
ROOTS = [(ppo_graph, "collect", "rest of collect"), (ppo_graph, "update", "rest of update"),
         (ppo_graph.Storage, "stats", "logging"), (ppo_graph.Logger, "update", "logging")]
TIMED = [
    (ppo_graph.Agent, "forward", "forward"), (ppo_graph.Agent, "value", "policy forward"),
    (ppo_graph, "ppo_loss", "loss"), (torch.Tensor, "backward", "backward"),
    (torch.optim.Optimizer, "zero_grad", "optimizer, clipping"), (torch.optim.Adam, "step", "optimizer, clipping"),
    (torch.nn.utils, "clip_grad_norm_", "optimizer, clipping"),
    (ppo_graph.Envs, "step", "rest of Envs.step"), (ppo_graph.Envs, "flatten", "Envs.flatten"),
    (ppo_graph.Envs, "check", "Envs.check"),
    (ppo_graph.Envs, "finish", "rest of Envs.step"), (ppo_graph, "collate", "collate"),
    (ppo_graph.Storage, "append", "Storage.append"), (ppo_graph.Storage, "latest", "Storage.latest"),
    (ppo_graph.Storage, "gather", "Storage.gather"), (ppo_graph.Storage, "assemble", "Storage.assemble"),
    (ppo_graph, "to_env_actions", "to_env_actions"), (ppo_graph, "gae", "gae"),
    (ppo_graph.Logger, "episode", "logging"),
]
NETWORKS_AND_ENVS = ["environments", "policy forward", "update forward", "loss", "backward", "optimizer, clipping"]


@dataclass
class Args:
    tasks: tuple[str, ...] = tuple(TASKS)
    """which of poisson, jobshop and cartpole to run"""
    poisson_timesteps: int = 30_720
    """steps of each of the two trainings on PoissonGraph-v0, 8 envs x 128"""
    jobshop_timesteps: int = 24_576
    """the same on JobShop-v0, 64 envs x 128, 3 to 10 jobs and machines"""
    cartpole_timesteps: int = 102_400
    """the same on CartPole-v1, 4 envs x 128"""
    num_threads: int = 1
    """threads of torch"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


class Clock:
    """Seconds, calls and timed calls below, by section; `begin` and `end` of the wall time, from first to last root."""

    def __init__(self):
        self.stack = []  # of open sections: [name, seconds of the timed calls below, number of these]
        self.seconds, self.calls, self.calls_below = Counter(), Counter(), Counter()
        self.begin = self.end = None
        self.inside = self.outside = 0.0  # seconds that a timer adds to its section and to the caller

    def wrap(self, section: str, function: Callable, is_root: bool = False) -> Callable:
        """`function`, timed; outside of the roots it is not."""

        @functools.wraps(function)
        def timed(*args, **kwargs):
            if not (self.stack or is_root):
                return function(*args, **kwargs)
            name = section
            if name == "forward":
                name = "update forward" if self.stack[-1][0] == "loss" else "policy forward"
            self.stack.append(frame := [name, 0.0, 0])
            start = time.perf_counter()
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
                    self.begin, self.end = self.begin or start, end

        return timed

    def calibrate(self, num: int = 100_000) -> None:
        """Measures `inside` and `outside` on an empty function."""
        probe = Clock()
        empty, seconds = lambda: None, []
        for function in empty, probe.wrap("timed", empty):
            start = time.perf_counter()
            probe.wrap("loop", lambda: [function() for _ in range(num)], is_root=True)()
            seconds.append(time.perf_counter() - start)
        self.inside = (probe.seconds["timed"] - seconds[0]) / num
        self.outside = (seconds[1] - seconds[0]) / num - self.inside

    def corrected(self, section: str) -> float:
        """Seconds of the section without those of the timers."""
        return self.seconds[section] - self.inside * self.calls[section] - self.outside * self.calls_below[section]


def run(task: dict, clock: Clock, timed: list, run_dir: str) -> None:
    """One training of ppo_graph.py; the functions in `timed` report to the clock."""

    def make_env(*args):
        env = make(*args)
        env.step, env.reset = clock.wrap("environments", env.step), clock.wrap("environments", env.reset)
        return env

    make = ppo_graph.make_env
    with ExitStack() as patches, redirect_stdout(sys.stderr):
        for owner, name, section in ROOTS + timed:
            wrapped = clock.wrap(section, getattr(owner, name), is_root=(owner, name, section) in ROOTS)
            patches.enter_context(patch.object(owner, name, wrapped))
        if timed:
            patches.enter_context(patch.object(ppo_graph, "make_env", make_env))
        ppo_graph.main(ppo_graph.Args(**task, cuda=False, eval_episodes=0, run_dir=run_dir))


def breakdown(name: str, task: dict) -> list[str]:
    """Markdown: one table of the training loop's seconds by section."""
    plain, clock = Clock(), Clock()
    with tempfile.TemporaryDirectory() as run_dir:
        run(task, plain, [], run_dir)
        clock.calibrate()
        run(task, clock, TIMED, run_dir)
    overhead = (clock.inside + clock.outside) * sum(clock.calls.values())
    wall = clock.end - clock.begin - overhead
    seconds = {section: clock.corrected(section) for section in clock.seconds}
    seconds["rest of main"] = wall - sum(seconds.values())
    others = sorted(set(seconds) - set(NETWORKS_AND_ENVS), key=seconds.get, reverse=True)

    lines = [f"## {name}: {', '.join(f'{key} {value}' for key, value in task.items())}", "",
             "| section | calls | us per call | seconds | share |", "| --- | --- | --- | --- | --- |"]
    for section in [*NETWORKS_AND_ENVS, "**everything else**", *others]:
        own = seconds.get(section, sum(map(seconds.get, others)))
        calls = clock.calls[section]
        us = f"{own / calls * 1e6:,.1f}" if calls else ""
        lines.append(f"| {section} | {f'{calls:,}' if calls else ''} | {us} | {own:.2f} | {own / wall:.1%} |")
    plain_wall = plain.end - plain.begin
    num_steps = task["total_timesteps"] // (task["num_envs"] * 128) * task["num_envs"] * 128
    lines += ["", f"Training loop: {num_steps:,} steps in {wall:.2f} s after subtracting {overhead:.2f} s of timers "
                  f"({sum(clock.calls.values()):,} calls of {1e6 * (clock.inside + clock.outside):.2f} us); without "
                  f"timers {plain_wall:.2f} s, {num_steps / plain_wall:,.0f} steps per second.", ""]
    return lines


def main(args):
    torch.set_num_threads(args.num_threads)
    lines = ["# Where the time of a training goes", "",
             f"One training each, {args.num_threads} thread(s). The rows below \"everything else\" add up to it.", ""]
    for name in args.tasks:
        lines += breakdown(name, TASKS[name] | {"total_timesteps": getattr(args, f"{name}_timesteps")})
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
