"""Environments of this project that step together, against N single ones: decisions per second.

    python benchmark/speed/vector_envs.py --out benchmark/results/speed/tables.md#vector_envs
    python benchmark/speed/vector_envs.py --num-envs 8 --decisions 64 --rounds 1 \
        --training-decisions 128                                             # does it run?

Allowed actions are drawn at random, outside of the time that counts. "Alone" calls `step` of the
environments, and `reset` of those that ended. "As trained" is what a script calls: with episodes
recorded, observations checked and their rows joined. "Training" is all of ppo_graph.py: rollouts of
16 steps, flags of NETWORK. Both ways take turns A B A B ...; times are seconds of this process's
CPU, figures are medians. Both have the same graphs, seeds and, in a training, losses.
"""

import contextlib
import io
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import numpy as np
import tyro
from common import report, spread, tables

from cleanrl_graph import ppo_graph, services
from cleanrl_graph.services import arguments, check, command

ENVS = ("VertexCover-v0", "PoissonGraph-v0")
NETWORK = {"gnn_layers": 2, "gnn_dim": 16, "hidden_dims": (64, 64)}


@dataclass
class Args:
    num_envs: int = 256
    """environments"""
    decisions: int = 131_072
    """decisions of each way and round, of all environments together"""
    training_decisions: int = 16_384
    """the same for trainings"""
    rounds: int = 5
    """turns of each way"""
    envs: tuple[str, ...] = ENVS
    """ids of the environments"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


class Singles:
    """N environments stepped one after the other, as a script's Envs without its arrays."""

    def __init__(self, env_id: str, num_envs: int):
        self.envs = [gym.make(env_id, disable_env_checker=True).unwrapped for _ in range(num_envs)]

    def reset(self, seed: int) -> list:
        self.obs = [env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)]
        return self.obs

    def step(self, actions: np.ndarray) -> list:
        for i, env in enumerate(self.envs):
            obs, _, terminated, truncated, _ = env.step(actions[i])
            self.obs[i] = env.reset()[0] if terminated or truncated else obs
        return self.obs


class Together:
    """The vector environment, used in the same way."""

    def __init__(self, env_id: str, num_envs: int):
        self.env = gym.make_vec(env_id, num_envs, "vector_entry_point")

    def reset(self, seed: int) -> dict:
        return self.env.reset(seed=seed)[0]

    def step(self, actions: np.ndarray) -> dict:
        return self.env.step(actions)[0]


def masks_of(envs, obs) -> list[np.ndarray]:
    """The action mask of each environment."""
    if isinstance(envs, Singles):
        return [own["action_mask"] for own in obs]
    if isinstance(envs, Together):
        return list(obs["action_mask"])
    k = [leaf.path for leaf in envs.leaves].index("action_mask")
    return np.split(obs.obs.values[k], obs.obs.counts["action_mask"].cumsum()[:-1])


def seconds(envs, num_steps: int) -> float:
    """CPU seconds of so many steps of all environments."""
    rng = np.random.default_rng(1)
    obs = envs.reset(1)
    total = 0.0
    for _ in range(num_steps):
        actions = np.array([rng.choice(np.flatnonzero(mask)) for mask in masks_of(envs, obs)])
        start = time.process_time()
        obs = envs.step(actions)
        total += time.process_time() - start
    return total


def training(args, num_steps: int) -> float:
    """CPU seconds of a training of so many steps of all environments."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args.run_dir = folder
        args.total_timesteps = max(num_steps // args.num_steps, 1) * args.num_steps * args.num_envs
        start = time.process_time()
        services.run(ppo_graph, args)
        return (time.process_time() - start) * num_steps * args.num_envs / args.total_timesteps


def ways(env_id: str, num_envs: int) -> dict[str, list]:
    """What is measured: two functions of a number of steps, which return CPU seconds. The first
    steps single environments, the second the vector environment."""
    alone = [partial(seconds, kind(env_id, num_envs)) for kind in (Singles, Together)]
    trained = []
    trainings = []
    for mode in ("sync", "vector_entry_point"):
        flags = dict(env_id=env_id, num_envs=num_envs, vectorization_mode=mode, num_steps=16)
        flags |= {"cuda": False, "eval_episodes": 0, "checkpoint_every": 0, **NETWORK}
        args = arguments.args_of(ppo_graph, **flags)
        with check.one_kind(ppo_graph):
            trained.append(partial(seconds, command.envs_of(ppo_graph, args)))
        trainings.append(partial(training, args))
    return {"alone": alone, "as trained": trained, "training": trainings}


def main(args: Args) -> None:
    lines = [["environment", "measured", "single, decisions/s", "together, decisions/s", "ratio"]]
    for name in args.envs:
        for what, both in ways(f"cleanrl_graph.envs:{name}", args.num_envs).items():
            decisions = args.training_decisions if what == "training" else args.decisions
            num_steps = -(-decisions // args.num_envs)
            for measure in both:
                measure(3)
            times = []
            for k in range(args.rounds):
                times.append([measure(num_steps) for measure in both])
                print(f"{name}, {what}, round {k + 1}: {times[-1]}", file=sys.stderr)
            rates = num_steps * args.num_envs / np.array(times)
            ratio = spread(rates[:, 1] / rates[:, 0], ".1f")
            lines.append([name, what, *(f"{np.median(own):,.0f}" for own in rates.T), ratio])
    note = (
        f"{args.num_envs} environments, {args.rounds} rounds of {args.decisions:,} decisions, of "
        f"{args.training_decisions:,} in a training with {NETWORK}."
    )
    report("\n".join([tables.markdown(lines), "", note]), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
