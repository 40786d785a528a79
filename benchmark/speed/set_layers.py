"""What --set-layers costs: the encoder on a minibatch of sets, forward and backward.

    python benchmark/speed/set_layers.py --out benchmark/results/speed/tables.md#set_layers

Every set has the same number of rows, each of 4 numbers. The figures are medians of measurements in
turns 0 2 0 2 ..., by one thread of torch.
"""

from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import numpy as np
import torch
import tyro
from common import report, turns

from cleanrl_graph import ppo_graph


@dataclass
class Args:
    rows: tuple[int, ...] = (10, 30, 100, 300)
    """rows of each set"""
    layers: tuple[int, ...] = (0, 2)
    """numbers of set layers"""
    num_sets: int = 128
    """sets of a minibatch"""
    repeats: int = 31
    """measurements of each"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def batch_of(rows: int, num_sets: int, leaves: list[ppo_graph.Leaf]) -> ppo_graph.Obs:
    """A minibatch of sets."""
    values = np.random.default_rng(0).standard_normal((rows * num_sets, 4), np.float32)
    counts = {ppo_graph.STEP: np.ones(num_sets, np.int64), leaves[0].group: np.full(num_sets, rows)}
    storage = ppo_graph.Storage(leaves, torch.device("cpu"))
    return storage.append(ppo_graph.Flat([values], counts))


def forward_and_backward(encoder: ppo_graph.Encoder, obs: ppo_graph.Obs) -> None:
    features, elements = encoder(obs)
    loss = features.square().mean()
    for rows in elements.values():
        loss = loss + rows.values.square().mean()
    loss.backward()


def main(args: Args) -> None:
    torch.set_num_threads(1)
    space = gym.spaces.Sequence(gym.spaces.Box(-np.inf, np.inf, (4,)), stack=True)
    leaves = ppo_graph.leaves_of(space)
    encoders = [ppo_graph.Encoder(leaves, ppo_graph.Args(set_layers=num)) for num in args.layers]
    lines = [
        f"Milliseconds of the encoder, width 64, forward and backward on {args.num_sets} sets.\n",
        f"| rows of each set | {' | '.join(f'{num} layers' for num in args.layers)} |",
        "| --- " * (1 + len(args.layers)) + "|",
    ]
    for rows in args.rows:
        obs = batch_of(rows, args.num_sets, leaves)
        calls = [partial(forward_and_backward, encoder, obs) for encoder in encoders]
        medians = np.median(turns(calls, args.repeats), 0)
        lines.append(f"| {rows} | {' | '.join(f'{value:.1f}' for value in medians)} |")
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
