"""What --compile brings: a step of the policy and a minibatch (forward and backward), eager and compiled.

    python benchmark/speed/compile.py --out benchmark/results/speed/compile.md

ppo_graph.py in this process, in turns A B A B ..., on the same observations. Each size of a batch is compiled
anew, so batches are filled up to few sizes (spare rows); the seconds of compilation are those of the first calls.
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Callable, Literal

import numpy as np
import torch
import tyro
from common import ROOT, report
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "cleanrl_graph"))

import ppo_graph as script  # noqa: E402

CASES = {"CartPole-v1, 8 envs": dict(env_id="CartPole-v1", num_envs=8, num_steps=128),
         "PoissonGraph-v0, 64 envs": dict(env_id="envs:PoissonGraph-v0", num_envs=64, num_steps=32)}


@dataclass
class Args:
    modes: tuple[Literal["default", "reduce-overhead"], ...] = ("default",)
    """modes of torch.compile"""
    repeats: int = 15
    """turns of each measurement"""
    cuda: bool = False
    """if toggled, use CUDA"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def build(flags, mode: str):
    """(agent, its compiled networks, one rollout, actor) with the weights and the observations of seed 0."""
    envs = script.make_envs([partial(script.make_env, flags.env_id, flags.env_kwargs)] * flags.num_envs, flags)
    device = torch.device("cuda" if flags.cuda else "cpu")
    torch.manual_seed(0)
    agent = script.Agent(envs.leaves, envs.action_space, flags).to(device)
    actor = script.Actor(agent, envs.leaves, flags.num_envs, flags, device)
    envs.reset(1)
    rollout = script.collect(actor, envs, flags, lambda *episode: None)
    envs.close()
    return agent, script.compile_networks(agent, mode), rollout, actor


def timed(function: Callable, device: str) -> tuple[float, torch.Tensor]:
    """Milliseconds of a call, and what it returns."""
    start = time.perf_counter()
    result = function()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start), result


def measure(args, name: str) -> list[str]:
    """Rows of the table."""
    flags = script.Args(**CASES[name], cuda=args.cuda)
    flags.batch_size, device = flags.num_envs * flags.num_steps, "cuda" if args.cuda else "cpu"
    systems, policy, minibatch, first = {mode: build(flags, mode) for mode in ("no", *args.modes)}, {}, {}, {}
    for mode, (agent, _, rollout, actor) in systems.items():
        (inputs, batch), *_ = actor.minibatches(rollout, np.random.default_rng(0), flags)

        def act(agent=agent, actor=actor):
            with torch.no_grad():
                return agent(actor.storage.latest(), greedy=True)[3]

        def learn(agent=agent, inputs=inputs, batch=batch):
            agent.zero_grad()
            loss, _ = script.ppo_loss(agent, inputs, batch, flags)
            loss.backward()
            return torch.cat([p.grad.flatten() for p in agent.parameters() if p.grad is not None])

        policy[mode], minibatch[mode] = act, learn
        first[mode] = [timed(function, device) for function in (act, learn)]
    ms = {(mode, part): [] for mode in systems for part in (0, 1)}
    for _ in range(args.repeats):
        for mode in systems:
            for part, function in enumerate((policy[mode], minibatch[mode])):
                ms[mode, part].append(timed(function, device)[0])
    lines = []
    for mode, (_, compiled, *_) in systems.items():
        medians = [np.median(ms[mode, part]) for part in (0, 1)]
        ratios = [np.median(np.array(ms["no", part]) / ms[mode, part]) for part in (0, 1)]
        differences = [float((a[1] - b[1]).abs().max() / b[1].abs().max()) for a, b in zip(first[mode], first["no"])]
        spare = 1 - sum(n.valid for n in compiled) / max(sum(n.filled for n in compiled), 1)
        seconds = sum(value for value, _ in first[mode]) / 1000
        extra = f"{sum(len(n.shapes) for n in compiled)} | {spare:.1%} | {seconds:.0f} | {max(differences):.0e}"
        lines.append(f"| {name} | {'eager' if mode == 'no' else mode} | {medians[0]:.2f} | {medians[1]:.1f} | " + (
            " | " * 5 + "|" if mode == "no" else f"{ratios[0]:.2f} | {ratios[1]:.2f} | {extra} |"))
    return lines


def main(args):
    torch.set_num_threads(1)
    lines = ["# --compile", "", f"Medians of {args.repeats} turns, 1 thread of torch. The difference is that of the "
             "values and of the gradients, relative to the largest.", "",
             "| task | mode | policy step, ms | minibatch, ms | eager / this, policy | eager / this, minibatch | "
             "compilations | spare rows | compilation, s | largest difference |", "| " + "--- | " * 10]
    for name in tqdm(CASES):
        lines += measure(args, name)
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
