"""What more processes bring: two halves of the environments in turns, and torchrun, on an environment of tunable cost.

    python benchmark/speed/scaling.py --out benchmark/results/speed/scaling.md
    python benchmark/speed/scaling.py --parts double_buffer --scripts ppo_graph --rounds 1

Halves: workers step one half of the environments while the policy serves the other (--double-buffer), against workers
that step all of them while the policy waits. An environment either waits (as for a simulator elsewhere) or keeps a core
busy; with 2 cores, workers that are busy take the policy's core, so that less can be won there.
torchrun: 2 ranks against 1 rank of as many environments each, every rank on a core of its own; twice the steps in the
same time would be a ratio of 2. All runs in turns A B A B, medians.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from common import ROOT, in_turns, report, table_of
from tqdm import tqdm

PARTS = ("double_buffer", "torchrun")


@dataclass
class Args:
    parts: tuple[str, ...] = PARTS
    """of double_buffer and torchrun"""
    scripts: tuple[str, ...] = ("ppo_graph", "ppo_lstm_sparse")
    """scripts that are run"""
    milliseconds: tuple[float, ...] = (0.1, 1.0, 5.0)
    """cost of a step of the environment"""
    seconds: float = 15.0
    """aim for the length of a run, at the cost of the steps alone"""
    num_envs: int = 64
    """environments of a run, or of a rank"""
    rounds: int = 3
    """runs of each kind"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def command(args, script: str, milliseconds: float, sleep: bool, num_steps: int, *flags: str) -> list[str]:
    """A short training on the slow environment."""
    rollout = 32 * args.num_envs
    total = max(2, round(num_steps / rollout)) * rollout
    return [str(ROOT / "cleanrl_graph" / f"{script}.py"), "--env-id", "slow_env:Slow-v0", "--env-kwargs",
            f'{{"milliseconds": {milliseconds}, "sleep": {str(sleep).lower()}}}', "--num-envs", str(args.num_envs),
            "--num-steps", "32", "--total-timesteps", str(total), "--update-epochs", "1", "--gnn-layers", "2",
            "--hidden-dims", "64", "--eval-episodes", "0", "--no-cuda", *flags]


def double_buffer(args, script: str, milliseconds: float) -> list[str]:
    lines = []
    for sleep in (True, False):
        num = int(1000 * args.seconds / milliseconds) if sleep else int(2000 * args.seconds / milliseconds)
        base = [sys.executable, *command(args, script, milliseconds, sleep, min(num, 20_000), "--num-workers", "2")]
        runs = in_turns({"halves": [*base, "--double-buffer"], "all at once": base}, args.rounds, 1)
        kind = "waits" if sleep else "is busy"
        lines += ["", f"### {script}.py, an environment that {kind} {milliseconds:g} ms a step", "",
                  *table_of(runs, "halves")]
    return lines


def torchrun(args, script: str, milliseconds: float) -> list[str]:
    num = min(int(1000 * args.seconds / milliseconds), 20_000)
    one = ["taskset", "-c", "0", sys.executable, *command(args, script, milliseconds, False, num)]
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python",
           "bash", str(Path(__file__).parent / "on_own_core.sh"), sys.executable,
           *command(args, script, milliseconds, False, 2 * num)]
    runs = in_turns({"2 ranks": two, "1 rank": one}, args.rounds, 1)
    return ["", f"### {script}.py, an environment that is busy {milliseconds:g} ms a step", "",
            *table_of(runs, "2 ranks")]


def main(args):
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    lines = ["# More processes", "", f"Medians of {args.rounds} rounds, 1 thread of torch in each process, "
             f"{args.num_envs} environments (of each rank) x 32 steps, 2 workers.", ""]
    for part in args.parts:
        lines += ["", "## " + {"double_buffer": "--double-buffer", "torchrun": "torchrun"}[part]]
        for script in tqdm(args.scripts, desc=part):
            for milliseconds in args.milliseconds:
                lines += {"double_buffer": double_buffer, "torchrun": torchrun}[part](args, script, milliseconds)
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
