"""What --double-buffer brings: one half of the environments steps while the policy serves the other half.

    python benchmark/speed/double_buffer.py --out benchmark/results/speed/double_buffer.md

Collection of ppo_graph.py alone (no update), in this process, in turns A B A B ..., on PoissonGraph whose steps cost a
given time. Environments wait (as for a simulator elsewhere, so that there can be more workers than cores) or keep a
core busy. The width of the network is chosen so that a worker's environments and the policy take about equally long.
Where L is the time of the workers for a step of all environments and p(n) that of the policy for n of them, collection
takes L + p(N) a step, with halves the larger of L + p(N / 2) and 2 p(N / 2): at best 1.5 times as fast, and less as p
has a part that does not depend on n.
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro
from common import ROOT, report
from tqdm import tqdm

sys.path[:0] = [str(ROOT / "cleanrl_graph"), str(Path(__file__).parent)]

import ppo_graph as script  # noqa: E402

# milliseconds of a step, does it wait, environments, width of the GNN, workers
CASES = [(0.1, True, 256, 64, 8), (1.0, True, 64, 192, 8), (5.0, True, 64, 256, 32),
         (0.1, False, 64, 64, 2), (1.0, False, 32, 384, 2), (5.0, False, 16, 768, 2)]


@dataclass
class Args:
    rounds: int = 9
    """rollouts of each kind"""
    num_steps: int = 32
    """steps of a rollout"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def build(args, double_buffer: bool, milliseconds: float, waits: bool, num_envs: int, gnn_dim: int, num_workers: int):
    """(environments, actor, flags) of one system."""
    flags = script.Args(
        env_id="slow_env:Slow-v0", env_kwargs={"milliseconds": milliseconds, "sleep": waits}, num_envs=num_envs,
        num_steps=args.num_steps, num_workers=num_workers, double_buffer=double_buffer, gnn_dim=gnn_dim, cuda=False)
    envs = script.make_envs([partial(script.make_env, flags.env_id, flags.env_kwargs)] * num_envs, flags)
    torch.manual_seed(0)
    agent = script.Agent(envs.leaves, envs.action_space, flags)
    actor = script.Actor(agent, envs.leaves, num_envs, flags, torch.device("cpu"), len(envs.last_steps))
    envs.reset(1)
    return envs, actor, flags


def measure(args, *case) -> str:
    """A row of the table."""
    systems = {halves: build(args, halves, *case) for halves in (False, True)}
    seconds, policy = {False: [], True: []}, []
    for _ in range(args.rounds + 1):
        for halves, (envs, actor, flags) in systems.items():
            script.section.on, script.section.seconds = True, {}
            start = time.perf_counter()
            script.collect(actor, envs, flags, lambda *episode: None)
            seconds[halves].append(time.perf_counter() - start)
            if not halves:
                policy.append(script.section.seconds["policy"])
    for envs, *_ in systems.values():
        envs.close()
    ms = {name: 1000 * np.array(column[1:]) / args.num_steps for name, column in
          {"all": seconds[False], "halves": seconds[True], "policy": policy}.items()}
    ratio = ms["all"] / ms["halves"]
    cost, waits, num_envs, _, num_workers = case
    medians = [np.median(column) for column in (ms["all"] - ms["policy"], ms["policy"], ms["all"], ms["halves"])]
    return (f"| {'waits' if waits else 'is busy'} {cost:g} ms | {num_envs} | {num_workers} | " +
            " | ".join(f"{value:.1f}" for value in medians) +
            f" | {np.median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f}) |")


def main(args):
    torch.set_num_threads(1)
    lines = ["# --double-buffer", "", f"Medians of {args.rounds} rollouts of {args.num_steps} steps each, milliseconds "
             "per step of all environments, 1 thread of torch in each process.", "",
             "| an environment | environments | workers | environments, ms | policy, ms | all at once, ms | "
             "in halves, ms | ratio (least to most) |", "| " + "--- | " * 8]
    lines += [measure(args, *case) for case in tqdm(CASES)]
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
