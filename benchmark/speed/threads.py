"""Threads of torch on the CPU (idle otherwise): policy step and update, alone and beside busy
processes.

    python benchmark/speed/threads.py --out benchmark/results/speed/tables.md#threads
    python benchmark/speed/threads.py --repeats 3  # does it run?

The threads of a parallel region wait for each other in a loop. Where one of them has no core, since
another process runs there, all wait until the system gives it one: a few milliseconds, in each of
hundreds of small regions. A busy process is an endless loop in Python. One call of the policy and
one gradient step are timed with various widths of the networks, in turns over the numbers of
threads, until --repeats or --seconds are over.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Iterator, Literal

import numpy as np
import torch
import tyro
from common import report, rollout, spread

from cleanrl_graph import ppo_graph

NETWORKS = {
    "small": dict(gnn_dim=16, hidden_dims=(64, 64)),
    "default": {},
    "large": dict(gnn_dim=256, hidden_dims=(1024, 1024)),
}


@dataclass
class Args:
    threads: tuple[int, ...] = tuple(sorted({1, 2, os.cpu_count()}))
    """numbers of threads"""
    busy: tuple[int, ...] = (0, 1)
    """numbers of busy processes beside"""
    num_envs: int = 64
    """environments: observations of a policy step, and an eighth of those of a minibatch"""
    repeats: int = 15
    """timed calls of each kind"""
    seconds: float = 20.0
    """a kind of call that has taken longer altogether is not repeated"""
    networks: tuple[Literal["small", "default", "large"], ...] = ("small", "default", "large")
    """widths of the networks"""
    remark: str = ""
    """what else ran on the machine, for the table"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


@contextlib.contextmanager
def busy_processes(num: int) -> Iterator[None]:
    """So many endless loops beside what is done within."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def work_of(network: str, num_envs: int) -> dict:
    """Name -> function: a policy step and a gradient step of ppo_graph.py on JobShop-v0."""
    args = ppo_graph.Args(
        env_id="cleanrl_graph.envs:JobShop-v0",
        env_kwargs={"jobs": [3, 10], "machines": [3, 10]},
        num_envs=num_envs,
        **NETWORKS[network],
    )
    (agent,), memory, step = rollout(ppo_graph, args, 8)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-9, fused=True)
    other = ppo_graph.Memory(agent, memory.storage.leaves, num_envs, args)
    rng = np.random.default_rng(1)

    def policy_step():
        other.begin()
        other.act(step)

    def gradient_step():
        ((_, inputs),) = memory.minibatches(rng, 1)
        _, log_prob, entropy, value = agent(*inputs)
        optimizer.zero_grad()
        (log_prob.mean() + entropy.mean() + value.square().mean()).backward()
        optimizer.step()

    return {"policy step": policy_step, "gradient step": gradient_step}


def steps(args: Args) -> list[str]:
    """Markdown: milliseconds of each kind of step, medians over the repeats."""
    lines = [
        f"## A policy step of {args.num_envs} observations, a gradient step of "
        f"{8 * args.num_envs}, ms",
        "",
        "| networks | step | busy processes | "
        f"{' | '.join(f'threads: {num}' for num in args.threads)} |",
        "| --- | --- | --- |" + " --- |" * len(args.threads),
    ]
    for network in args.networks:
        for (name, function), busy in itertools.product(
            work_of(network, args.num_envs).items(), args.busy
        ):
            times = {num: [] for num in args.threads}
            with busy_processes(busy):
                for _, num in itertools.product(range(args.repeats), args.threads):
                    if sum(times[num]) > 1e3 * args.seconds:
                        continue
                    torch.set_num_threads(num)
                    function()  # the first call after a change makes the threads
                    start = time.perf_counter()
                    function()
                    times[num].append(1e3 * (time.perf_counter() - start))
            cells = [spread(row, ".1f") for row in times.values()]
            lines.append(f"| {network} | {name} | {busy} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr)
    return [
        *lines,
        "",
        f"Medians (least to most) of {args.repeats} calls, or of those in {args.seconds:g} s; "
        f"{NETWORKS}.",
    ]


def main(args: Args) -> None:
    lines = ["# Threads of torch", "", *([f"Beside: {args.remark}", ""] if args.remark else [])]
    report("\n".join(lines + steps(args)), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
