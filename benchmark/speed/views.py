"""Views on the last 16 observations, gathered by index from one copy of each step, against a
stacked buffer.

    python benchmark/speed/views.py --out benchmark/results/speed/tables.md#views

Prints a markdown table for a vector, a 4 x 84 x 84 image and a graph. "Bytes per step" are those of
the stored rollout: of a script without memory, of ppo_framestack.py (with the steps before the
rollout that views reach back to), and of a buffer that holds 16 observations for every step;
"encodings" is the table of encoded steps that views read (a vector's encoding is its copy in
float32; an image which enters as channels is stored in the table alone). "Gather" makes the views
of a random quarter of the rollout: by index, and by one selection of rows of the stacked buffer
(the same function). A graph is gathered raw, each step that is read once (its encoding is what the
16 views share), where the stacked buffer yields 16 graphs per step. Medians over repeats that take
turns.
"""

from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import numpy as np
import torch
import tyro
from common import report
from gymnasium import spaces
from layout import median_us

from cleanrl_graph import ppo_framestack

CPU = torch.device("cpu")


@dataclass
class Args:
    num_envs: int = 8
    """environments"""
    num_steps: int = 128
    """steps of the rollout per environment"""
    episode_length: int = 100
    """steps of an episode"""
    repeats: int = 15
    """repeats of each measurement"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


class Noise(gym.Env):
    """Random observations of a Box; episodes of `length` steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, length):
        self.observation_space, self.length, self.t = space, length, 0

    def observe(self):
        if self.observation_space.dtype == np.uint8:
            return self.np_random.integers(0, 256, self.observation_space.shape, np.uint8)
        return self.np_random.standard_normal(self.observation_space.shape, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), 0.0, self.t == self.length, False, {}


VECTOR, IMAGE = spaces.Box(-9, 9, (4,), np.float32), spaces.Box(0, 255, (4, 84, 84), np.uint8)
POISSON = partial(gym.make, "cleanrl_graph.envs:PoissonGraph-v0", disable_env_checker=True)
ENVS = {
    "vector of 4 floats": lambda length: Noise(VECTOR, length),
    "image 4 x 84 x 84": lambda length: Noise(IMAGE, length),
    "graph (10 nodes on average)": lambda length: POISSON(episode_length=length).unwrapped,
}


def used_bytes(storage):
    """Bytes of the rows that a Storage holds."""
    return sum(values.nbytes for values in storage.whole().values)


def measure(name, args):
    """(bytes per step without memory, of views, of encodings, stacked; us of a gather of views, of
    the stack)"""
    script = ppo_framestack.Args(
        action_shifts="", reward_shifts="", num_steps=args.num_steps, num_envs=args.num_envs
    )
    envs = ppo_framestack.Envs(
        [lambda: ENVS[name](args.episode_length) for _ in range(args.num_envs)]
    )
    agent = ppo_framestack.Agent(envs.leaves, envs.action_space, script)
    memory = ppo_framestack.Memory(agent, envs.leaves, args.num_envs, script)
    rng, step = np.random.default_rng(1), envs.reset(1)
    with torch.no_grad():
        for t in range(2 * args.num_steps):
            if t % args.num_steps == 0:
                memory.begin()
            action, *_ = memory.act(step)
            step = envs.step(agent.head.env_actions(action, step.obs.counts))
    storage, num = memory.storage, args.num_steps * args.num_envs
    batches = [rng.permutation(num)[: num // 4] for _ in range(8)]  # steps of the rollout
    reads = np.concatenate(memory.reads)  # [num, 16], 1 + number of a step, 0 for none
    (shown,) = memory.tables.keys() - {"actions", "rewards"}
    table = memory.tables[shown]

    if "graph" in name:
        # Observation 16 b + s is view s of step b
        stacked = ppo_framestack.Storage(storage.leaves, CPU)
        rows, whole = reads.ravel(), storage.whole()
        full = storage.gather(rows[rows > 0] - 1)[0]
        values = []
        for leaf in storage.leaves:
            values.append(full[leaf.path].values)
        counts = {"": np.ones_like(rows)}
        for group in whole.counts.keys() - {""}:
            num_rows = whole.counts[group][np.maximum(rows - 1, 0)]
            counts[group] = np.where(rows == 0, 0, num_rows)
        stacked.blocks = [ppo_framestack.Flat(values, counts)]
        bytes_stacked = used_bytes(stacked)

        def by_index(batch):
            read = np.unique(reads[batch])
            return storage.gather(read[read > 0] - 1)[0]

        def by_stack(batch):
            return stacked.gather((batch[:, None] * 16 + np.arange(16)).ravel())[0]
    else:

        def views_of(rows):
            numbers = torch.from_numpy(rows)
            return ppo_framestack.select_rows(table, numbers.flatten()).unflatten(0, rows.shape)

        def by_index(batch):
            return views_of(reads[batch])

        stacked = views_of(reads)
        bytes_stacked = stacked.nbytes

        def by_stack(batch):
            return ppo_framestack.select_rows(stacked, torch.from_numpy(batch))

        assert all(torch.equal(by_index(batch), by_stack(batch)) for batch in batches)
    turns = iter(np.tile(np.arange(8), 10**5))
    gathers = [lambda: by_index(batches[next(turns)]), lambda: by_stack(batches[next(turns)])]
    us = median_us(gathers, args.repeats, calls=8)
    stored = used_bytes(storage)
    encodings = table[1 : 1 + memory.size].nbytes
    if shown != "obs":  # the images themselves
        stored, encodings = stored + encodings, 0
    return stored / memory.size, stored / num, encodings / num, bytes_stacked / num, *us


def main(args: Args) -> None:
    torch.set_num_threads(1)
    lines = [
        f"{args.num_envs} environments x {args.num_steps} steps, 16 views, a minibatch of a "
        "quarter, one thread.",
        "",
        "| observation | bytes per step, no memory | views | encodings | stacked | stacked / views "
        "| gather views, us | gather stacked, us | stacked / views |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in ENVS:
        plain, views, encodings, stacked, us, stacked_us = measure(name, args)
        lines.append(
            f"| {name} | {plain:,.0f} | {views:,.0f} | {encodings:,.0f} | {stacked:,.0f} | "
            f"{stacked / views:.1f} | {us:,.0f} | {stacked_us:,.0f} | {stacked_us / us:.2f} |"
        )
    report("\n".join(lines), args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
