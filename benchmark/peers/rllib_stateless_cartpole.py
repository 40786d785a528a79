"""RLlib 2.40 (old API stack, PPO) on CartPole-v1 without its velocities: a system to compare with.

    pip install -r benchmark/peers/requirements-rllib.txt    # in a virtual environment of its own
    python benchmark/peers/rllib_stateless_cartpole.py --model attention --seed 1 \
        --max-seconds 600 --out FILE.csv

RLlib's three memories, each with a core of two hidden layers of 256: the last 16 observations,
actions and rewards (`framestack`, RLlib's own example model), an LSTM of 256 that also sees the
last action and reward, and GTrXL attention (one unit of width 64, memory 50; its option to see
them, too, raises IndexError in 2.40 for one action and one reward). The settings are those of
RLlib's example trajectory_view_api.py, which is for StatelessCartPole: value layers shared, 5
epochs, weight of the value loss 0.0001, and PPO's defaults (4,000 steps a rollout, minibatches of
128, lambda 1, learning rate 5e-5); the example limits no episode. RLlib's later tuned example
stateless_cartpole_ppo.py, for its new stack, has the learning rate 3e-4.

The example collects with 2 processes of 1 environment each; here 8 environments are in the training
process. The csv has one row per training iteration; its wall time starts when Ray runs and the
algorithm is built, which is printed as set-up.
"""

import csv
import resource
import time
from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import ray
import tyro
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.examples._old_api_stack.models.trajectory_view_utilizing_models import (
    TorchFrameStackingCartPoleModel,
)
from ray.rllib.models import ModelCatalog
from ray.tune.logger import NoopLogger
from ray.tune.registry import register_env


@dataclass
class Args:
    model: Literal["framestack", "lstm", "attention"]
    """the memory"""
    out: str
    """csv to write"""
    seed: int = 1
    """seed of networks and environments"""
    target: float = 475
    """stop at this mean return of the last 100 episodes"""
    max_seconds: float = 600
    """stop after the training iteration that passes this time"""
    max_steps: int = 1_000_000
    """stop after the training iteration that passes this number of environment steps"""


MODELS = {
    "framestack": {"custom_model": "framestack", "custom_model_config": {"num_frames": 16}},
    "lstm": {"use_lstm": True, "lstm_use_prev_action": True, "lstm_use_prev_reward": True},
    "attention": {"use_attention": True}
    | {f"attention_memory_{name}": 50 for name in ("inference", "training")},
}


def masked_cartpole():
    """CartPole-v1 that shows the position of the cart and the angle of the pole only."""
    env = gym.make("CartPole-v1", disable_env_checker=True)
    # torch's LSTM refuses the numpy integer that RLlib would hand it
    env.action_space.n = int(env.action_space.n)
    space = gym.spaces.Box(env.observation_space.low[[0, 2]], env.observation_space.high[[0, 2]])
    return gym.wrappers.TransformObservation(env, lambda observation: observation[[0, 2]], space)


def main(args):
    start_time = time.perf_counter()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    ModelCatalog.register_custom_model("framestack", TorchFrameStackingCartPoleModel)
    register_env("masked_cartpole", lambda config: masked_cartpole())
    model = MODELS[args.model] | {"vf_share_layers": True, "max_seq_len": 20}
    algorithm = (
        PPOConfig()
        .api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
        .environment("masked_cartpole", disable_env_checking=True)
        .framework("torch")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .training(lr=5e-5, num_epochs=5, vf_loss_coeff=0.0001, model=model)
        .reporting(metrics_num_episodes_for_smoothing=100)
        .debugging(seed=args.seed, logger_creator=lambda config: NoopLogger(config, ""))
        .build()
    )
    print(f"set-up {time.perf_counter() - start_time:.1f} s")

    start_time, step, seconds, mean_return = time.perf_counter(), 0, 0, -np.inf
    with open(args.out, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "wall_seconds", "mean_return_100"])
        while mean_return < args.target and seconds < args.max_seconds and step < args.max_steps:
            result = algorithm.train()
            seconds = time.perf_counter() - start_time
            step = result["num_env_steps_sampled_lifetime"]
            # The newest last
            returns = result["env_runners"]["hist_stats"]["episode_reward"][-100:]
            mean_return = np.mean(returns) if returns else np.nan
            writer.writerow([step, f"{seconds:.2f}", f"{mean_return:.2f}"])
            file.flush()
    algorithm.stop()
    print(f"SPS {step / seconds:.0f}")
    after = f"after {step} steps, {seconds:.1f} s"
    print(f"mean return {mean_return:.3f} (last {len(returns)} episodes) {after}")
    print(f"memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main(tyro.cli(Args))
