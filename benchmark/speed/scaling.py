"""What torchrun brings: 2 ranks against 1 rank of as many environments each, every rank on a core
of its own.

    python benchmark/speed/scaling.py --out benchmark/results/speed/tables.md#scaling
    python benchmark/speed/scaling.py --scripts ppo_graph --milliseconds 1 --rounds 1

On an environment whose steps cost a given time of the CPU. Twice the steps in the same time would
be a ratio of 2. Runs in turns A B A B, medians.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import tyro
from common import ROOT, in_turns, report, table_of
from tqdm import tqdm

from cleanrl_graph.envs.toy import PoissonGraphEnv


class SlowEnv(PoissonGraphEnv):
    """PoissonGraph whose steps keep the core busy for a given time, as simulators do."""

    def __init__(self, milliseconds=1.0, **kwargs):
        super().__init__(**kwargs)
        self.seconds = milliseconds / 1000

    def step(self, action):
        end = time.perf_counter() + self.seconds
        result = super().step(action)
        while time.perf_counter() < end:
            pass
        return result


gym.register("Slow-v0", entry_point=SlowEnv)


@dataclass
class Args:
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


def command(args, script: str, milliseconds: float, num_steps: int) -> list[str]:
    """A short training on the slow environment."""
    rollout = 32 * args.num_envs
    total = max(2, round(num_steps / rollout)) * rollout
    flags = (
        f"--env-id scaling:Slow-v0 --num-envs {args.num_envs} --num-steps 32 --total-timesteps "
        f"{total} --update-epochs 1 --gnn-layers 2 --hidden-dims 64 --eval-episodes 0 --no-cuda"
    )
    path, kwargs = ROOT / "cleanrl_graph" / f"{script}.py", f'{{"milliseconds": {milliseconds}}}'
    return [str(path), *flags.split(), "--env-kwargs", kwargs]


def torchrun(args, script: str, milliseconds: float) -> list[str]:
    num = min(int(1000 * args.seconds / milliseconds), 20_000)
    one = ["taskset", "-c", "0", sys.executable, *command(args, script, milliseconds, num)]
    two = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
    two += ["--no-python", "bash", "-c", 'exec taskset -c "$LOCAL_RANK" "$0" "$@"']  # own cores
    two += [sys.executable, *command(args, script, milliseconds, 2 * num)]
    runs = in_turns({"2 ranks": two, "1 rank": one}, args.rounds, 1)
    return [
        "",
        f"## {script}.py, an environment that is busy {milliseconds:g} ms a step",
        "",
        *table_of(runs, "2 ranks"),
    ]


def main(args):
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    lines = [
        "# torchrun",
        "",
        f"Medians of {args.rounds} rounds, 1 thread of torch in each process, "
        f"{args.num_envs} environments of each rank x 32 steps.",
    ]
    for script in tqdm(args.scripts):
        for milliseconds in args.milliseconds:
            lines += torchrun(args, script, milliseconds)
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
