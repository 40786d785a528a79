"""What many options cost: a row of a large set is chosen, whose rows stay the same in an episode,
or one of a long fixed list.

    python benchmark/speed/many_options.py --out benchmark/results/speed/tables.md#many_options

Trains ppo_graph.py with one environment: steps per second from the first update on, and the largest
resident memory of the process. Of sets also where the time goes: milliseconds for each observation
of a minibatch, forward and backward, of the encoder alone and of the head alone, medians.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from common import PPO_GRAPH, report, train, turns
from gymnasium import spaces

from cleanrl_graph import ppo_graph
from cleanrl_graph.services.plot import scalars

HIDDEN_DIMS = (64, 64)


class ManyOptionsEnv(gym.Env):
    """Choose the item that is most like the goal; an episode has 8 goals. Observation: {"goal":
    float32 [4], "items": float32 [num, 4]}. `as_list`: the items are always the same and are not
    observed, and the action is Discrete(num)."""

    def __init__(self, num=1000, as_list=False):
        self.num = num
        self.as_list = as_list
        vector = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        children = {"goal": vector}
        self.action_space = spaces.Discrete(num)
        if not as_list:
            children["items"] = spaces.Sequence(vector, stack=True)
            self.action_space = spaces.Dict({"items": spaces.Discrete(num)})
        self.observation_space = spaces.Dict(children)
        self.items = np.random.default_rng(0).standard_normal((num, 4), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if not self.as_list:
            self.items = self.np_random.standard_normal((self.num, 4), np.float32)
        self.t = 0
        return self.observe(), {}

    def observe(self):
        self.goal = self.np_random.standard_normal(4, np.float32)
        obs = {"goal": self.goal}
        if not self.as_list:
            obs["items"] = self.items
        return obs

    def step(self, action):
        chosen = action if self.as_list else action["items"]
        reward = -float(((self.items[chosen] - self.goal) ** 2).sum())
        self.t += 1
        return self.observe(), reward, self.t == 8, False, {}


gym.register("ManyOptions-v0", entry_point=ManyOptionsEnv)


@dataclass
class Args:
    rows: tuple[int, ...] = (1_000, 10_000, 100_000)
    """numbers of rows"""
    lists: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    """lengths of fixed lists"""
    repeats: int = 5
    """measurements of each part"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def command(num: int, as_list: bool) -> list[str]:
    """A training of a few updates."""
    num_updates = max(3, 50_000 // num)
    if as_list:
        num_updates = min(num_updates, 20)
    flags = "--num-envs 1 --num-steps 16 --eval-episodes 0 --no-save-model --no-cuda".split()
    flags += ["--hidden-dims", *map(str, HIDDEN_DIMS)]
    flags += ["--total-timesteps", str(16 * num_updates)]
    kwargs = f'{{"num": {num}, "as_list": {str(as_list).lower()}}}'
    return [PPO_GRAPH, *flags, "--env-id", "many_options:ManyOptions-v0", "--env-kwargs", kwargs]


def training(num: int, as_list: bool) -> tuple[float, float]:
    """Its steps per second and MB."""
    with tempfile.TemporaryDirectory() as folder:
        run = train([sys.executable, *command(num, as_list)], 1, folder)
        first, *_, last = [row[1:3] for row in scalars(Path(folder), "charts/SPS")]
    return (last[0] - first[0]) / (last[1] - first[1]), run.peak_mb


def parts(num: int, repeats: int) -> list[float]:
    """Milliseconds for each observation of a minibatch of four: to store it and to select its rows,
    of the encoder and of the head, forward and backward."""
    args = ppo_graph.Args(hidden_dims=HIDDEN_DIMS)
    envs = ppo_graph.Envs([lambda: ManyOptionsEnv(num)])
    agent = ppo_graph.Agent(envs.leaves, envs.action_space, args)
    storage = ppo_graph.Storage(envs.leaves, torch.device("cpu"))
    for _ in range(4):
        storage.append(envs.reset(0).obs)
    idx = np.arange(4)
    obs, _ = storage.gather(idx)

    def store() -> None:
        storage.append(envs.reset(0).obs)
        storage.blocks.pop()
        storage.gather(idx[:1])

    def encode() -> None:
        features, elements = agent.encoder(obs)
        loss = features.square().mean() + elements["items"].values.square().mean()
        loss.backward()

    with torch.no_grad():
        features, elements = agent.encoder(obs)
    rows = elements["items"]
    rows = rows._replace(values=rows.values.requires_grad_())
    action = {"": torch.zeros(4, 1)}

    def choose() -> None:
        latent = agent.actor(features)
        _, log_prob, entropy = agent.head(latent, {"items": rows}, obs, action)
        (log_prob + entropy).mean().backward()

    ms = np.median(turns([store, encode, choose], repeats, warm_up=0), 0)
    return [float(value) for value in ms / [1, 4, 4]]


def main(args: Args) -> None:
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
    # Trainings first: a process counts the memory of the one that began it, too
    sets = {num: training(num, False) for num in args.rows}
    lists = {num: training(num, True) for num in args.lists}
    lines = [
        "One environment, 16 steps a rollout, 4 minibatches, 4 epochs, hidden layers of 64: each "
        "step is seen five times. Milliseconds are those of one observation.\n",
        "| rows of the set | steps/s | memory, MB | storing | encoder | head | without encoder |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for num, (sps, memory) in sets.items():
        store, encode, choose = parts(num, args.repeats)
        faster = (store + encode + choose) / (store + choose)
        lines.append(
            f"| {num:,} | {sps:,.3g} | {memory:,.0f} | {store:.1f} | {encode:.1f} | {choose:.1f} | "
            f"{faster:.1f} times as fast |"
        )
    lines.append(
        "\nThe head scores each row for each observation. So rows that stay the same in an episode "
        "are encoded as others are: if that cost nothing at all, it would be the last column.\n"
    )
    lines += ["| options of a fixed list | steps/s | memory, MB |", "| --- | --- | --- |"]
    for num, (sps, memory) in lists.items():
        lines.append(f"| {num:,} | {sps:,.3g} | {memory:,.0f} |")
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
