"""What a static graph costs whose features change: each step is stored with its links, and how much
is that?

    python benchmark/speed/static_graph.py --out benchmark/results/speed/static_graph.md

Trains ppo_graph.py for two updates on a graph that stays the same (100 nodes with 8 features,
`--num-envs` 64 x `--num-steps` 128) and writes the bytes that are stored, those of them that are
links, and the largest resident memory of the process; sharing the links between the steps would
save the links of the rollout and nothing else.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro
from gymnasium import spaces


class StaticGraphEnv(gym.Env):
    """A random graph with `num_edges` links that stay, and random features; all actions are worth
    nothing."""

    def __init__(self, num_nodes=100, num_edges=400):
        rng = np.random.default_rng(0)
        self.num_nodes, self.links = num_nodes, rng.integers(num_nodes, size=(num_edges, 2))
        self.observation_space = spaces.Graph(spaces.Box(-np.inf, np.inf, (8,), np.float32), None)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        return self.observe(), 0.0, self.steps == 50, False, {}

    def observe(self):
        nodes = self.np_random.standard_normal((self.num_nodes, 8), np.float32)
        return spaces.GraphInstance(nodes, None, self.links)


gym.register("StaticGraph-v0", entry_point=StaticGraphEnv)


@dataclass
class Args:
    edges: tuple[int, ...] = (0, 400, 2000)
    """links of the graph, one row of the table each"""
    num_envs: int = 64
    """environments"""
    num_steps: int = 128
    """steps of the rollout per environment"""
    num_minibatches: int = 16
    """minibatches"""
    out: str | None = None
    """file that receives the same markdown, below the command and the machine"""


def main(args: Args) -> None:
    from common import PPO_GRAPH, report, train  # not where an environment is all that is wanted

    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    size = args.num_envs * args.num_steps
    lines = [
        "| links | bytes per step | of which links | rollout, MB | of which links | peak memory, "
        "MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for num in args.edges:
        env = StaticGraphEnv(num_edges=num)
        links = env.links.size * 4
        stored = env.reset(seed=0)[0].nodes.nbytes + links
        with tempfile.TemporaryDirectory() as cwd:
            run = train(
                [
                    sys.executable,
                    PPO_GRAPH,
                    "--env-id",
                    "static_graph:StaticGraph-v0",
                    "--env-kwargs",
                    f'{{"num_edges": {num}}}',
                    "--num-envs",
                    str(args.num_envs),
                    "--num-steps",
                    str(args.num_steps),
                    "--num-minibatches",
                    str(args.num_minibatches),
                    "--update-epochs",
                    "1",
                    "--total-timesteps",
                    str(2 * size),
                    "--eval-episodes",
                    "0",
                ],
                1,
                cwd,
            )
        lines.append(
            f"| {num:,} | {stored:,} | {links:,} | {stored * size / 1e6:.0f} | "
            f"{links * size / 1e6:.0f} | {run.peak_mb:,.0f} |"
        )
    report(
        "\n".join(
            [
                "# A static graph",
                "",
                *lines,
                "",
                f"100 nodes with 8 features; {args.num_envs} environments x {args.num_steps} "
                f"steps, minibatches of {size // args.num_minibatches}, default network, two "
                "updates. Links are stored with every step; shared between steps they would take "
                "no memory, which is all that sharing saves. Peak memory: largest resident memory "
                "of the process.",
            ]
        ),
        args.out,
    )


if __name__ == "__main__":
    main(tyro.cli(Args))
