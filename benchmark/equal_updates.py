"""Do two checkouts compute the same? Loss and clipped gradients of the first minibatches of a
training, side by side.

    git worktree add ../old COMMIT
    python benchmark/equal_updates.py --old ../old --out benchmark/results/equal_updates.md

Both checkouts train with the same seed, so weights, rollout and minibatches are the same as long as
everything before them is. A row is one script on one environment: the largest difference of the
losses, and of the gradients relative to the largest gradient, over the first --minibatches.
Environments that reach a time limit are among them.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).parents[1]
SCRIPTS = (
    "ppo_graph",
    "ppo_framestack",
    "ppo_lstm_sparse",
    "ppo_gtrxl",
    "ppo_graph_async",
    "ppo_graph_aux",
)
SMALL = (
    "--num-envs 4 --num-steps 32 --total-timesteps 512 --eval-episodes 0 --no-save-model --no-cuda"
)
CASES = {  # name -> flags of both
    "vector (Pendulum, truncated episodes)": "--env-id Pendulum-v1",
    "graph with a choice of nodes (GraphExplore)": "--env-id envs:GraphExplore-v0",
    "image (random pixels)": "--env-id pixels:Pixels-v0",
    "set (BestOfSet)": "--env-id envs:BestOfSet-v0",
}
PIXELS = """
import gymnasium as gym
import numpy as np


class Pixels(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 255, (12, 12, 1), np.uint8), gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 12))
        return self.observation(), {}

    def step(self, action):
        self.left -= 1
        return self.observation(), float(action == 1), self.left == 0, False, {}

    def observation(self):
        return self.np_random.integers(0, 256, (12, 12, 1), np.uint8)


gym.register("Pixels-v0", entry_point=Pixels, max_episode_steps=7)
"""
RECORD = """
import runpy, sys, torch
out, num, script, *flags = sys.argv[1:]
losses, gradients, backward, step = [], [], torch.Tensor.backward, torch.optim.Adam.step
def record_loss(self, *args, **kwargs):
    losses.append(self.item())
    return backward(self, *args, **kwargs)
def record_step(self, *args, **kwargs):
    params = [param for group in self.param_groups for param in group["params"]]
    gradients.append(torch.cat([param.grad.flatten() for param in params if param.grad is not None]))
    if len(gradients) == int(num):
        torch.save((losses, gradients), out)
        sys.stdout.flush()
        import os
        os._exit(0)
    return step(self, *args, **kwargs)
torch.Tensor.backward, torch.optim.Adam.step, sys.argv = record_loss, record_step, [script, *flags]
sys.path[0] = script.rpartition("/")[0]
runpy.run_path(script, run_name="__main__")
"""


@dataclass
class Args:
    old: str
    """the checkout that is compared with"""
    new: str = str(ROOT)
    """this one"""
    scripts: tuple[str, ...] = SCRIPTS
    """names of scripts"""
    minibatches: int = 4
    """minibatches that are compared"""
    out: str | None = None
    """file for the table"""


def record(
    checkout: str, script: str, flags: str, num: int, folder: str
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and gradients of the first `num` minibatches."""
    out = os.path.join(folder, "record.pt")
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=folder)
    command = [
        sys.executable,
        "-c",
        RECORD,
        out,
        str(num),
        f"{os.path.realpath(checkout)}/cleanrl_graph/{script}.py",
        *shlex.split(flags),
        "--run-dir",
        os.path.join(folder, "runs"),
    ]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    if not os.path.exists(out):
        raise RuntimeError(f"{checkout} {script} {flags}: {done.stderr[-2000:]}")
    losses, gradients = torch.load(out)
    os.remove(out)
    return losses, gradients


def main(args: Args) -> None:
    lines = [
        "| script | observation | largest loss | difference of losses | of gradients, relative |",
        "| --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pixels.py").write_text(PIXELS)
        for script in args.scripts:
            for name, flags in CASES.items():
                old, new = (
                    record(checkout, script, f"{SMALL} {flags}", args.minibatches, folder)
                    for checkout in (args.old, args.new)
                )
                loss = max(abs(a - b) for a, b in zip(old[0], new[0]))
                gradient = max(
                    ((a - b).abs().max() / a.abs().max()).item() for a, b in zip(old[1], new[1])
                )
                lines.append(
                    f"| {script}.py | {name} | {max(map(abs, old[0])):.3g} | {loss:.1g} | {gradient:.1g} |"
                )
                print(lines[-1], flush=True)
    if args.out:
        command = " ".join(["python", "benchmark/equal_updates.py", *sys.argv[1:]])
        commits = [
            subprocess.run(
                ["git", "-C", checkout, "rev-parse", "--short", "HEAD"],
                capture_output=True,
                text=True,
            ).stdout.strip()
            for checkout in (args.old, args.new)
        ]
        text = f"`{command}`\n\nOld: commit {commits[0]}; new: {commits[1]}. First {args.minibatches} minibatches.\n\n"
        Path(args.out).write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
