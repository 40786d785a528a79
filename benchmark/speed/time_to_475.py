"""Seconds of training until CartPole-v1 returns 475: ppo_graph.py at a setting of its own against
CleanRL's ppo.py.

    python benchmark/speed/time_to_475.py --cleanrl PATH/ppo.py \
        --out benchmark/results/speed/tables.md#time_to_475

Both in turns A B A B, one seed a round, each as a process of its own. The time is that of the
training to the first episode at which the mean return of 100 episodes is 475: in episodes.csv, and
for ppo.py in the TensorBoard log, from its first entry, the hyperparameters. ppo.py runs with its
defaults, and with the two replacements of cartpole_vs_cleanrl.py that gymnasium 1.x makes
necessary.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from cartpole_vs_cleanrl import CHANGES, changed
from common import PPO_GRAPH, report, train
from tqdm import tqdm

from cleanrl_graph.services.plot import find

FLAGS = (
    "--num-envs 32 --num-steps 32 --num-minibatches 4 --update-epochs 6 --learning-rate 3e-3 "
    "--gamma 0.98 --gae-lambda 0.8 --ent-coef 0 --no-clip-vloss --hidden-dims 64 64 "
    "--eval-episodes 0"
)


STEPS, CLEANRL_STEPS = 200_000, 500_000  # of a run
TARGET = 475  # mean return of 100 episodes


@dataclass
class Args:
    cleanrl: str
    """path of CleanRL's cleanrl/ppo.py"""
    rounds: int = 5
    """runs of each script; round k has seed k"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def time_to_target(command: list[str]) -> tuple[float, float]:
    """(seconds, steps) until the target; infinite if it is not reached. RuntimeError if the script
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        train(command, folder)
        (run,) = find([folder], 100)
    reached = np.flatnonzero(run.means[99:] >= TARGET)
    if not len(reached):
        return np.inf, np.inf
    k = 99 + reached[0]
    return run.seconds[k], run.steps[k]


def main(args):
    task = "--env-id CartPole-v1 --no-cuda --total-timesteps"
    with tempfile.TemporaryDirectory() as folder:
        theirs = changed(Path(args.cleanrl), CHANGES, folder)
        ours = [sys.executable, PPO_GRAPH, *f"{task} {STEPS} {FLAGS}".split()]
        theirs = [sys.executable, theirs, *f"{task} {CLEANRL_STEPS}".split()]
        rows, seconds = [], []
        for seed in tqdm(range(1, args.rounds + 1), unit="round"):
            seeded = [[*command, "--seed", str(seed)] for command in (ours, theirs)]
            pair = [time_to_target(command) for command in seeded]
            seconds.append([time for time, _ in pair])
            cells = [
                f"{time:.1f} s, {num / 1000:.0f}k steps" if np.isfinite(time) else "not reached"
                for time, num in pair
            ]
            rows.append(f"| {seed} | {' | '.join(cells)} | {pair[1][0] / pair[0][0]:.1f} |")
    ours, theirs = np.median(seconds, 0)
    lines = [
        f"# CartPole-v1: time to a mean return of {TARGET}",
        "",
        "| seed | ppo_graph.py | CleanRL ppo.py, defaults | ratio of seconds |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        *rows,
        f"| **median** | {ours:.1f} s | {theirs:.1f} s | **{theirs / ours:.1f}** |",
        "",
        f"ppo_graph.py: `{FLAGS}`.",
    ]
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
