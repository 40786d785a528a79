"""ppo_gtrxl.py beside CleanRL's ppo_trxl.py on CleanRL's ProofofMemory-v0: return and steps per
second.

    python benchmark/speed/proof_of_memory.py --peer-script PATH/ppo_trxl.py \
        --peer-python .venv-trxl/bin/python --out benchmark/results/speed/tables.md#proof_of_memory

The agent sees at which end of a line the reward is, and walks once this is hidden: 1.6 at that end,
-1.6 at the other, -0.1 per move on the way. Both scripts read the environment from CleanRL's
pom_env.py, which lies beside ppo_trxl.py and is not part of this repository; CleanRL's flags are
its documented ones (see benchmark/peers/cleanrl_trxl.py). Ours runs with the same network, with a
smaller one, and without memory (control). Runs take turns, --seed is the round.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from common import ROOT, Run, in_turns, report, spread, trxl_command

FLAGS = (
    "--env-id pom_env:ProofofMemory-v0 --num-envs 16 --num-minibatches 8 --vf-coef 0.1 --ent-coef "
    "0.001 --update-epochs 4 --clip-vloss --no-prev-action --hidden-dims 64 --eval-episodes 0 "
    "--no-cuda"
)
SAME = "--num-layers 4 --num-heads 1 --memory-length 16 --learning-rate 1e-3"
VARIANTS = {
    "4 layers of 64, 1 head, memory 16, as CleanRL's": SAME,
    "the same, --gate none": f"{SAME} --gate none",
    "1 layer of 64, 4 heads, memory 16": "--num-layers 1 --memory-length 16 --learning-rate 1e-3",
    "the same, --memory-length 0 (control)": (
        "--num-layers 1 --memory-length 0 --learning-rate 1e-3"
    ),
}


@dataclass
class Args:
    peer_script: str
    """path of CleanRL's cleanrl/ppo_trxl/ppo_trxl.py, beside pom_env.py"""
    peer_python: str = str(ROOT / ".venv-trxl/bin/python")
    """the Python that runs CleanRL's script (benchmark/peers/requirements-trxl.txt)"""
    out: str | None = None
    """markdown file of the results"""
    total_timesteps: int = 25_000
    """steps of each training"""
    rounds: int = 3
    """trainings of each system"""


def row_of(name: str, runs: list[Run], peer: list[Run]) -> str:
    sps, returns = [run.sps for run in runs], [f"{run.mean_return:.2f}" for run in runs]
    ratio = np.median(sps) / np.median([run.sps for run in peer])
    peak_mb = np.median([run.peak_mb for run in runs])
    return f"| {name} | {' / '.join(returns)} | {spread(sps)} | {ratio:.1f} | {peak_mb:,.0f} |"


def main(args: Args) -> None:
    script = Path(args.peer_script).absolute()
    paths = [str(script.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    ours = [sys.executable, str(ROOT / "cleanrl_graph/ppo_gtrxl.py"), *FLAGS.split()]
    ours += ["--total-timesteps", str(args.total_timesteps)]
    systems = {f"ppo_gtrxl.py, {name}": [*ours, *more.split()] for name, more in VARIANTS.items()}
    cleanrl = "CleanRL ppo_trxl.py, its documented flags"
    flags = f"--task proof-of-memory --max-steps {args.total_timesteps}".split()
    systems[cleanrl] = trxl_command(args.peer_python, args.peer_script) + flags
    runs = in_turns(systems, args.rounds)
    lines = [
        f"ProofofMemory-v0, {args.total_timesteps} steps in 16 envs x 128, one thread, "
        f"{args.rounds} runs each in turns: mean return of the last 100 episodes per "
        "seed, median SPS (range)",
        "",
        "| system | return | SPS | SPS / CleanRL's | peak memory, MB |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [row_of(name, column, runs[cleanrl]) for name, column in runs.items()]
    common = f"ppo_gtrxl.py: `{FLAGS}`, and"
    lines += ["", common, "", *(f"- {name}: `{flags}`" for name, flags in VARIANTS.items())]
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
