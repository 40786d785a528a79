"""Steps per second of whole trainings in two checkouts of this repository, in turns A B A B.

    git worktree add ../old 757e72c
    python benchmark/speed/old_vs_new.py --old ../old --new . \
        --out benchmark/results/speed/old_vs_new.md
    # a try
    python benchmark/speed/old_vs_new.py --old ../old --new . --cases cartpole help --rounds 1 \
        --scale 0.1

Each run is a process of its own with one thread of torch. Steps per second are those of the
script's own log, without imports and set-up; of --help the seconds of the process are given. A
ratio compares the two runs of a round. The ratio "by CPU" is that of the CPU seconds of the
processes, imports included: near 1 it says less, on a busy machine more. A flag that was renamed
goes by its old name to a checkout that has this one.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import tyro
from common import commit_of, report, train
from tqdm import tqdm

CARTPOLE = (
    "--env-id envs:StatelessCartPole-v1 --learning-rate 1e-3 --ent-coef 0 --no-clip-vloss "
    "--norm-obs"
)
MEMORY = "--num-envs 16 --update-epochs 4"  # the defaults of the memory scripts were others
CASES = {  # name: (script, steps of a run, flags)
    "cartpole": (
        "ppo_graph",
        65_536,
        "--env-id CartPole-v1 --hidden-dims 64 64",
    ),  # CleanRL's defaults
    "poisson": ("ppo_graph", 32_768, "--env-id envs:PoissonGraph-v0 --num-envs 64 --gnn-layers 2"),
    "jobshop": (
        "ppo_graph",
        24_576,
        "--env-id envs:JobShop-v0 --num-envs 64 --num-steps 64 --num-minibatches 8 "
        '--update-epochs 3 --gamma 1 --env-kwargs {"jobs":[3,10],"machines":[3,10]}',
    ),
    "readme": (
        "ppo_graph",
        40_960,
        "--env-id envs:JobShop-v0 --num-envs 64 --num-steps 64 --num-minibatches 8 "
        "--update-epochs 3 --learning-rate 1e-3 --gamma 1 --env-kwargs "
        '[{"jobs":[3,10],"machines":[3,10],"lookahead":2},'
        '{"jobs":[10,30],"machines":[4,10],"lookahead":2}]',
    ),  # the training of job_shop.sh, in one process
    "framestack": ("ppo_framestack", 40_960, f"{CARTPOLE} --num-envs 8 --update-epochs 6"),
    "lstm": (
        "ppo_lstm_sparse",
        40_960,
        f"{CARTPOLE} {MEMORY} --num-steps 32 --lstm-dim 64 --prev-action",
    ),
    "gtrxl": (
        "ppo_gtrxl",
        32_768,
        f"{CARTPOLE} {MEMORY} --num-steps 64 --num-minibatches 8 --memory-length 50 "
        "--num-layers 1 --no-prev-action",
    ),
    "lstm_nodes": (
        "ppo_lstm_sparse",
        24_576,
        f"--env-id envs:GraphExplore-v0 {MEMORY} --gnn-layers 1 --lstm-dim 64 --no-prev-action",
    ),
    "hidden": ("ppo_graph", 65_536, "--env-id CartPole-v1 --num-envs 8 --wrap hide:1,3"),
    "workers": (
        "ppo_graph",
        32_768,
        "--env-id envs:PoissonGraph-v0 --num-envs 64 --gnn-layers 2 --num-workers 2",
    ),
    "help": ("ppo_graph", 0, "--help"),
}
BEFORE = {
    "--wrap hide:1,3": "--mask-obs 1,3",
    "--wrap z:skill:4": "--agent-z skill:4",
}  # flags that were renamed


@dataclass
class Args:
    old: str
    """folder of the checkout that is the measure"""
    new: str
    """folder of the checkout that is compared with it"""
    cases: tuple[str, ...] = tuple(CASES)
    """which of CASES to run"""
    rounds: int = 5
    """runs of each checkout; round k has seed k"""
    scale: float = 1.0
    """factor of the steps of each run"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


@cache
def help_of(script: Path) -> str:
    """What the script prints for --help."""
    return subprocess.run(
        [sys.executable, script, "--help"], capture_output=True, text=True, check=True
    ).stdout


def num_steps(name: str, scale: float) -> int:
    """Environment steps of a run, at least one rollout."""
    return max(int(CASES[name][1] * scale), 8192)


def run(checkout: str, name: str, scale: float, seed: int) -> tuple[float, float, float]:
    """(steps per second, CPU seconds, peak memory in MB) of one training; of --help (calls per
    second, nan, nan)."""
    script, _, flags = CASES[name]
    path = Path(checkout).resolve() / "cleanrl_graph" / f"{script}.py"
    if name == "help":
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, path, "--help"],
            capture_output=True,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return 1 / (time.perf_counter() - start), np.nan, np.nan
    for now, before in BEFORE.items():
        if now in flags and before.split()[0] in help_of(path):
            flags = flags.replace(now, before)
    flags += (
        f" --total-timesteps {num_steps(name, scale)} --seed {seed} --eval-episodes 0 --no-cuda"
    )
    with tempfile.TemporaryDirectory() as folder:
        own = f"PYTHONPATH={Path(checkout).resolve()}"  # even if the package is installed
        result = train(["env", own, sys.executable, str(path), *flags.split()], 1, folder)
    return result.sps, result.cpu, result.peak_mb


def main(args: Args) -> None:
    unknown = set(args.cases) - set(CASES)
    if unknown:
        raise SystemExit(f"--cases {' '.join(sorted(unknown))}: there are {', '.join(CASES)}")
    lines = [
        "# Two checkouts",
        "",
        f"Old: commit {commit_of(args.old)}. New: commit {commit_of(args.new)}. Medians of "
        f"{args.rounds} rounds; the ratio is new / old in speed, of the two runs of a round (least "
        "to most).",
        "",
        "| case | script | old, steps per second | new | ratio | by CPU | old, peak memory, MB | "
        "new |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rounds = []
    for name in tqdm(args.cases, unit="case"):
        figures = np.zeros(
            (args.rounds, 2, 3)
        )  # [round, checkout, (steps per second, CPU seconds, MB)]
        for k, row in enumerate(figures):
            row[:] = [run(checkout, name, args.scale, k + 1) for checkout in (args.old, args.new)]
            tqdm.write(
                f"{name}, round {k + 1}: old {row[0, 0]:.5g}, new {row[1, 0]:.5g}", file=sys.stderr
            )
        seconds = ", ".join(f"{old:.2f} / {new:.2f}" for old, new in figures[:, :, 1])
        if name != "help":
            rounds.append(f"- {name}, CPU seconds of each round, old / new: {seconds}")
        ratio, (sps, _, peak) = figures[:, 1, 0] / figures[:, 0, 0], np.median(figures, 0).T
        by_cpu = np.median(figures[:, 0, 1] / figures[:, 1, 1])
        cells = [
            *(f"{1 / value:.2f} s" if name == "help" else f"{value:,.0f}" for value in sps),
            f"**{np.median(ratio):.2f}** ({ratio.min():.2f} to {ratio.max():.2f})",
            *(
                "" if np.isnan(by_cpu) else text
                for text in (f"{by_cpu:.2f}", *(f"{mb:,.0f}" for mb in peak))
            ),
        ]
        lines.append(f"| {name} | {CASES[name][0]}.py | {' | '.join(cells)} |")
    lines += [
        "",
        *(
            f"- {name}: {num_steps(name, args.scale):,} steps, `{CASES[name][2]}`"
            for name in args.cases
            if name != "help"
        ),
        "",
        *rounds,
    ]
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
