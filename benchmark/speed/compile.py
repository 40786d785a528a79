"""What compiling brings: ppo_graph_compile.py beside ppo_graph.py.

    python benchmark/speed/compile.py --out benchmark/results/speed/tables.md#compile
    python benchmark/speed/compile.py --repeats 2 --rounds 1 --scale 0.05          # does it run?

1. In this process, in turns A B A B ..., with the same weights and observations: a step of the
   policy (from the environments' arrays to actions) and a minibatch (gathered, loss, gradients,
   clipped, Adam). Each turn has other observations, so sizes differ. Compilation takes the seconds
   of the CPU, of this process and of g++, that the first calls take with an empty cache; the first
   task also pays for precompiled headers.
2. Whole trainings as processes, in turns, which find what part 1 has compiled: steps per second
   over all of the run, and over its second half.
"""

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import tyro
from common import ROOT, in_turns, report
from tqdm import tqdm

from cleanrl_graph import ppo_graph, ppo_graph_compile
from cleanrl_graph.services.process import accelerate

CASES = {
    "CartPole-v1": dict(num_envs=8, num_steps=128, total_timesteps=61_440),
    "PoissonGraph-v0": dict(num_envs=64, num_steps=32, total_timesteps=32_768, gnn_layers=2),
    "JobShop-v0": dict(num_envs=64, num_steps=64, total_timesteps=16_384, gamma=1.0)
    | dict(num_minibatches=8, update_epochs=3, env_kwargs={"jobs": [3, 10], "machines": [3, 10]}),
}
for name, case in CASES.items():
    case["env_id"] = name if name == "CartPole-v1" else f"cleanrl_graph.envs:{name}"
EAGER, COMPILED = "ppo_graph.py", "ppo_graph_compile.py"


@dataclass
class Args:
    cases: tuple[str, ...] = tuple(CASES)
    """tasks"""
    repeats: int = 40
    """turns of part 1"""
    rounds: int = 2
    """runs of each script in part 2; --seed is the round; 0 leaves it out"""
    scale: float = 1.0
    """factor of the steps of each run in part 2, which has at least two rollouts"""
    mode: str = "auto"
    """--compile-mode"""
    note: str = ""
    """a sentence on the machine for the report, such as what else ran"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


class System:
    """The networks of seed 0 with one rollout, as the training loop of a script has them."""

    def __init__(self, args, case: dict, script, mode: str):
        self.args = ppo_graph_compile.Args(**case, cuda=False, compile_mode=mode)
        torch.manual_seed(0)
        N = self.args.num_envs
        makers = [partial(script.make_env, self.args, i) for i in range(N)]
        envs = script.Envs(makers)
        self.agent = script.Agent(envs.leaves, envs.action_space, self.args)
        accelerate(self.agent)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=1e-6, eps=1e-5, fused=True)
        self.memory = script.Memory(self.agent, envs.leaves, N, self.args)
        self.acting = script.Memory(self.agent, envs.leaves, N, self.args)
        self.loss_of = partial(ppo_graph_compile.ppo_loss, self.agent, self.args)
        if script is ppo_graph_compile:
            self.acting.compile(self.args)
            self.loss_of = script.compiled(self.loss_of, self.args, self.memory.storage)
        self.steps = [envs.reset(1)]
        self.memory.begin()
        for _ in range(self.args.num_steps):
            action, _, _ = self.memory.act(self.steps[-1])
            actions = self.agent.head.env_actions(action, self.steps[-1].obs.counts)
            self.steps.append(envs.step(actions))
        envs.close()
        self.rollout = torch.randn(N * self.args.num_steps, 4)
        self.scales = torch.tensor([0.0, 0.5])
        self.minibatches = self.epochs()

    def epochs(self) -> Iterator[tuple[np.ndarray, tuple]]:
        """Minibatches without end."""
        for k in itertools.count():
            rng = np.random.default_rng(k)
            yield from self.memory.minibatches(rng, self.args.num_minibatches)

    def act(self, k: int) -> None:
        """Acts on the observations after k steps."""
        self.acting.begin()
        self.acting.act(self.steps[k % len(self.steps)])

    def learn(self, k: int) -> None:
        """Learns from the next minibatch."""
        idx, inputs = next(self.minibatches)
        mb = torch.as_tensor(idx)
        loss, _ = self.loss_of(*inputs, self.rollout[mb], self.scales)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.agent.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sizes(self) -> tuple[int, float]:
        """(sizes of batches, share of spare rows)"""
        storages = [self.memory.storage, self.acting.storage]
        rows, spare = sum(storage.totals for storage in storages)
        return len(set().union(*(storage.sizes for storage in storages))), spare / max(rows, 1)


def timed(function, k: int) -> float:
    """Milliseconds of function(k)."""
    start = time.perf_counter()
    function(k)
    return 1000 * (time.perf_counter() - start)


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    return sum(os.times()[:4])


def parts(args, name: str) -> str:
    """The row of part 1."""
    torch._dynamo.reset()
    compilations = torch._dynamo.utils.counters["stats"]
    before = compilations["unique_graphs"]
    kinds = ((ppo_graph, "none"), (ppo_graph_compile, args.mode))
    systems = [System(args, CASES[name], *kind) for kind in kinds]
    cells, seconds = [], []
    for part, digits in (("act", 2), ("learn", 1)):
        getattr(systems[0], part)(0)
        start = cpu_seconds()
        getattr(systems[1], part)(0)
        seconds.append(f"{cpu_seconds() - start:.0f}")
        ms = []
        for k in range(1, args.repeats + 1):
            ms.append([timed(getattr(system, part), k) for system in systems])
        eager, compiled = np.array(ms).T
        low, ratio, high = np.quantile(eager / compiled, [0.25, 0.5, 0.75])
        cells += [f"{np.median(column):.{digits}f}" for column in (eager, compiled)]
        cells.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
    num_sizes, spare = systems[1].sizes()
    count = compilations["unique_graphs"] - before
    more = " + ".join(seconds), str(count), str(num_sizes), f"{spare:.1%}"
    return "| " + " | ".join([name, *cells, *more]) + " |"


def trainings(args, name: str) -> list[str]:
    """The rows of part 2."""
    case = dict(CASES[name])
    least = 2 * case["num_envs"] * case["num_steps"]
    case["total_timesteps"] = max(int(case["total_timesteps"] * args.scale), least)
    flags = "--eval-episodes 0 --checkpoint-every 0 --no-cuda".split()
    for key, value in case.items():
        flags += [f"--{key.replace('_', '-')}", str(value).replace("'", '"')]
    systems = {}
    for system, more in ((EAGER, []), (COMPILED, ["--compile-mode", args.mode])):
        systems[system] = [sys.executable, str(ROOT / "cleanrl_graph" / system), *flags, *more]
    runs = in_turns(systems, args.rounds)
    late = {system: np.array([run.late_sps for run in own]) for system, own in runs.items()}
    lines = []
    for system, own in runs.items():
        ratio = np.median(late[COMPILED] / late[system])
        sps, ret = np.median([(run.sps, run.mean_return) for run in own], 0)
        lines.append(
            f"| {name}, {case['total_timesteps']:,} steps | {system} | {sps:,.0f} | "
            f"{np.median(late[system]):,.0f} | {ratio:.2f} | {ret:.3g} |"
        )
    return lines


def main(args):
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    lines = [
        "# ppo_graph_compile.py beside ppo_graph.py",
        "",
        f"Medians of {args.repeats} turns on the CPU, 1 thread, and the ratios of turns "
        f"(quartiles). {args.note}",
        "",
        "| task | policy step, ms | compiled | ratio | minibatch, ms | compiled | ratio "
        "| compilation, s of the CPU | compilations | sizes of batches | spare rows |",
        "|" + " --- |" * 11,
    ]
    lines += [parts(args, name) for name in tqdm(args.cases)]
    if args.rounds:
        lines += [
            "",
            f"Whole trainings that find compiled code in the cache, medians of {args.rounds} "
            "rounds.",
            "",
            "| task | script | SPS | SPS, second half of the run | compiled / this, second half | "
            "return at the end |",
            "|" + " --- |" * 6,
        ]
        for name in args.cases:
            lines += trainings(args, name)
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
