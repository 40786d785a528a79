"""RecurrentPPO of Stable-Baselines3 (sb3-contrib) on CartPole-v1 without its velocities: a system
to compare with.

    pip install -r benchmark/peers/requirements-sb3.txt    # in a virtual environment of its own
    python benchmark/peers/sb3_recurrent_ppo.py --seed 1 --max-seconds 600 --out FILE.csv

The settings are those that RL Baselines3 Zoo has tuned for this task (CartPoleNoVel-v1 in
hyperparams/ppo_lstm.yml at commit 22e3ff2): an LSTM of 64 for the actor and one for the critic,
each with a layer of 64 above, 8 environments x 32 steps, 20 epochs of one minibatch, normalised
observations and rewards. The learning rate and the clipping range fall linearly to 0 at
--max-steps, which is 100,000 in the zoo.

The csv has one row per rollout; its wall time starts when the networks and environments are built.
"""

import csv
import resource
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch.nn as nn
import tyro
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize


@dataclass
class Args:
    out: str
    """csv to write"""
    seed: int = 1
    """seed of networks and environments"""
    target: float = 475
    """stop at this mean return of the last 100 episodes"""
    max_seconds: float = 600
    """stop after the rollout that passes this time"""
    max_steps: int = 200_000
    """stop at this number of environment steps"""


def masked_cartpole():
    """CartPole-v1 that shows the position of the cart and the angle of the pole only."""
    env = gym.make("CartPole-v1", disable_env_checker=True)
    space = gym.spaces.Box(env.observation_space.low[[0, 2]], env.observation_space.high[[0, 2]])
    shown = lambda observation: observation[[0, 2]]
    return Monitor(gym.wrappers.TransformObservation(env, shown, space))


class Curve(BaseCallback):
    """Writes the rows of the csv and ends the training."""

    def __init__(self, args, file):
        super().__init__()
        self.args, self.file, self.writer = args, file, csv.writer(file)
        self.writer.writerow(["step", "wall_seconds", "mean_return_100"])
        self.start_time, self.go_on = time.perf_counter(), True

    def _on_rollout_end(self):
        seconds = time.perf_counter() - self.start_time
        returns = [episode["r"] for episode in self.model.ep_info_buffer]
        self.mean_return, self.episodes = np.mean(returns) if returns else np.nan, len(returns)
        self.writer.writerow([self.num_timesteps, f"{seconds:.2f}", f"{self.mean_return:.2f}"])
        self.file.flush()
        self.go_on = not self.mean_return >= self.args.target and seconds < self.args.max_seconds

    def _on_step(self):
        return self.go_on


def main(args):
    start_time = time.perf_counter()
    envs = VecNormalize(DummyVecEnv([masked_cartpole] * 8), gamma=0.98)
    network = dict(ortho_init=False, activation_fn=nn.ReLU, net_arch={"pi": [64], "vf": [64]})
    network |= dict(lstm_hidden_size=64, enable_critic_lstm=True)
    settings = dict(n_steps=32, batch_size=256, n_epochs=20, gamma=0.98, gae_lambda=0.8)
    settings |= dict(ent_coef=0.0, learning_rate=lambda remaining: 0.001 * remaining)
    settings |= dict(clip_range=lambda remaining: 0.2 * remaining, policy_kwargs=network)
    model = RecurrentPPO("MlpLstmPolicy", envs, seed=args.seed, device="cpu", **settings)
    print(f"set-up {time.perf_counter() - start_time:.1f} s")
    with open(args.out, "w", newline="") as file:
        curve = Curve(args, file)
        model.learn(args.max_steps, curve)
    seconds, step = time.perf_counter() - curve.start_time, model.num_timesteps
    print(f"SPS {step / seconds:.0f}")
    after = f"after {step} steps, {seconds:.1f} s"
    print(f"mean return {curve.mean_return:.3f} (last {curve.episodes} episodes) {after}")
    print(f"memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main(tyro.cli(Args))
