"""CleanRL's ppo.py and ppo_graph.py on CartPole-v1 at CleanRL's defaults: steps per second and
return.

    python benchmark/speed/cartpole_vs_cleanrl.py --cleanrl PATH/ppo.py \
        --out benchmark/results/speed/tables.md#cartpole

ppo.py of github.com/vwxyzjn/cleanrl is not part of this repository. It was written for gymnasium
0.29: gymnasium 1.x resets an environment one step later than 0.29 did and reports ended episodes in
another form, so that ppo.py as it is runs, but logs no episode and trains on a fake transition
after each. It runs twice here: as it is, for its speed, and as a temporary copy with the two
replacements of CHANGES, which restore the reset and the log, for its return. All scripts run in
turns A B C A B C ..., each as a process of its own; defaults of all three: 4 environments x 128
steps, 4 epochs x 4 minibatches, two hidden layers of 64.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from common import PPO_GRAPH, in_turns, report, table_of

CHANGES = [
    (
        "for i in range(args.num_envs)],\n",
        "for i in range(args.num_envs)],\n"
        "        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,\n",
    ),
    (
        'for info in infos["final_info"]:',
        'for info in ({"episode": {"r": r, "l": l}} '
        'for r, l in zip(*map(infos["final_info"]["episode"].get, "rl")) if l):',
    ),
]


def changed(path: Path, changes: list[tuple[str, str]], folder: str | Path) -> str:
    """A copy of a peer's file in the folder, after replacements."""
    source = path.read_text()
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{path} is not what the changes fit: {old!r} must occur in it once")
        source = source.replace(old, new)
    Path(folder, path.name).write_text(source)
    return str(Path(folder, path.name))


@dataclass
class Args:
    cleanrl: str
    """path of CleanRL's cleanrl/ppo.py"""
    total_timesteps: int = 500_000
    """environment steps of each run"""
    rounds: int = 3
    """runs of each script; round k has seed k"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def main(args):
    path = Path(args.cleanrl).resolve()
    flags = f"--env-id CartPole-v1 --total-timesteps {args.total_timesteps} --no-cuda".split()
    ours = [PPO_GRAPH, *flags, *"--hidden-dims 64 64 --eval-episodes 0".split()]
    with tempfile.TemporaryDirectory() as folder:
        systems = {
            "ppo_graph.py": ours,
            "CleanRL ppo.py as it is": [str(path), *flags],
            "CleanRL ppo.py, autoreset and log adapted": [changed(path, CHANGES, folder), *flags],
        }
        systems = {name: [sys.executable, *command] for name, command in systems.items()}
        runs = in_turns(systems, args.rounds)
    lines = [
        "# CartPole-v1 at CleanRL's defaults",
        "",
        *table_of(runs, "ppo_graph.py"),
        "",
        f"Medians of {args.rounds} round(s) of {args.total_timesteps:,} steps, one thread. "
        "The return is the mean of the last 100 episodes of training, with a sampled policy.",
    ]
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
