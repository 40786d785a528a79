"""CleanRL's ppo_trxl.py on its ProofofMemory-v0 and on CartPole-v1 without its velocities: a system
to compare with.

    pip install -r benchmark/peers/requirements-trxl.txt    # in a virtual environment of its own
    python benchmark/peers/cleanrl_trxl.py --script PATH/ppo_trxl.py --task cartpole

cleanrl/ppo_trxl/ppo_trxl.py of github.com/vwxyzjn/cleanrl is not part of this repository; its
neighbour pom_env.py must lie beside it. It runs as it is: here its environment is registered, its
flags are set and its printed lines are read. Those for ProofofMemory-v0 are the documented ones.
For CartPole none are documented: the same here, but with a larger network and longer rollouts (16
environments x 256 steps, 4 layers of 128 with 4 heads, memory 32, absolute positions), and, since
its returns are larger, with discount 0.99, normalised advantages and no clipping of the value.
Flags other than those below go to the script as they are, and win.

It prints its steps per second from the first reset on, as the script itself has them.
"""

import os
import resource
import runpy
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import tyro

# the flags that docs/rl-algorithms/ppo-trxl.md of CleanRL gives for ProofofMemory-v0
FLAGS = """
    --env-id ProofofMemory-v0 --num-envs 16 --num-steps 128 --num-minibatches 8 --update-epochs 4
    --trxl-num-layers 4 --trxl-num-heads 1 --trxl-dim 64 --trxl-memory-length 16
    --trxl-positional-encoding none --vf-coef 0.1 --max-grad-norm 0.5 --init-lr 3e-4
    --init-ent-coef 0.001 --clip-coef 0.2
""".split()
# of two equal flags the last one counts
CARTPOLE_FLAGS = (
    FLAGS
    + """--env-id MaskedCartPole-v1 --num-steps 256 --trxl-num-heads 4 --trxl-dim 128
    --trxl-memory-length 32 --trxl-positional-encoding absolute --gamma 0.99 --norm-adv
    --no-clip-vloss""".split()
)


@dataclass
class Args:
    script: str
    """path of CleanRL's cleanrl/ppo_trxl/ppo_trxl.py"""
    task: Literal["cartpole", "proof-of-memory"] = "cartpole"
    """the environment"""
    seed: int = 1
    """seed of networks and environments"""
    episode_steps: int = 500
    """longest episode of CartPole"""
    max_steps: int = 1_000_000
    """stop at this number of environment steps"""


class MaskedCartPole(gym.Wrapper):
    """CartPole-v1 that shows the position of the cart and the angle of the pole only; actions are
    arrays [1]."""

    def __init__(self):
        # `register` limits
        env = gym.make("CartPole-v1", max_episode_steps=10**9, disable_env_checker=True)
        super().__init__(env)
        space = self.env.observation_space
        self.observation_space = gym.spaces.Box(space.low[[0, 2]], space.high[[0, 2]])

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        return observation[[0, 2]], info

    def step(self, action):
        observation, *rest = self.env.step(int(action[0]))
        return observation[[0, 2]], *rest


def main(args, more_flags):
    make = lambda render_mode: MaskedCartPole()
    gym.register("MaskedCartPole-v1", make, max_episode_steps=args.episode_steps)
    flags = CARTPOLE_FLAGS if args.task == "cartpole" else FLAGS
    script = Path(args.script).resolve()
    own = [f"--seed={args.seed}", f"--total-timesteps={args.max_steps}"]
    sys.argv = [str(script), *flags, *own, *more_flags]
    sys.path.insert(0, str(script.parent))  # for pom_env
    found = {}

    def log(line):
        """In the place of the script's `print`."""
        variables = sys._getframe(1).f_globals
        if line.startswith("model saved") or not variables["episode_infos"]:
            return
        mean_return = np.mean([info["r"] for info in variables["episode_infos"]])
        found.update(step=variables["global_step"], mean_return=mean_return)
        found["seconds"] = time.time() - variables["start_time"]
        print(line, flush=True)

    with tempfile.TemporaryDirectory() as folder:  # for the script's TensorBoard log
        os.chdir(folder)
        runpy.run_path(str(script), {"print": log}, "__main__")
    step, seconds, mean_return = found["step"], found["seconds"], found["mean_return"]
    print(f"SPS {step / seconds:.0f}")
    print(f"mean return {mean_return:.3f} (last 100 episodes) after {step} steps, {seconds:.1f} s")
    print(f"memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main(*tyro.cli(Args, return_unknown_args=True))
