"""Acting and learning at the same time: wall time and learning curves of ppo_graph_async.py beside
ppo_graph.py.

    python benchmark/speed/async.py --out benchmark/results/speed/tables.md#async
    # does it run?
    python benchmark/speed/async.py --cases 0.1 --rounds 1 --num-updates 4 --curve-steps 0

1. Wall time of the same number of steps, in turns A B A B ..., where collection and update take
   about as long: PoissonGraph whose steps cost 0.1 or 1 ms more of the CPU, 1 ms asleep (as one
   that waits for a simulator), or 5 ms asleep in 8 worker processes.
2. Learning curves of PoissonGraph without extra cost over steps: no lag, one update, four updates,
   and four updates without correction (advantages without rho, the ratio taken to the policy that
   collected). A picture of them lies beside --out.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from cartpole_vs_cleanrl import changed
from common import ROOT, beside, in_turns, report, spread, tables, train

from cleanrl_graph.services.plot import Look, around_mean, draw, find

SCRIPTS = ROOT / "cleanrl_graph"
SAME = "--eval-episodes 0 --checkpoint-every 0 --no-cuda"
# milliseconds of a step -> (environments, steps, flags) with which collection and update take
# about as long
CASES = {
    "0.1": (8, 128, '--env-kwargs {"ms":0.1} --gnn-layers 2 --gnn-dim 64'),
    "1": (8, 64, '--env-kwargs {"ms":1} --gnn-layers 3 --gnn-dim 192'),
    "1 asleep": (8, 64, '--env-kwargs {"ms":1,"asleep":true} --gnn-layers 3 --gnn-dim 192'),
    "5 asleep, 8 workers": (
        *(16, 32),
        '--env-kwargs {"ms":5,"asleep":true} --gnn-layers 3 --gnn-dim 160 --num-workers 8',
    ),
}
CURVES = {
    "ppo_graph.py": ("ppo_graph.py", ""),
    "max_lag 1": ("ppo_graph_async.py", "--max-lag 1"),
    "max_lag 4": ("ppo_graph_async.py", "--max-lag 4"),
    "max_lag 4, not corrected": ("uncorrected", "--max-lag 4"),
}
# The present policy is taken for the one that collected, and the ratio to the latter
UNCORRECTED = [
    (
        "        rho = importance.clip(max=1).reshape(T, N)  # both rho and c of V-trace\n",
        "        rho = np.ones((T, N), np.float32)\n"
        "        log_probs = to_device(rollout.log_probs, device)\n",
    )
]


@dataclass
class Args:
    out: str | None = None
    """file that receives the same markdown, with a png beside it"""
    cases: tuple[str, ...] = tuple(CASES)
    """milliseconds of a step in part 1"""
    num_updates: int = 10
    """updates of each run of part 1"""
    rounds: int = 3
    """runs of each system; --seed is the round"""
    curve_steps: int = 60_000
    """steps of each run of part 2; 0 leaves it out"""
    note: str = ""
    """a sentence on the machine for the report, such as what else ran"""


def wall_time(args: Args) -> list[str]:
    """The table of part 1."""
    rows = [["ms of a step", "system", "training, s (least to most)", "ppo_graph / this"]]
    for case in args.cases:
        num_envs, num_steps, flags = CASES[case]
        steps = args.num_updates * num_envs * num_steps
        words = f"--env-id costly:Costly-v0 --num-envs {num_envs} --num-steps {num_steps} {flags} "
        words += f"--hidden-dims 64 --total-timesteps {steps} {SAME}"
        systems = {}
        for name in ("ppo_graph", "ppo_graph_async"):
            systems[name] = [sys.executable, str(SCRIPTS / f"{name}.py"), *words.split()]
        seconds = {}
        for name, runs in in_turns(systems, args.rounds).items():
            seconds[name] = np.array([steps / run.sps for run in runs])
            ratio = ""
            if name != "ppo_graph":
                ratio = spread(seconds["ppo_graph"] / seconds[name], ".2f")
            rows.append([case, name, spread(seconds[name], ".1f"), ratio])
    note = f"Medians of {args.rounds} rounds, {args.num_updates} updates each, one thread of torch."
    return ["## Wall time", "", tables.markdown(rows), "", note]


def learning_curves(args: Args) -> list[str]:
    """The table of part 2; its picture is drawn beside --out."""
    curves = {}
    flags = (
        f"--env-id envs:PoissonGraph-v0 --num-envs 16 --learning-rate 1e-3 --gnn-layers 2 {SAME}"
    )
    for seed in range(1, args.rounds + 1):
        for name, (script, more) in CURVES.items():
            with tempfile.TemporaryDirectory() as folder:
                path = str(SCRIPTS / script)
                if script == "uncorrected":
                    path = changed(SCRIPTS / "ppo_graph_async.py", UNCORRECTED, folder)
                words = f"{flags} {more} --total-timesteps {args.curve_steps} --seed {seed}".split()
                run = train([sys.executable, path, *words], folder)
                curves.setdefault(("", name), []).extend(find([folder], 100))
            print(f"{name}, seed {seed}: {run.sps:.0f} SPS", file=sys.stderr)
    rows = [["system", "mean return of the last 100 episodes, by seed", "mean of the training"]]
    for (_, name), runs in curves.items():
        mean = np.mean([run.means.mean() for run in runs])
        rows.append([name, " / ".join(f"{run.means[-1]:.2f}" for run in runs), f"{mean:.2f}"])
    note = (
        f"PoissonGraph-v0, 16 environments x 128 steps, {args.curve_steps} steps, learning rate "
        "1e-3; the optimum is 16. Lines are means over the seeds, bands the standard deviation."
    )
    lines = ["", "## Learning curves", "", tables.markdown(rows), "", note]
    if args.out:
        picture = beside(args.out, ".png")
        look = Look("mean return of 100 episodes", "PoissonGraph-v0, optimum 16")
        draw(picture, curves, around_mean, look)
        lines += ["", f"![learning curves]({picture.name})"]
    return lines


def main(args: Args) -> None:
    paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    load = os.getloadavg()[0]
    lines = wall_time(args)
    if args.curve_steps:
        lines += learning_curves(args)
    heading = [
        "# Acting and learning at the same time",
        "",
        f"Load average of the machine when this began {load:.1f}, when it ended "
        f"{os.getloadavg()[0]:.1f}; this benchmark alone makes 1 to 2. {args.note}".strip(),
        "",
    ]
    report("\n".join(heading + lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
